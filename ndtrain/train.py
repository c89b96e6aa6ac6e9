"""`python -m ndtrain.train`: wires the rooms, owns the loop and the signals.

torchrun --nproc-per-node 2 -m ndtrain.train recipe=llama_small mesh.fsdp=2
python -m ndtrain.train --cfg job recipe=llama_small        # shows the resolved config
"""

import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ndtrain import checkpoint, cost, schedule
from ndtrain.checkpoint import CheckpointError, DamagedCheckpoint, State
from ndtrain.config import (
    Config,
    ConfigError,
    check_overrides,
    conf_dir,
    load_config,
    register,
    resolve,
    to_config,
    to_yaml,
    world_from_env,
)
from ndtrain.data import Data, Prefetcher, Sequences, microbatches, open_data, rows_of
from ndtrain.layout import BATCH_AXES
from ndtrain.mesh import Mesh, MeshSpec
from ndtrain.metrics import Metrics, keep_freed_memory, peak_flops, peak_memory_bytes, reset_peak_memory
from ndtrain.metrics.trace import Trace, traced
from ndtrain.model.hf import from_hf, read_hf_config
from ndtrain.parallel.apply import DTYPES, Stages, build_stages, initialise, sequence_cut
from ndtrain.step import StepReport, TrainingStep

log = logging.getLogger("ndtrain")
log.addHandler(logging.NullHandler())  # an error before there is a log file is not printed twice
REPEAT_S = 2.0  # the same Ctrl-C reaches a rank from the terminal and again from torchrun
PATIENCE_S = 5.0  # how long a rank that lost a peer lets that one speak, and the launcher end them all
TRACED = 3  # which step of a process train.trace shows: in the first two, memory is still being laid out


class StopRequest:
    """SIGINT, SIGTERM and SIGUSR1 ask for a stop after a step; a later second one ends the process at once."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self._at = 0.0
        self._before = {s: signal.signal(s, self._on) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}

    def _on(self, number: int, frame) -> None:
        if self.signal is not None and time.monotonic() - self._at > REPEAT_S:
            os._exit(128 + number)
        if self.signal is None:
            self.signal, self._at = signal.Signals(number).name, time.monotonic()

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


@dataclass
class Run:
    """Everything one rank's loop works with."""

    cfg: Config
    mesh: Mesh
    stages: Stages
    step: TrainingStep
    data: Data
    state: State
    stop: StopRequest
    metrics: Metrics | None  # on rank 0
    saved: Path | None = None
    failed_saves: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        log.info(text)
        if self.metrics:
            self.metrics.note(text)

    def warn(self, text: str) -> None:
        log.warning(text)
        if self.metrics:
            self.metrics.warn(text)


# ---------------------------------------------------------------------------------------------------------- set-up


def train(cfg: Config) -> int:
    """Trains as configured; the process's exit status.

    Raises:
        ConfigError: the run cannot start; one line says why.
    """
    rank, local_rank, world = world_from_env()
    if cfg.init_from:
        cfg.model = from_hf(read_hf_config(Path(cfg.init_from)), name=Path(cfg.init_from).name)
    resolve(cfg, world)
    run_dir = Path(cfg.run.dir)
    path, state = prepare_run_folder(cfg, run_dir) if rank == 0 else (None, None)
    _log_to(run_dir, rank)
    data = open_data(cfg)
    device = _device(cfg, local_rank)
    keep_freed_memory()
    if world > 1:
        options = {"device_id": device} if device.type == "cuda" else {}
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=cfg.hardware.timeout_s), **options)
    stop = StopRequest()  # not before: a rank that waits for one that failed must die of the launcher's SIGTERM
    metrics = None
    try:
        mesh = Mesh(MeshSpec.of(cfg.mesh), rank, device)
        stages = build_stages(cfg, mesh)
        step = TrainingStep(cfg, mesh, stages)
        path, state = _start(cfg, mesh, stages, path, state, data)
        metrics = _metrics(cfg, run_dir, state, step, device) if rank == 0 else None
        run = Run(cfg, mesh, stages, step, data, state, stop, metrics)
        _say_start(run, path)
        loop(run)
        code = _say_end(run)
        if metrics:
            metrics.close(code)
        if dist.is_initialized():
            dist.destroy_process_group()
        return code
    except BaseException as error:
        log.exception("rank %d failed", rank)
        stop.restore()
        if world > 1 and not isinstance(error, ConfigError):
            _say_failure(error, stop)
            raise SystemExit(1) from error
        raise
    finally:  # no process group is destroyed on an error: gloo would wait for what peers will never send
        if metrics:
            metrics.close(1)
        stop.restore()


def _say_failure(error: BaseException, stop: StopRequest) -> None:
    """The traceback, at once; but a rank that only lost a peer waits, so that the rank at fault is heard first. The
    launcher ends it meanwhile, or had begun to before the loss came to light."""
    if _lost_a_peer(error):
        if stop.signal:
            print(f"rank {world_from_env()[0]}: stopped by {stop.signal}, and a peer has left", file=sys.stderr)
            return
        time.sleep(PATIENCE_S)
    sys.excepthook(type(error), error, error.__traceback__)


def _lost_a_peer(error: BaseException) -> bool:
    """Whether an error says no more than that another rank does not answer. Gloo's are known by their source file."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))


def prepare_run_folder(cfg: Config, run_dir: Path) -> tuple[Path | None, State | None]:
    """On one rank, before any process group: the folder exists, can be written, and holds no run that this one would
    overwrite. Returns the checkpoint to resume, with its state.

    Raises:
        ConfigError: naming `run.dir` or `resume`.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=run_dir).close()  # says what the system says, also of a read-only file system
        held = (run_dir / "metrics.jsonl").exists() or bool(checkpoint.list_checkpoints(run_dir / "checkpoints"))
        if cfg.resume == "none" and held:
            raise ConfigError(
                f"run.dir={run_dir} already holds a run: continue it with resume=auto, or give another run.dir"
            )
        found = _choose(cfg, run_dir)
        (run_dir / "config.yaml").write_text(to_yaml(cfg))
        return found
    except OSError as error:
        raise ConfigError(f"run.dir={run_dir} cannot be written ({error.strerror}): give another run.dir") from error


def _choose(cfg: Config, run_dir: Path) -> tuple[Path | None, State | None]:
    """The best checkpoint that `resume` may mean; nothing for a fresh start."""
    options = checkpoint.candidates(cfg.resume, run_dir)
    return _first_whole(options, cfg) if options else (None, None)


def _first_whole(options: list[Path], cfg: Config) -> tuple[Path, State]:
    """The first that is whole; damaged ones are named and, with resume=auto, passed over."""
    for path in options:
        try:
            return path, checkpoint.inspect(path, cfg.model)
        except DamagedCheckpoint as error:
            _pass_over(error, cfg)
    raise CheckpointError(
        f"resume=auto: every checkpoint in {cfg.run.dir}/checkpoints is damaged; another run.dir starts anew"
    )


def _pass_over(error: DamagedCheckpoint, cfg: Config) -> None:
    if cfg.resume != "auto":
        raise error
    if world_from_env()[0] == 0:
        print(f"warning: {error}; trying the one before it", file=sys.stderr)


def _start(
    cfg: Config, mesh: Mesh, stages: Stages, path: Path | None, state: State | None, data: Data
) -> tuple[Path | None, State]:
    """Fills the stages: from rank 0's checkpoint (or, with resume=auto, an older one if its content is damaged), from a
    Hugging Face folder, or from the seed."""
    if mesh.world is not None:
        chosen = [(path, state)]
        dist.broadcast_object_list(chosen, src=0)
        path, state = chosen[0]
    while path is not None:
        try:
            checkpoint.load(path, stages, mesh)
            if mesh.rank == 0 and path.parent.resolve() == (Path(cfg.run.dir) / "checkpoints").resolve():
                checkpoint.set_aside_later(path)
            return path, state
        except DamagedCheckpoint as error:
            _pass_over(error, cfg)
            older = [p for p in checkpoint.list_checkpoints(path.parent) if p.name < path.name]
            path, state = _first_whole(older, cfg)
    if cfg.init_from:
        checkpoint.load_weights(Path(cfg.init_from), stages, mesh)
    else:
        initialise(stages, cfg)
    return None, State(step=0, tokens=0, order=_order(cfg, data))


def _metrics(cfg: Config, run_dir: Path, state: State, step: TrainingStep, device: torch.device) -> Metrics:
    m, t = cfg.model, cfg.train
    return Metrics(
        cfg,
        run_dir,
        start_step=state.step,
        flops_per_token=cost.flops_per_token(m, t.seq_len),
        hardware_flops_per_token=cost.hardware_flops_per_token(m, t.seq_len, step.spared),
        peak_flops_per_device=peak_flops(cfg.hardware, device.type, DTYPES[cfg.precision.compute]),
        world_size=MeshSpec.of(cfg.mesh).world_size,
        resume=state.step > 0,
    )


def _device(cfg: Config, local_rank: int) -> torch.device:
    kind = cfg.hardware.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "hardware.device=cuda: this machine has no CUDA device that torch can use; set it to cpu or auto"
        )
    here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if here > gpus:
        raise ConfigError(f"{here} ranks on this host but {gpus} GPUs: lower --nproc-per-node to {gpus}")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _log_to(run_dir: Path, rank: int) -> None:
    """Every rank keeps a log of its own in the run folder."""
    folder = run_dir / "logs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handler: logging.Handler = logging.FileHandler(folder / f"rank-{rank}.log")
    except OSError:
        handler = logging.NullHandler()  # rank 0 has said that the folder cannot be written, or will see it later
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for old in log.handlers[:]:
        log.removeHandler(old)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


def _say_start(run: Run, path: Path | None) -> None:
    cfg, mesh = run.cfg, run.mesh
    sizes = " ".join(f"{a}={mesh.size(a)}" for a in mesh.spec.order if mesh.size(a) > 1) or "one process"
    origin = (
        f"resumed {path} at step {run.state.step}"
        if path
        else f"init_from={cfg.init_from}"
        if cfg.init_from
        else f"seed {cfg.run.seed}"
    )
    run.note(
        f"{cfg.run.name}: {cost.parameter_count(cfg.model):,} parameters, {len(run.data.train):,} training tokens, "
        f"mesh {sizes}, {_pipeline(run)}zero={cfg.mesh.zero}, {cfg.precision.compute} on {mesh.device.type}, "
        f"{origin}; run folder {cfg.run.dir}"
    )
    now = _order(cfg, run.data)
    changed = [key for key, value in now.items() if run.state.order.get(key) != value]
    if changed:
        run.warn(f"{', '.join(changed)} changed since the checkpoint: from here on the data order is another one")
        run.state.order = now


def _pipeline(run: Run) -> str:
    """The schedule in words; nothing where there is no pipeline."""
    if run.mesh.size("pp") == 1:
        return ""
    table = run.stages.placement.schedule
    return f"{table.name}, {table.microbatches} microbatches, bubble {100 * schedule.simulate(table).bubble:.0f} %, "


def _order(cfg: Config, data: Data) -> dict[str, Any]:
    """All that the tokens of a step, and which of them count, depend on."""
    return {
        "corpus": data.fingerprint,
        "run.seed": cfg.run.seed,
        "train.seq_len": cfg.train.seq_len,
        "train.global_batch": cfg.train.global_batch,
        "data.shuffle": cfg.data.shuffle,
        "data.pack": _packed_at(cfg, data),
    }


def _packed_at(cfg: Config, data: Data) -> int | None:
    """The token that the documents of a sequence are told apart by; None without packing."""
    return data.eos_id if cfg.data.pack else None


# ------------------------------------------------------------------------------------------------------------- loop


def loop(run: Run) -> None:
    """Steps from where the state stands to the end of the plan or a stop."""
    cfg, mesh = run.cfg, run.mesh
    t = cfg.train
    last = t.steps if t.stop_at is None else t.stop_at
    sequences = Sequences(run.data.train, t.seq_len, t.global_batch, cfg.run.seed, cfg.data.shuffle)
    rows = rows_of(mesh.index(*BATCH_AXES), mesh.size(*BATCH_AXES), t.global_batch)
    cut, eos = sequence_cut(cfg), _packed_at(cfg, run.data)
    make = lambda s: microbatches(sequences, s, rows, t.micro_batch, cut, mesh.index("cp"), eos)
    prefetcher = Prefetcher(make, run.state.step, last, cfg.data.prefetch, pin=mesh.device.type == "cuda")
    reset_peak_memory(mesh.device)
    read_previous: Callable[[], bool] = lambda: False
    to_trace = min(run.state.step + TRACED, last) if t.trace else None
    try:
        while run.state.step < last:
            began = time.perf_counter()
            report, trace = _launch(run, prefetcher, run.state.step + 1 == to_trace)
            stop = read_previous()  # late: on a GPU this step is queued before the host waits for the one before
            seconds = time.perf_counter() - began
            read_previous = partial(_read, run, report, run.state.tokens, seconds)
            due = run.state.step == last or (cfg.checkpoint.every and run.state.step % cfg.checkpoint.every == 0)
            if stop or due or mesh.device.type == "cpu":
                stop |= read_previous()
                read_previous = lambda: False
            if trace:
                _show(run, trace)
            if stop or due:
                _save(run)
            if stop:
                break
    finally:
        prefetcher.close()


def _launch(run: Run, prefetcher: Prefetcher, trace: bool) -> tuple[Callable[[], StepReport], Trace | None]:
    """Makes the next step; what gives its report, and its trace if asked for (on rank 0)."""
    batches, waited = prefetcher.get(run.state.step)
    batches = [b.to(run.mesh.device) for b in batches]
    signals = lambda: (float(run.stop.signal is not None), float(peak_memory_bytes(run.mesh.device)), waited)
    number = run.state.step + 1
    work = partial(run.step.run, number, batches, signals)
    found = traced(work, number, run.step.executor, run.mesh) if trace else (work(), None)
    run.state.step = number
    run.state.tokens += run.cfg.train.global_batch * run.cfg.train.seq_len
    return found


def _show(run: Run, trace: Trace) -> None:
    try:
        trace.write(Path(run.cfg.run.dir) / "trace")
        run.note(trace.summary())
    except OSError as error:
        run.warn(f"trace of step {trace.step} not written: {error.strerror}")


def _read(run: Run, report: Callable[[], StepReport], tokens: int, seconds: float) -> bool:
    """Logs a step. Whether some rank had been asked to stop by its end: the same answer on every rank."""
    found = report()
    _log_step(run, found, tokens, seconds)
    return bool(found.signals[:, 0].any())


def _log_step(run: Run, report: StepReport, tokens: int, seconds: float) -> None:
    if run.metrics is None:
        return
    _, memory, waited = report.signals.max(dim=0).values.tolist()
    run.metrics.log(
        step=report.step,
        loss=report.loss,
        grad_norm=report.grad_norm,
        lr=report.lr,
        tokens=tokens,
        step_tokens=report.tokens,
        step_time_s=seconds,
        data_wait_s=waited,
        peak_memory_bytes=int(memory),
    )


def _save(run: Run) -> None:
    """A checkpoint of the current state; where it fails, training goes on with the older ones."""
    folder = Path(run.cfg.run.dir) / "checkpoints"
    extras = run.data.tokenizer.save if run.data.tokenizer else lambda folder: None
    try:
        run.saved = checkpoint.save(folder, run.stages, run.mesh, run.cfg, run.state, extras)
        log.info("saved %s", run.saved)
    except CheckpointError as error:
        run.failed_saves.append(str(error))
        run.warn(str(error))


def _say_end(run: Run) -> int:
    """The last lines of a run; its exit status: 0, or 1 where the last state could not be saved."""
    step, total = run.state.step, run.cfg.train.steps
    at_end = run.saved is not None and run.saved.name.endswith(f"{step:08d}")
    why = f"stopped by {run.stop.signal} after" if run.stop.signal else "finished" if step == total else "stopped at"
    if run.saved is None and not run.failed_saves:
        run.note(f"nothing to do: the run stands at step {step} of {total}")
        return 0
    run.note(
        f"{why} step {step} of {total}: "
        + (f"saved {run.saved}" if at_end else f"the newest checkpoint is {run.saved}")
    )
    return 0 if at_end else 1


# ------------------------------------------------------------------------------------------------------ command line


# Hydra's flags, and whether a value follows
_FLAGS = {
    "--cfg": True, "-c": True, "--package": True, "-p": True, "--info": True, "-i": True, "--multirun": False,
    "-m": False, "--run": False, "-r": False, "--resolve": False, "--help": False, "-h": False, "--hydra-help": False,
    "--version": False,
}  # fmt: skip


def main(args: list[str] | None = None) -> int:
    """Hydra's own flags (`--cfg job`, `--multirun`, `--help`) go to Hydra; a plain run is composed here. Every error
    of the user's is one line and status 2."""
    args = sys.argv[1:] if args is None else args
    try:
        overrides, search, flags = _split(args)
        if flags:
            overrides = check_overrides(overrides, search)
            return _hydra_main([*flags, *(f"--config-dir={s}" for s in search[:1]), *overrides])
        return train(load_config(overrides, search))
    except ConfigError as error:
        _say_error(error)
        return 2
    except KeyboardInterrupt:
        print("interrupted before the first step: nothing was saved", file=sys.stderr, flush=True)
        return 130


def _say_error(error: ConfigError) -> None:
    """Once per host: its ranks mostly meet the same error, and torchrun ends all when the first one leaves. So the
    others give local rank 0 time to say it, and speak only if they are then still there."""
    rank, local_rank, _ = world_from_env()
    log.error(str(error))
    if local_rank > 0:
        time.sleep(REPEAT_S * 3)
    print(f"error: {error}" if rank == 0 else f"error (rank {rank}): {error}", file=sys.stderr, flush=True)


def _split(args: list[str]) -> tuple[list[str], list[str], list[str]]:
    """(overrides, folders named by --config-dir, Hydra's other flags with their values)"""
    overrides, search, flags = [], [], []
    rest = iter(args)
    for arg in rest:
        name, equals, value = arg.partition("=")
        if name in ("--config-dir", "-cd"):
            search.append(value if equals else _value(arg, rest))
            if not Path(search[-1]).is_dir():
                raise ConfigError(f"{name}={search[-1]}: no such folder")
        elif name in _FLAGS:
            flags += [arg, _value(arg, rest)] if _FLAGS[name] and not equals else [arg]
        elif arg.startswith("-"):
            raise ConfigError(
                f"{arg}: no such flag; known: --config-dir, {', '.join(f for f in _FLAGS if f[:2] == '--')}"
            )
        else:
            overrides.append(arg)
    return overrides, search, flags


def _value(flag: str, rest: Iterator[str]) -> str:
    try:
        return next(rest)
    except StopIteration:
        raise ConfigError(f"{flag}: a value must follow") from None


def _hydra_main(args: list[str]) -> int:
    import hydra

    register()
    codes: list[int] = []

    def task(cfg: Any) -> None:
        try:
            codes.append(train(to_config(cfg)))
        except ConfigError as error:  # here: Hydra would print a traceback
            _say_error(error)
            codes.append(2)

    sys.argv[1:] = args
    hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(task)()
    return max(codes, default=0)


def _run_and_exit() -> NoReturn:
    """Leaves without Python's own teardown where there were process groups: gloo's threads abort about every second
    run in it, and after an error it waits for peers that will never answer."""
    if world_from_env()[2] == 1:
        sys.exit(main())
    code: Any = 1
    try:
        code = main()
    except SystemExit as request:
        code = request.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    _run_and_exit()
