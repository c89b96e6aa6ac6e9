"""The Trainer's callbacks: the work besides the steps, such as logging, evaluation, checkpoints, profile and trace."""

import logging
import time
from collections import deque
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

from ndtrain.checkpoint import Saved, Saver
from ndtrain.checkpoint.companions import Companions
from ndtrain.config import Config
from ndtrain.config.store import checkpoint_folder
from ndtrain.engine.callback import DATA_WAIT, MEMORY, Callback, Run, due
from ndtrain.engine.start import turn_end_warning, write_extras
from ndtrain.engine.trace import Trace, Tracer
from ndtrain.engine.train_step import StepReport
from ndtrain.engine.validation import Validation
from ndtrain.mesh.collectives import all_gather_around
from ndtrain.mesh.flight_recorder import RECORDER
from ndtrain.mesh.host_device import Readback, upload
from ndtrain.mesh.mesh import Mesh
from ndtrain.model import flops
from ndtrain.observe import Metrics, peak_flops
from ndtrain.observe.profile_window import Profile, Window
from ndtrain.observe.stragglers import WINDOW, Stragglers
from ndtrain.parallel.balance import looks_ahead
from ndtrain.parallel.build import DTYPES

log = logging.getLogger("ndtrain")
TRACED = 3  # step of a process that train.trace records: the first two still allocate memory
NAMED = 16  # maximum number of sequences that the message of a skipped step names


class ProfileCallback(Callback):
    """Records the steps of `train.profile` with PyTorch's profiler."""

    def on_train_start(self) -> None:
        trainer = self.trainer
        steps, done = trainer.cfg.train.profiled, trainer.state.step
        if steps and steps[0] <= done:
            trainer.warn(
                f"train.profile={trainer.cfg.train.profile}: the run is already at step {done}: choose later steps"
            )
        self._window = Window(steps, trainer.mesh)

    def before_step(self) -> None:
        write_recording(self.trainer, self._window.turn(self.trainer.state.step + 1))

    def on_train_end(self) -> None:
        write_recording(self.trainer, self._window.turn(None))

    def close(self) -> None:
        self._window.close()


class TraceCallback(Callback):
    """Writes the timeline of one step (`train.trace`)."""

    def on_train_start(self) -> None:
        trainer = self.trainer
        self._at = min(trainer.state.step + TRACED, trainer.last_step) if trainer.cfg.train.trace else None
        self._tracer: Tracer | None = None
        self._trace: Trace | None = None

    def before_step(self) -> None:
        if self.trainer.state.step + 1 == self._at:
            self._tracer = Tracer(self.trainer.train_step, self.trainer.mesh)

    def after_step(self) -> dict[str, float]:
        if self._tracer:
            self._trace, self._tracer = self._tracer.finish(self.trainer.state.step), None
        return {}

    def on_step_end(self) -> None:
        write_recording(self.trainer, self._trace)
        self._trace = None


def write_recording(trainer: Run, recording: Trace | Profile | None) -> None:
    """Write a trace or a profile to the run folder, and print its summary."""
    if recording is None:
        return
    try:
        recording.write(Path(trainer.cfg.run.dir) / recording.folder)
    except OSError as error:
        trainer.warn(f"{recording} not written: {error.strerror}")
    trainer.note(recording.summary())


class OwnershipCallback(Callback):
    """Ends this run before it writes, if another run has taken over its folder. It has to be the first callback."""

    def on_report(self, report: StepReport, metrics: dict[str, float]) -> None:
        self._check()

    def on_step_end(self) -> None:
        self._check()

    def on_train_end(self) -> None:
        self._check()

    def _check(self) -> None:
        if self.trainer.mesh.rank == 0:
            self.trainer.claim.check()


class NonFiniteCallback(Callback):
    """Counts the steps that were skipped because their loss or gradient was not finite.

    It ends the run after `train.max_skipped` skipped steps in a row.
    """

    def __init__(self) -> None:
        self._in_a_row = 0

    def on_report(self, report: StepReport, metrics: dict[str, float]) -> None:
        trainer = self.trainer
        self._in_a_row = self._in_a_row + 1 if report.skipped else 0
        if report.skipped:
            trainer.state.skipped += 1
            numbers = f"loss {report.loss:.4g}, grad_norm {report.grad_norm:.4g}"
            trainer.warn(f"step {report.step} skipped: {numbers}; {self._sequences(report.step)}")
        if self._in_a_row >= trainer.cfg.train.max_skipped:
            trainer.failure = (
                f"{self._in_a_row} steps in a row were skipped (train.max_skipped); the last one had "
                f"{self._sequences(report.step)}"
            )

    def _sequences(self, step: int) -> str:
        """Return the names of a step's sequences as text, grouped by corpus."""
        rows = range(self.trainer.cfg.train.batch_sizes.at(step - 1))
        of: dict[str, list[str]] = {}
        for i in rows[:NAMED]:
            where = self.trainer.source.where(step - 1, i)
            sequence, _, corpus = where.removeprefix("sequence ").partition(" of ")
            of.setdefault(corpus, []).append(sequence)
        names = "; ".join(f"sequence {', '.join(numbers)} of {corpus}" for corpus, numbers in of.items())
        return names + f" and {len(rows) - NAMED} more" * (len(rows) > NAMED)


class EvaluationCallback(Callback):
    """Computes the loss of the whole validation split, every `train.eval_every` steps and after the last one."""

    def on_train_start(self) -> None:
        trainer = self.trainer
        if trainer.cfg.train.eval_every:
            self._validation = Validation(trainer.cfg, trainer.mesh, trainer.stages, trainer.data)

    def needs_report(self) -> bool:
        step, every = self.trainer.state.step, self.trainer.cfg.train.eval_every
        return bool(every) and (step == self.trainer.last_step or due(every, step))

    def after_step(self) -> dict[str, float]:
        if not self.needs_report():
            return {}
        began = time.perf_counter()
        loss = self._validation.run().loss
        return {"eval_loss": loss, "eval_time_s": time.perf_counter() - began}


class StragglersCallback(Callback):
    """Warns about slow ranks. Every `WINDOW` steps the ranks exchange for how long they are busy in a step."""

    def on_train_start(self) -> None:
        self._stragglers = Stragglers(self.trainer.mesh.spec)
        self._busy: deque[float] = deque(maxlen=WINDOW)
        self._gathered: Readback | None = None

    def after_step(self) -> dict[str, float]:
        self._busy.append(RECORDER.busy())
        self._read()
        if due(WINDOW, self.trainer.state.step) and len(self._busy) == WINDOW:
            mesh = self.trainer.mesh
            rows, work = all_gather_around(upload([median(self._busy)], mesh.device), mesh.world)
            self._gathered = Readback(work, rows)
        return {}

    def on_train_end(self) -> None:
        self._read()

    def _read(self) -> None:
        """Compare the ranks by the numbers that were exchanged after the step before."""
        if self._gathered is None:
            return
        (busy,), self._gathered = self._gathered.wait("how long the ranks are busy"), None
        if self.trainer.mesh.rank == 0:
            for text in self._stragglers.compare(busy.flatten().tolist()):
                self.trainer.warn(text)


class LoggingCallback(Callback):
    """Logs each step on rank 0, to metrics.jsonl, the logger and the console."""

    def __init__(self, metrics: Metrics | None):
        self._metrics = metrics

    def on_train_start(self) -> None:
        self._resumed = {"resumed_step": self.trainer.state.step} if self.trainer.state.step else {}

    def on_report(self, report: StepReport, metrics: dict[str, float]) -> None:
        if self._metrics is None:
            return
        largest = report.signals.tolist()
        numbers: dict[str, Any] = report.numbers | self._ran_again(report) | metrics
        self._metrics.log(
            step=report.step,
            loss=report.loss,
            grad_norm=report.grad_norm,
            lr=report.lr,
            step_tokens=report.tokens,
            data_wait_s=largest[DATA_WAIT],
            peak_memory_bytes=int(largest[MEMORY]),
            skipped_steps=self.trainer.state.skipped,
            **self._resumed,
            **numbers,
        )
        self._resumed = {}  # only the first row after a resume contains it
        if "eval_loss" in metrics:
            text = f"eval_loss {metrics['eval_loss']:.4f}  in {metrics['eval_time_s']:.1f} s"
            self.trainer.note(f"step {report.step}  {text}")

    def _ran_again(self, report: StepReport) -> dict[str, int]:
        """Return the number of times that the step was repeated, if `moe.capacity` is set."""
        if report.capacity is None:
            return {}
        if report.reruns:
            text = f"expert capacity exceeded; step repeated with capacity factor {report.capacity:g}"
            self.trainer.note(f"step {report.step}: {text} (moe.capacity)")
        return {"moe/reruns": report.reruns}


def device_peak(cfg: Config, mesh: Mesh, notes: list[str]) -> float | None:
    """Return the peak FLOP/s of a device on rank 0, and None on other ranks.

    If the peak is measured, the other ranks wait, to leave the measurement undisturbed.

    Args:
        notes: list to which messages for the user are appended.
    """
    dtype = DTYPES[cfg.precision.compute]
    peak = peak_flops(cfg.hardware, mesh.device.type, dtype, notes.append) if mesh.rank == 0 else None
    if mesh.world is not None and mesh.device.type == "cpu" and cfg.hardware.peak_tflops is None:
        dist.barrier()
    return peak


def make_metrics(trainer: Run, peak: float) -> Metrics:
    """Create the metrics of a run, on rank 0.

    Args:
        peak: peak FLOP/s of a device.
    """
    cfg, t = trainer.cfg, trainer.cfg.train
    recomputed, ahead = trainer.stages.recompute.skipped_ops, looks_ahead(cfg.model, cfg.moe)
    return Metrics(
        cfg,
        Path(cfg.run.dir),
        start_step=None if cfg.islands.count else trainer.state.step,
        flops_per_token=flops.flops_per_token(cfg.model, t.seq_len),
        hardware_flops_per_token=flops.hardware_flops_per_token(cfg.model, t.seq_len, recomputed, ahead),
        peak_flops_per_device=peak,
        world_size=trainer.mesh.spec.world_size,
        resume=trainer.state.step > 0,
    )


class CheckpointCallback(Callback):
    """Saves every `checkpoint.every` and `checkpoint.keep_every` steps, and when the run ends or is stopped.

    If a save fails, training continues, and the older checkpoints remain.

    Attributes:
        saved: the newest checkpoint that this process has saved.
        failures: the errors of failed saves.
    """

    def __init__(self) -> None:
        self.saved: Path | None = None
        self.failures: list[str] = []

    def on_train_start(self) -> None:
        trainer = self.trainer
        companions = trainer.companions
        for note in companions.notes:
            trainer.warn(note)
        if trainer.mesh.rank == 0 and (warning := turn_end_warning(trainer.data, companions)):
            trainer.warn(warning)
        extras = partial(self._write_extras, trainer, companions)
        self._saver = Saver(checkpoint_folder(trainer.cfg), trainer.stages, trainer.mesh, trainer.cfg, extras)

    @staticmethod
    def _write_extras(trainer: Run, companions: Companions, folder: Path) -> None:
        trainer.claim.check_checkpoints()  # the last check before the checkpoint is published
        write_extras(trainer.data, companions, folder)

    def needs_report(self) -> bool:
        step, c = self.trainer.state.step, self.trainer.cfg.checkpoint
        return step >= self.trainer.last_step or due(c.every, step) or due(c.keep_every, step)

    def on_step_end(self) -> None:
        self._note(self._saver.poll())
        if self.needs_report() or self.trainer.stopping:
            state = self.trainer.state
            state.stream = self.trainer.source.state(state.step)
            self._note(self._saver.save(state))

    def on_train_end(self) -> None:
        self._note(self._saver.wait())

    def _note(self, saves: list[Saved]) -> None:
        for save in saves:
            if save.error:
                self.failures.append(save.error)
                self.trainer.warn(save.error)
                continue
            self.saved = save.path
            text = f"saved {save.path} in {save.seconds:.1f} s, of which training waited {save.seconds_blocked:.2f} s"
            trainer = self.trainer
            ended = trainer.stopping or trainer.state.step >= trainer.last_step
            if ended and save.step == trainer.state.step:
                log.info(text)  # the run's last line names it
            else:
                trainer.note(text)
