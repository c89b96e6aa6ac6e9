"""`python -m ndtrain.train`: wires the rooms.

torchrun --nproc-per-node 2 -m ndtrain.train recipe=llama_small mesh.fsdp=2
python -m ndtrain.train --cfg job recipe=llama_small        # shows the resolved config
"""

import faulthandler
import json
import logging
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from ndtrain import checkpoint, schedule
from ndtrain.checkpoint import Saver, State
from ndtrain.config import Config, ConfigError, resolve, world_from_env
from ndtrain.data import Data, open_data
from ndtrain.distributed.mesh import Mesh, MeshSpec
from ndtrain.engine.initial_state import fill, order_of, prepare_run_folder
from ndtrain.engine.train_step import Evaluation, TrainingStep
from ndtrain.engine.trainer import Run, loop
from ndtrain.metrics import Metrics, keep_freed_memory, peak_flops
from ndtrain.metrics.stragglers import Stragglers
from ndtrain.model import flops
from ndtrain.model.families.hf_config import from_hf, read_hf_config
from ndtrain.parallel.build import DTYPES, build_stages
from ndtrain.runtime import cli, exit_status, rendezvous, stop_signals
from ndtrain.runtime.failure_report import record_failure, report_failure
from ndtrain.runtime.hang_watchdog import Watch
from ndtrain.runtime.stop_signals import StopRequest

log = logging.getLogger("ndtrain")
log.addHandler(logging.NullHandler())  # an error before there is a log file is not printed twice

PART_S = 20.0  # that the ranks' parting may take: 30 s after a signal torchrun kills who is left


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
    stop = StopRequest(start.run_dir / stop_signals.STOP_FILE if start.rank == 0 else None)
    with ExitStack() as closing:  # no process group is destroyed on an error: gloo would wait for what peers never send
        closing.callback(stop.restore)
        try:
            return _train(cfg, start, stop, closing)
        except BaseException as error:
            log.exception("rank %d failed", start.rank)
            stop.restore()
            if start.world > 1 and not isinstance(error, ConfigError):
                report_failure(error, stop, start.run_dir)
                raise SystemExit(1) from error
            with record_failure(start.run_dir):
                raise


def _start(cfg: Config) -> Start:
    """Everything up to the ranks' meeting, with every error that one rank can find alone."""
    rank, local_rank, world = world_from_env()
    notes = _take_over(cfg, rank) if cfg.init_from else []
    resolve(cfg, world)
    run_dir = Path(cfg.run.dir)
    path, state = prepare_run_folder(cfg, run_dir) if rank == 0 else (None, None)
    _log_to(run_dir, rank)
    with record_failure(run_dir):
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
        _part()
    return code


def _part() -> None:
    """Leaves the peers. Should that hang (one rank in hundreds did not come out of it), every thread's stack goes to
    stderr and the process ends. A thread of C sees to it: Python's lock may be what is held."""
    faulthandler.dump_traceback_later(PART_S, exit=True, file=sys.__stderr__)
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


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
        flops_per_token=flops.flops_per_token(m, t.seq_len),
        hardware_flops_per_token=flops.hardware_flops_per_token(m, t.seq_len, step.skipped_ops),
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
        f"{cfg.run.name}: {flops.parameter_count(cfg.model):,} parameters, {run.data.describe()}, "
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


def _say_end(run: Run) -> int:
    """The last lines of a run; its exit status: 0, or 1 where the last state could not be saved or the run gave up."""
    step, total = run.state.step, run.cfg.train.steps
    at_end = run.saved is not None and run.saved.name.endswith(f"{step:08d}")
    idle = run.saved is None and not run.failed_saves
    ended = "stopped" if run.stopped_by and step < (run.cfg.train.stop_at or total) else "finished"
    if run.mesh.rank == 0:
        error = run.failure or ("" if at_end or idle else f"the last state was not saved: {run.failed_saves[-1]}")
        facts = {"signal": run.stopped_by, "step": step, "checkpoint": run.saved and str(run.saved.absolute())}
        exit_status.write(Path(run.cfg.run.dir), "failed" if error else ended, rank=0, error=error or None, **facts)
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


main = partial(cli.main, train)


if __name__ == "__main__":
    cli.run_and_exit(train)
