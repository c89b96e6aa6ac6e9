"""The loop of a run: steps, what is read and said of each, evaluations, saves."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ndtrain.checkpoint import Saved, Saver, State
from ndtrain.config import Config
from ndtrain.data import Data, Prefetcher, Source, microbatches, rows_of
from ndtrain.data.validation import ValidationSet
from ndtrain.distributed.flight_recorder import RECORDER
from ndtrain.distributed.mesh import Mesh
from ndtrain.distributed.sharding import BATCH_AXES
from ndtrain.engine.initial_state import packed_at
from ndtrain.engine.trace import Trace, traced
from ndtrain.engine.train_step import Evaluation, StepReport, TrainingStep
from ndtrain.metrics import Metrics, peak_memory_bytes, reset_peak_memory
from ndtrain.metrics.stragglers import Stragglers
from ndtrain.parallel.build import Stages, sequence_sharding
from ndtrain.profiling.window import Profile, Window
from ndtrain.runtime import stop_signals
from ndtrain.runtime.stop_signals import StopRequest

log = logging.getLogger("ndtrain")
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
    return microbatches(source, step, rows, t.micro_batch, sequence_sharding(cfg), mesh.index("cp"), eos)


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
    run.stopped_by = stop_signals.name(asked[0]) if asked else None
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
