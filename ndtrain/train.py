"""`python -m ndtrain.train`: wires the rooms, owns the loop.

torchrun --nproc-per-node 2 -m ndtrain.train recipe=llama_small mesh.fsdp=2
python -m ndtrain.train --cfg job recipe=llama_small        # shows the resolved config
"""

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from ndtrain import checkpoint, command_line, cost, exit_file, rendezvous, schedule, stopping
from ndtrain.checkpoint import Saved, Saver, State
from ndtrain.config import Config, ConfigError, resolve, world_from_env
from ndtrain.data import Data, Prefetcher, Source, microbatches, open_data, rows_of
from ndtrain.data.validation import ValidationSet
from ndtrain.failing import noted, say_failure
from ndtrain.layout import BATCH_AXES
from ndtrain.mesh import Mesh, MeshSpec
from ndtrain.metrics import Metrics, keep_freed_memory, peak_flops, peak_memory_bytes, reset_peak_memory
from ndtrain.metrics.stragglers import Stragglers
from ndtrain.metrics.trace import Trace, traced
from ndtrain.metrics.window import Profile, Window
from ndtrain.model.hf import from_hf, read_hf_config
from ndtrain.parallel.apply import DTYPES, Stages, build_stages, sequence_cut
from ndtrain.recorder import RECORDER
from ndtrain.start import fill, order_of, packed_at, prepare_run_folder
from ndtrain.step import Evaluation, StepReport, TrainingStep
from ndtrain.stopping import StopRequest
from ndtrain.watch import Watch

log = logging.getLogger("ndtrain")
log.addHandler(logging.NullHandler())  # an error before there is a log file is not printed twice
TRACED = 3  # which step of a process train.trace shows: in the first two, memory is still being laid out
NAMED = 16  # sequences of a skipped step that its message names


@dataclass
class Run:
    """Everything one rank's loop works with."""

    cfg: Config
    mesh: Mesh
    stages: Stages
    step: TrainingStep
    data: Data
    source: Source
    saver: Saver
    state: State
    stop: StopRequest
    metrics: Metrics | None  # on rank 0
    stragglers: Stragglers
    evaluation: Evaluation | None = None
    saved: Path | None = None
    failed_saves: list[str] = field(default_factory=list)
    skipped_in_a_row: int = 0
    stopped_by: str | None = None  # what asked some rank to stop
    failure: str = ""  # why the run ends before its plan, other than by a request

    def note(self, text: str) -> None:
        log.info(text)
        if self.metrics:
            self.metrics.note(text)

    def warn(self, text: str) -> None:
        log.warning(text)
        if self.metrics:
            self.metrics.warn(text)


# ---------------------------------------------------------------------------------------------------------- set-up


@dataclass
class Start:
    """What a rank has before it computes with the others.

    Attributes:
        path, state: on rank 0, the checkpoint to resume.
        notes: what the user is to know.
        connect: another connection to the store at which the ranks met; None: there is one rank.
    """

    rank: int
    world: int
    run_dir: Path
    path: Path | None
    state: State | None
    notes: list[str]
    data: Data
    device: torch.device
    connect: Callable[[], dist.Store] | None


def train(cfg: Config) -> int:
    """Trains as configured; the process's exit status.

    Raises:
        ConfigError: the run cannot start; one line says why.
    """
    start = _start(cfg)
    # not before: a rank that waits for one that failed must die of the launcher's SIGTERM
    stop = StopRequest(start.run_dir / stopping.STOP_FILE if start.rank == 0 else None)
    with ExitStack() as closing:  # no process group is destroyed on an error: gloo would wait for what peers never send
        closing.callback(stop.restore)
        try:
            return _train(cfg, start, stop, closing)
        except BaseException as error:
            log.exception("rank %d failed", start.rank)
            stop.restore()
            if start.world > 1 and not isinstance(error, ConfigError):
                say_failure(error, stop, start.run_dir)
                raise SystemExit(1) from error
            with noted(start.run_dir):
                raise


def _start(cfg: Config) -> Start:
    """Everything up to the ranks' meeting, with every error that one rank can find alone."""
    rank, local_rank, world = world_from_env()
    notes = _take_over(cfg, rank) if cfg.init_from else []
    resolve(cfg, world)
    run_dir = Path(cfg.run.dir)
    path, state = prepare_run_folder(cfg, run_dir) if rank == 0 else (None, None)
    _log_to(run_dir, rank)
    with noted(run_dir):
        data = open_data(cfg)
        _check_validation(cfg, data)
        device = _device(cfg, local_rank)
        keep_freed_memory()
        connect = None
        if world > 1:
            backend = "nccl" if device.type == "cuda" else "gloo"
            connect = rendezvous.join(backend, rank, world, cfg.hardware.timeout_s, device)
    return Start(rank, world, run_dir, path, state, notes, data, device, connect)


def _train(cfg: Config, start: Start, stop: StopRequest, closing: ExitStack) -> int:
    """The rest, on all ranks together."""
    run_dir, data = start.run_dir, start.data
    mesh = Mesh(MeshSpec.of(cfg.mesh), start.rank, start.device)
    if start.connect:
        watch = Watch(start.connect, mesh.spec, start.rank, run_dir, cfg.hardware.timeout_s)
        closing.callback(watch.close)
    stages = build_stages(cfg, mesh)
    step = TrainingStep(cfg, mesh, stages)
    path, state, more = fill(cfg, mesh, stages, start.path, start.state, order_of(cfg, data))
    step.optimizer.skipped.fill_(state.skipped)
    metrics = _metrics(cfg, run_dir, state, step, start.device) if start.rank == 0 else None
    if metrics:
        closing.callback(metrics.close, 1)  # a second close does nothing
    source = data.sequences(cfg, mesh, state.step, state.stream)
    saver = Saver(run_dir / "checkpoints", stages, mesh, cfg, partial(_write_extras, data))
    run = Run(cfg, mesh, stages, step, data, source, saver, state, stop, metrics, Stragglers(mesh.spec))
    run.evaluation = Evaluation(cfg, mesh, stages) if cfg.train.eval_every else None
    _say_start(run, path)
    for note in (*start.notes, *more):
        run.warn(note)
    loop(run)
    code = _say_end(run)
    if metrics:
        metrics.close(code)
    if start.connect:
        watch.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


def _take_over(cfg: Config, rank: int) -> list[str]:
    """The model becomes that of the Hugging Face folder `init_from`, which rank 0 looks through. Returns what the user
    is to know."""
    folder = Path(cfg.init_from)
    cfg.model = from_hf(read_hf_config(folder), name=folder.name)
    notes = checkpoint.check_folder(folder, cfg.model) if rank == 0 else []
    if cfg.data.tokenizer in ("byte", "bpe") and cfg.data.name != "bin" and (folder / "tokenizer.json").exists():
        notes.append(
            f"data.tokenizer={cfg.data.tokenizer} is not the one the weights of init_from={folder} were trained with: "
            f"that is data.tokenizer={folder}"
        )
    return notes


def _write_extras(data: Data, folder: Path) -> None:
    """What `transformers` needs beside the model to make text from a checkpoint."""
    if data.tokenizer:
        data.tokenizer.save(folder)
    if data.eos_id is not None:  # else it takes the end of a text to be Llama's
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": data.eos_id}) + "\n")


def _check_validation(cfg: Config, data: Data) -> None:
    if cfg.train.eval_every and not data.validation:
        raise ConfigError(
            f"train.eval_every={cfg.train.eval_every}: there is nothing to validate on: raise data.validation="
            f"{cfg.data.validation:g}, the fraction of documents held out (data=bin needs data.validation_path, "
            "a stream data.eval_split), or set train.eval_every=0"
        )


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
        if cfg.hardware.attention != "auto":
            raise ConfigError(
                f"hardware.attention={cfg.hardware.attention} is a kernel of GPUs, and this run is on the CPU: "
                "leave it at auto"
            )
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
        f"{cfg.run.name}: {cost.parameter_count(cfg.model):,} parameters, {run.data.describe()}, "
        f"mesh {sizes}, {_pipeline(run)}zero={cfg.mesh.zero}, {cfg.precision.compute} on {mesh.device.type}, "
        f"{origin}; run folder {cfg.run.dir}"
    )
    if run.stages.attention:
        run.note(run.stages.attention)
    now = order_of(cfg, run.data)
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


# ------------------------------------------------------------------------------------------------------------- loop


def loop(run: Run) -> None:
    """Steps from where the state stands to the end of the plan or a stop; on return all that was to be saved is."""
    cfg, mesh = run.cfg, run.mesh
    t = cfg.train
    last = t.steps if t.stop_at is None else t.stop_at
    make = partial(_microbatches, run, run.source)
    prefetcher = Prefetcher(make, run.state.step, last, cfg.data.prefetch, mesh.device)
    reset_peak_memory(mesh.device)
    read_previous: Callable[[], bool] = lambda: False
    to_trace = min(run.state.step + TRACED, last) if t.trace else None
    window = Window(_to_profile(run), mesh)
    try:
        while run.state.step < last:
            _show(run, window.turn(run.state.step + 1))
            began = time.perf_counter()
            report, trace = _launch(run, prefetcher, run.state.step + 1 == to_trace)
            stop = read_previous()  # late: on a GPU this step is queued before the host waits for the one before
            seconds = time.perf_counter() - began
            step = run.state.step
            due = step == last or _every(cfg.checkpoint.every, step) or _every(cfg.checkpoint.keep_every, step)
            evaluated = _evaluate(run) if run.evaluation and (step == last or _every(t.eval_every, step)) else None
            read_previous = partial(_read, run, report, run.state.tokens, seconds, evaluated)
            if stop or due or evaluated is not None or mesh.device.type == "cpu":
                stop |= read_previous()
                read_previous = lambda: False
            _show(run, trace)
            _note_saves(run, run.saver.poll())
            if stop or due:
                _save(run)
            if stop:
                break
        _show(run, window.turn(None))
        _note_saves(run, run.saver.wait())
    finally:
        window.close()
        prefetcher.close()
        run.source.close()


def _every(n: int, step: int) -> bool:
    return bool(n) and step % n == 0


def _microbatches(run: Run, source: Source | ValidationSet, step: int) -> list:
    """This rank's part of the global batch of a step."""
    cfg, mesh, t = run.cfg, run.mesh, run.cfg.train
    rows = rows_of(mesh.index(*BATCH_AXES), mesh.size(*BATCH_AXES), t.global_batch)
    eos = packed_at(cfg, run.data)
    return microbatches(source, step, rows, t.micro_batch, sequence_cut(cfg), mesh.index("cp"), eos)


def _launch(run: Run, prefetcher: Prefetcher, trace: bool) -> tuple[Callable[[], StepReport], Trace | None]:
    """Makes the next step; what gives its report, and its trace if asked for (on rank 0)."""
    with RECORDER.waiting("data"):
        batches, waited = prefetcher.get(run.state.step)
    signals = lambda: (run.stop.asked(), peak_memory_bytes(run.mesh.device), waited, RECORDER.busy())
    number = run.state.step + 1
    work = partial(run.step.run, number, batches, signals)
    found = traced(work, number, run.step.executor, run.mesh) if trace else (work(), None)
    run.state.step = number
    run.state.tokens += run.cfg.train.global_batch * run.cfg.train.seq_len
    return found


def _to_profile(run: Run) -> range:
    """The steps of train.profile that are still to come."""
    steps, done = run.cfg.train.profiled, run.state.step
    if steps and steps[0] <= done:
        run.warn(f"train.profile={run.cfg.train.profile}: the run is at step {done} already")
    return steps


def _show(run: Run, found: Trace | Profile | None) -> None:
    """Writes what was recorded, and says what it came to."""
    if found is None:
        return
    try:
        found.write(Path(run.cfg.run.dir) / found.folder)
    except OSError as error:
        run.warn(f"{found} not written: {error.strerror}")
    run.note(found.summary())


def _evaluate(run: Run) -> dict[str, float]:
    """The loss over the whole validation split, as the metrics name it."""
    began = time.perf_counter()
    cfg, device = run.cfg, run.mesh.device
    held = ValidationSet(run.data.validation, cfg.train.seq_len, cfg.train.global_batch)
    passes = ([b.to(device) for b in map(held.readable, _microbatches(run, held, i))] for i in range(held.passes))
    loss = run.evaluation.run(passes, held.labels(packed_at(cfg, run.data)))
    return {"eval_loss": loss, "eval_time_s": time.perf_counter() - began}


def _read(run: Run, report: Callable[[], StepReport], tokens: int, seconds: float, extra: dict | None) -> bool:
    """Logs a step. Whether the run is to stop after it: the same answer on every rank."""
    found = report()
    run.skipped_in_a_row = run.skipped_in_a_row + 1 if found.skipped else 0
    if found.skipped:
        run.state.skipped += 1
        run.warn(f"step {found.step} skipped: {_not_finite(found)}; {_sequences(run, found.step)}")
    if run.skipped_in_a_row >= run.cfg.train.max_skipped:
        run.failure = f"{run.skipped_in_a_row} steps in a row were skipped (train.max_skipped); the last one worked on "
        run.failure += _sequences(run, found.step)
    _log_step(run, found, tokens, seconds, extra or {})
    if extra:
        run.note(f"step {found.step}  eval_loss {extra['eval_loss']:.4f}  in {extra['eval_time_s']:.1f} s")
    asked = [int(number) for number in found.signals[:, 0] if number]
    run.stopped_by = stopping.name(asked[0]) if asked else None
    return bool(asked) or bool(run.failure)


def _not_finite(report: StepReport) -> str:
    return f"loss {report.loss:.4g}, grad_norm {report.grad_norm:.4g}"


def _sequences(run: Run, step: int) -> str:
    """Which sequences a step worked on, in words, corpus by corpus."""
    rows = range(run.cfg.train.global_batch)
    of: dict[str, list[str]] = {}
    for i in rows[:NAMED]:
        sequence, _, corpus = run.source.where(step - 1, i).removeprefix("sequence ").partition(" of ")
        of.setdefault(corpus, []).append(sequence)
    names = "; ".join(f"sequence {', '.join(numbers)} of {corpus}" for corpus, numbers in of.items())
    return names + f" and {len(rows) - NAMED} more" * (len(rows) > NAMED)


def _log_step(run: Run, report: StepReport, tokens: int, seconds: float, extra: dict[str, float]) -> None:
    if run.metrics is None:
        return
    _, memory, waited, _ = report.signals.max(dim=0).values.tolist()
    for text in run.stragglers.update(report.signals[:, 3].tolist()):
        run.warn(text)
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
        skipped_steps=run.state.skipped,
        **extra,
    )


def _save(run: Run) -> None:
    """A checkpoint of the current state; where it fails, training goes on with the older ones."""
    run.state.stream = run.source.state(run.state.step)
    _note_saves(run, run.saver.save(run.state))


def _note_saves(run: Run, saves: Sequence[Saved]) -> None:
    for saved in saves:
        if saved.error:
            run.failed_saves.append(saved.error)
            run.warn(saved.error)
        else:
            run.saved = saved.path
            log.info(
                "saved %s in %.1f s, of which training waited %.2f s", saved.path, saved.seconds, saved.seconds_blocked
            )


def _say_end(run: Run) -> int:
    """The last lines of a run; its exit status: 0, or 1 where the last state could not be saved or the run gave up."""
    step, total = run.state.step, run.cfg.train.steps
    at_end = run.saved is not None and run.saved.name.endswith(f"{step:08d}")
    idle = run.saved is None and not run.failed_saves
    ended = "stopped" if run.stopped_by and step < (run.cfg.train.stop_at or total) else "finished"
    if run.mesh.rank == 0:
        error = run.failure or ("" if at_end or idle else f"the last state was not saved: {run.failed_saves[-1]}")
        facts = {"signal": run.stopped_by, "step": step, "checkpoint": run.saved and str(run.saved.absolute())}
        exit_file.write(Path(run.cfg.run.dir), "failed" if error else ended, rank=0, error=error or None, **facts)
        if run.stopped_by:
            run.stop.answer()
    if idle:
        run.note(f"nothing to do: the run stands at step {step} of {total}")
        return 0
    why = f"stopped by {run.stopped_by} after" if run.stopped_by else "finished" if step == total else "stopped at"
    run.note(
        f"{why} step {step} of {total}: "
        + (f"saved {run.saved}" if at_end else f"the newest checkpoint is {run.saved}")
    )
    if run.failure and run.mesh.rank == 0:
        print(f"error: {run.failure}", file=sys.stderr, flush=True)
    return 0 if at_end and not run.failure else 1


main = partial(command_line.main, train)


if __name__ == "__main__":
    command_line.run_and_exit(train)
