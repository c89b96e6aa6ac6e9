"""The Trainer: the parts of a run, and the loop over its steps.

cfg = compose("recipe=llama_debug", "mesh.fsdp=2")
Trainer(cfg).train()
"""

import logging
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ndtrain import schedule
from ndtrain.config import Config
from ndtrain.config.island_checks import island_name
from ndtrain.config.registry import plugin_parts
from ndtrain.data import Batch, Prefetcher, Source, Tokens
from ndtrain.engine.callback import ISLANDS, STOP, Callback
from ndtrain.engine.callbacks import (
    CheckpointCallback,
    EvaluationCallback,
    LoggingCallback,
    NonFiniteCallback,
    OwnershipCallback,
    ProfileCallback,
    StragglersCallback,
    TraceCallback,
    device_peak,
    make_metrics,
)
from ndtrain.engine.samples import SampleCallback
from ndtrain.engine.setup import RunSetup, prepare, save_config
from ndtrain.engine.shared_step import SharedStep, StepSum
from ndtrain.engine.start import fill_weights, order_of
from ndtrain.engine.train_step import PendingReport, StepReport, TrainingStep
from ndtrain.engine.validation import rank_batches
from ndtrain.mesh.flight_recorder import RECORDER
from ndtrain.mesh.mesh import EP, Mesh, MeshSpec
from ndtrain.model import flops
from ndtrain.observe import peak_memory_bytes, reset_peak_memory
from ndtrain.parallel.build import build_stages
from ndtrain.program.step import prove_if_short
from ndtrain.run import exit_status, stop_signals
from ndtrain.run.hang_watchdog import HangWatchdog
from ndtrain.run.launcher_report import record_error
from ndtrain.run.rendezvous import Meeting
from ndtrain.run.stop_signals import StopRequest

log = logging.getLogger("ndtrain")


@dataclass(frozen=True)
class Unread:
    """A step whose numbers have not been read yet."""

    report: PendingReport
    metrics: dict[str, float]


class Trainer:
    """The parts of a run on one rank.

    Create one on every rank, and call the same methods in the same order.

    Args:
        cfg: configuration from `compose`. It is resolved and frozen here.
        callbacks: further callbacks, in addition to the callbacks of ndtrain and of plugins.
        setup: the result of `prepare`, if the caller has already called it.
        stop: source of stop requests; None: the Trainer listens to signals and to the stop file itself.

    Attributes:
        model: this rank's part of the model: a `Transformer` for each of its stages, in the order of the stages.
            Without a pipeline there is one, otherwise there are `schedule.chunks`. A parameter has the same name in its
            stage as in the whole model.
        state: step, tokens and data order, which checkpoints contain.
        last_step: the last step of this run: `train.stop_at`, or `train.steps`.
        stopping: True if the run ends after this step, before its planned end.
        stopped_by: the source of the stop request: the name of a signal, "stop file", or "the end of torchrun"; None:
            no request.
        failure: the reason if the run gave up, else empty.
        report: the numbers of the last step that was read.

    Raises:
        ConfigError: the run cannot start; the message is one line.
        LaunchOrderError: a rank of the pipeline would wait forever for a message of another one.
    """

    def __init__(
        self,
        cfg: Config,
        callbacks: Sequence[Callback] = (),
        setup: RunSetup | None = None,
        stop: StopRequest | None = None,
    ):
        self._closing, self._owner = ExitStack(), ExitStack()
        if setup is None:
            setup = prepare(cfg)
            self._owner.callback(setup.claim.release)
        self.cfg, self.data, self.claim = setup.cfg, setup.data, setup.claim
        with ExitStack() as undo:
            undo.push(self._owner)
            self.stop = stop or self._listen(setup)
            self.mesh = Mesh(MeshSpec.of(self.cfg.mesh), setup.rank, setup.device)
            if setup.meeting or (self.cfg.islands.count and setup.world == 1):
                self._closing.callback(self._watchdog(setup).close)
            if setup.rank == 0:
                prove_if_short(self.cfg, setup.device.type)
            self.stages = build_stages(self.cfg, self.mesh)
            self.model = nn.ModuleList(module for _, module in sorted(self.stages.models.items()))
            self.train_step = TrainingStep(self.cfg, self.mesh, self.stages)
            start = fill_weights(setup, self.mesh, self.stages)
            self.resumed, self.state, self.companions, notes = start.path, start.state, start.companions, start.notes
            if setup.rank == 0:
                save_config(setup)
            self.train_step.optimizer.skipped.fill_(self.state.skipped + self.state.reset_at)
            self.last_step = self.cfg.train.stop_at or self.cfg.train.steps
            self.stopping, self.failure, self._restart_helps = False, "", False
            self.stopped_by: str | None = None
            self.report: StepReport | None = None
            self._unread: Unread | None = None
            peak = device_peak(self.cfg, self.mesh, notes)
            if peak is not None:
                self.claim.check()  # weights can take minutes, and metrics.jsonl is cut next
            self.metrics = make_metrics(self, peak) if peak is not None else None
            if self.metrics:
                self._closing.callback(self.metrics.close, 1)  # a second close does nothing
            self.source: Source = self.data.sequences(self.cfg, self.mesh, self.state.step, self.state.stream)
            self.islands = self._join_islands() if self.cfg.islands.count else None
            self.checkpoints = CheckpointCallback()
            self.callbacks = self._make_callbacks(callbacks)
            self._print_start()
            for note in (*setup.notes, *notes):
                self.warn(note)
            undo.pop_all()

    def _watchdog(self, setup: RunSetup) -> HangWatchdog:
        """Start the hang watchdog. An island of one process has one too, because other islands wait for it."""
        deadline_s, on_device = self.cfg.hardware.timeout_s, setup.device.type == "cuda" and setup.world > 1
        island = island_name(self.cfg) if self.cfg.islands.count else ""
        meeting = setup.meeting or Meeting(dist.HashStore(), "one process")
        place = self.mesh.spec, setup.rank, setup.run_dir
        return HangWatchdog(meeting, *place, deadline_s, on_device=on_device, island=island)

    def _join_islands(self) -> SharedStep:
        """Make this run an island. The others may wait for it, and for each other, until the first step."""
        from ndtrain.engine.islands import join_islands  # a run without islands does not load them

        parts = self.cfg, self.mesh, self.train_step, self.data, self.source, self.state, self.resumed
        islands = join_islands(*parts, self.stop.asked, self.note)
        self._closing.callback(islands.close)
        return islands

    def _listen(self, setup: RunSetup) -> StopRequest:
        """Listen to the stop file, and to signals if this is the main thread. Other threads cannot."""
        file = setup.run_dir / stop_signals.STOP_FILE if setup.rank == 0 else None
        stop = StopRequest(file, signals=threading.current_thread() is threading.main_thread())
        self._closing.callback(stop.restore)
        return stop

    def _make_callbacks(self, given: Sequence[Callback]) -> list[Callback]:
        """Create the callbacks in call order. A step is counted and logged before a checkpoint of it is saved."""
        configs = self.cfg.callbacks
        plugins = [p.value(configs[p.name]) if p.config else p.value() for p in plugin_parts("callback")]
        first = [
            StragglersCallback(),
            OwnershipCallback(),
            ProfileCallback(),
            NonFiniteCallback(),
            EvaluationCallback(),
            SampleCallback(),
            LoggingCallback(self.metrics),
        ]
        callbacks = [*first, *plugins, *given, TraceCallback(), self.checkpoints]
        for callback in callbacks:
            callback.trainer = self
        return callbacks

    @property
    def loss(self) -> float | None:
        """The loss of the last step that was read; None before the first."""
        return self.report.loss if self.report else None

    # -------------------------------------------------------------------------------------------------------- the loop

    def train(self) -> int:
        """Train from the current step to the planned end or a stop, save the state, and return the exit status.

        The exit status (`exit_status.CODES`) is 0 at the planned end, and 85 after a stop (0 under torchrun). It is 1
        if the last state could not be saved or the run gave up.

        Raises:
            FolderLost: another run has taken over the run folder.
        """
        with self._owner:  # releases the folder, if this Trainer has claimed it itself
            self._run_steps()
            code, why = self._print_end()
            if self.metrics:
                self.metrics.close(0 if why == "stopped" else code)
        return code

    def _run_steps(self) -> None:
        prefetch = self.cfg.data.prefetch
        make = lambda step: self.microbatches(self.source, step)
        self._prefetcher = None  # the rows of an island are not known in advance
        if self.islands is None:
            self._prefetcher = Prefetcher(make, self.state.step, self.last_step, prefetch, self.mesh.device)
        with ExitStack() as ending:
            ending.callback(self.source.close)
            if self._prefetcher:
                ending.callback(self._prefetcher.close)
            reset_peak_memory(self.mesh.device)
            for callback in self.callbacks:
                callback.on_train_start()
                ending.callback(callback.close)
            while self.state.step < self.last_step and not self.stopping:
                self.step()
            if self.islands and not self.stopping:
                self.islands.wait_for_the_others()
            for callback in self.callbacks:
                callback.on_train_end()

    def step(self) -> None:
        """Run one optimizer step."""
        for callback in self.callbacks:
            callback.before_step()
        began, waited = time.perf_counter(), 0.0
        if self.islands:
            of_all = self.islands.run(self.state.step)
            if of_all.losses is None:
                self._go_on_without_step(of_all)
                return
            self.state.step, loss = of_all.done, of_all.losses
        else:
            batches, waited = self.get_batch()
            self.train_step.rows = self.cfg.train.batch_sizes.at(self.state.step)
            loss = self.forward_backward(batches)
        report = self.update(loss, waited)
        if self.islands:
            self.state.step = self.islands.after_update(self.state.step, self._signalled())
        self.after_step(report, began)

    def _signalled(self) -> bool:
        """Return True if the leader of the island has news for all ranks, in the last step that was read."""
        return self.report is not None and bool(self.report.signals[ISLANDS])

    def _go_on_without_step(self, of_all: StepSum) -> None:
        """Go on after steps in which this island had no rows, or end the run if the islands do no further step."""
        if of_all.stopped is not None:
            self.stopping, self.failure, self._restart_helps = True, of_all.stopped, of_all.restart
            if asked := self.stop.asked():
                self.stopped_by = stop_signals.name(asked)
        elif of_all.done > self.state.step:
            t = self.cfg.train
            self.stopping = self._read()
            self.state.tokens += (of_all.done - self.state.step) * t.global_batch * t.seq_len
            self.state.step = of_all.done
            self.checkpoints.on_step_end()

    def get_batch(self) -> tuple[list[Batch], float]:
        """Return this rank's microbatches of the next step, and the seconds spent waiting for them."""
        assert self._prefetcher, "an island loads its rows itself"
        with RECORDER.waiting("data"):
            return self._prefetcher.get(self.state.step)

    def forward_backward(self, batches: Sequence[Batch]) -> Tensor:
        """Return this rank's share of the loss. Gradients are summed over the mesh on return."""
        return self.train_step.forward_backward(self.state.step + 1, batches)

    def update(self, loss: Tensor, waited: float) -> PendingReport:
        """Clip the gradient, update the weights, and count the step."""
        islands = (self.islands.signal(),) if self.islands else ()
        signals = lambda: (self.stop.asked(), peak_memory_bytes(self.mesh.device), waited, *islands)
        report = self.train_step.update(self.state.step + 1, loss, signals)
        t = self.cfg.train
        self.state.tokens += t.batch_sizes.at(self.state.step) * t.seq_len
        self.state.step += 1
        return report

    def after_step(self, report: PendingReport, began: float) -> None:
        """Read the numbers of the previous step, and call the callbacks.

        On a GPU this overlaps with the current step. Also read the numbers of the current step on a CPU, or if the run
        stops or a callback needs them.
        """
        stopping = self._read()
        metrics = {"tokens": self.state.tokens, "step_time_s": time.perf_counter() - began}
        if self.islands:
            metrics |= self.islands.numbers
        for callback in self.callbacks:
            metrics |= callback.after_step()
        self._unread = Unread(report, metrics)
        on_cpu = self.mesh.device.type == "cpu"
        if stopping or on_cpu or any(callback.needs_report() for callback in self.callbacks):
            stopping |= self._read()
        self.stopping = stopping
        for callback in self.callbacks:
            callback.on_step_end()

    def _read(self) -> bool:
        """Read the numbers of the unread step. Return True if the run has to stop; all ranks return the same."""
        if self._unread is None:
            return False
        unread, self._unread = self._unread, None
        self.report = report = unread.report.wait()
        for callback in self.callbacks:
            callback.on_report(report, unread.metrics)
        asked = int(report.signals[STOP])
        self.stopped_by = stop_signals.name(asked) if asked else None
        return bool(asked) or bool(self.failure)

    def microbatches(self, source: Tokens, step: int) -> list[Batch]:
        """Return this rank's part of the global batch of a step. Steps are counted from 0."""
        rows = range(self.cfg.train.batch_sizes.at(step))
        return rank_batches(self.cfg, self.mesh, self.data, source, step, rows)

    def close(self) -> None:
        """Close the watchdog, metrics and signal handlers, and release the run folder. Works after an error too."""
        with self._owner:
            self._closing.close()

    # --------------------------------------------------------------------------------------------------------- messages

    def note(self, text: str) -> None:
        """Print a line on rank 0, and log it on every rank."""
        log.info(text)
        if self.metrics:
            self.metrics.note(text)

    def warn(self, text: str) -> None:
        """Print and log a line as `note` does, marked as a warning."""
        log.warning(text)
        if self.metrics:
            self.metrics.warn(text)

    def _print_start(self) -> None:
        cfg, mesh = self.cfg, self.mesh
        sizes = " ".join(f"{a}={mesh.size(a)}" for a in (*mesh.spec.order, EP) if mesh.size(a) > 1) or "one process"
        origin = (
            f"resumed {self.resumed} at step {self.state.step}"
            if self.resumed
            else f"init_from={cfg.init_from}"
            if cfg.init_from
            else f"seed {cfg.run.seed}"
        )
        self.note(
            f"{cfg.run.name}: {flops.parameter_count(cfg.model):,} parameters, {self.data.describe()}, "
            f"mesh {sizes}, {self._pipeline()}zero={cfg.mesh.zero}, {cfg.precision.compute} on {self._device()}, "
            f"{origin}; run folder {cfg.run.dir}"
        )
        for line in self.stages.notes:
            self.note(line)
        now = order_of(cfg, self.data)
        changed = [key for key, value in now.items() if self.state.order.get(key) != value]
        if changed:
            text = f"{', '.join(changed)} changed since the checkpoint: the data order differs from here on"
            self.warn(text)
            self.state.order = now

    def _device(self) -> str:
        """Return the kind of device, and for a CPU also the number of threads."""
        if self.mesh.device.type != "cpu":
            return self.mesh.device.type
        threads = torch.get_num_threads()
        return f"cpu with {threads} thread{'s' * (threads > 1)}"

    def _pipeline(self) -> str:
        """Return the schedule as text, or an empty string if there is no pipeline."""
        if self.mesh.size("pp") == 1:
            return ""
        table = self.stages.placement.schedule
        bubble = 100 * schedule.simulate(table).bubble
        return f"{table.name}, {table.microbatches} microbatches, bubble {bubble:.0f} %, "

    def _print_end(self) -> tuple[int, str]:
        """Print the last lines of a run, and write its exit.json.

        Return the exit status of this process, and the reason why the run ended.
        """
        step, total, saved = self.state.step, self.cfg.train.steps, self.checkpoints.saved
        stopped = bool(self.stopped_by) and step < self.last_step
        orphaned = stopped and self.stopped_by == stop_signals.LAUNCHER_GONE
        at_end = saved is not None and saved.name.endswith(f"{step:08d}")
        idle = saved is None and not self.checkpoints.failures
        unsaved = "" if at_end or idle else f"the last state was not saved: {self.checkpoints.failures[-1]}"
        error = self.failure or unsaved
        why = "failed" if error else "died" if orphaned else "stopped" if stopped else "finished"
        if self._restart_helps:
            why = "died"
        if orphaned and not error:
            error = f"torchrun was killed, so the run stopped after step {step}, which is saved"
        if self.mesh.rank == 0:
            facts = {"signal": self.stopped_by, "step": step, "checkpoint": saved and str(saved.absolute())}
            exit_status.write(Path(self.cfg.run.dir), why, rank=0, error=error or None, **facts)
            if self.stopped_by:
                self.stop.answer()
        if idle and not error and not stopped:
            self.note(f"nothing to do: step {step} of {total} is already done: {self.resumed}")
            return exit_status.of_process(why), why
        by = f"stopped by {self.stopped_by} after" if self.stopped_by else None
        how = by or ("failed at" if error else "finished" if step == total else "stopped at")
        last = f"saved {saved}" if at_end else "it has done no step" if idle else f"its state is lost: {self._newest()}"
        self.note(f"{how} step {step} of {total}: {last}")
        if error:
            record_error(error)
        if error and self.mesh.rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return exit_status.of_process(why), why

    def _newest(self) -> str:
        newest = self.checkpoints.saved or self.resumed
        return f"the newest checkpoint is {newest}" if newest else "there is no checkpoint"
