"""One training step: forward and backward of a global batch, gradient sums, clipping and update.

Also forward passes alone, for evaluation.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ndtrain import schedule as schedules
from ndtrain.config import AXES, DATA_AXES, Config, LocalShapes
from ndtrain.config.schema import resolved
from ndtrain.data import Batch
from ndtrain.engine.executor import ActionTiming, Executor, TokenCount
from ndtrain.mesh.collectives import all_reduce, all_reduce_max
from ndtrain.mesh.flight_recorder import RECORDER
from ndtrain.mesh.host_device import Readback, upload
from ndtrain.mesh.mesh import Mesh
from ndtrain.model import Context
from ndtrain.model.objective import Objective
from ndtrain.model.vocabulary import IGNORE
from ndtrain.optim import learning_rate
from ndtrain.parallel.build import Stages
from ndtrain.parallel.grad_stats import GradStats
from ndtrain.parallel.pp import Pipeline
from ndtrain.parallel.sharded_optimizer import ShardedOptimizer
from ndtrain.program import ops
from ndtrain.program.build import NO_EXPERTS, Experts, offers_gradients
from ndtrain.program.ops import RankProgram
from ndtrain.program.passes import line_up
from ndtrain.schedule import Schedule

Signals = Callable[[], Sequence[float]]


@dataclass(frozen=True)
class StepReport:
    """The numbers of one step over the whole mesh.

    Attributes:
        loss: weighted mean over the tokens of the global batch, before the update.
        grad_norm: gradient norm before clipping.
        tokens: number of processed positions, including those without a label.
        skipped: True if the loss or the gradient was not finite, and nothing was updated.
        signals: the largest of each of the ranks' `signals`, fp64 [k].
        numbers: name -> other sums of the objective, and the numbers of the experts' load balancing and of
            `optim.qk_clip`.
        reruns: number of times that the step was repeated because expert capacity was exceeded (`moe.capacity`).
        capacity: the capacity factor that was sufficient; None: `moe.capacity` is not set.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    skipped: bool
    signals: Tensor
    numbers: dict[str, float] = field(default_factory=dict)
    reruns: int = 0
    capacity: float | None = None


@dataclass(frozen=True)
class PendingReport:
    """The report of a step that the device may still be working on."""

    step: int
    lr: float
    tokens: int
    result: Readback
    names: tuple[str, ...] = ()
    reruns: int = 0
    capacity: float | None = None

    def wait(self) -> StepReport:
        """Return the report. The later this is called, the less the host waits for the device."""
        results, signals = self.result.wait(f"the result of step {self.step}")
        norm, finite, loss, *others = results.tolist()
        numbers = dict(zip(self.names, others, strict=True))
        ran = self.reruns, self.capacity
        return StepReport(self.step, loss, norm, self.lr, self.tokens, not finite, signals, numbers, *ran)


class TrainingStep:
    """Forward, backward, gradient sums, clipping and update of one global batch, in the order of the schedule.

    If the balance loss is computed over the whole batch (`moe.balance=hf`), a forward pass of all blocks runs first.

    Attributes:
        rows: the number of rows that the step processes here. An island processes its share of the global batch.
        timings: as in `Executor`, for the steps from now on.
    """

    def __init__(self, cfg: Config, mesh: Mesh, stages: Stages):
        self.cfg, self.mesh, self.stages = cfg, mesh, stages
        self.executor, self.look_ahead = self._make_executors(stages.placement.schedule)
        self._executors = {stages.placement.schedule.microbatches: (self.executor, self.look_ahead)}
        self.optimizer = ShardedOptimizer(stages.units, cfg.optim, mesh, stages.qk_clip)
        self.rows = cfg.train.global_batch
        self.timings: list[ActionTiming] | None = None
        self._reruns = 0  # of the current step

    def _make_executors(self, schedule: Schedule) -> tuple[Executor, Executor | None]:
        """Return the executors of a step with this schedule and of the forward before it, if there is one."""
        stages, cfg = self.stages, self.cfg
        layers = line_up(stages.segments, stages.placement.last)
        pipeline = Pipeline(schedule, self.mesh, LocalShapes.of(cfg).stream, stages.units.compute)
        losses = 1 + len(stages.objective.sums)
        experts, offers = Experts.of(cfg.model, cfg.moe), offers_gradients(cfg.islands)
        ahead = forwards(cfg, self.mesh, stages, schedule, loss=False) if stages.balance.pooled else None
        return Executor(layers, stages, pipeline, stages.recompute.groups, losses, experts, offers), ahead

    def _use_executors(self, microbatches: int) -> None:
        """Use the executors for this number of microbatches. It changes in `train.batch_ramp` and with islands."""
        if microbatches not in self._executors:
            s = self.cfg.schedule
            schedule = schedules.build(s.name, self.cfg.mesh.pp, microbatches, s.chunks, s.path)
            self._executors[microbatches] = self._make_executors(schedule)
        self.executor, self.look_ahead = self._executors[microbatches]
        self.executor.timings = self.timings

    def run(self, step: int, batches: Sequence[Batch], signals: Signals = lambda: (0.0,)) -> PendingReport:
        """Run step number `step`, counted from 1, on this rank's microbatches."""
        loss = self.forward_backward(step, batches)
        return self.update(step, loss, signals)

    def forward_backward(self, step: int, batches: Sequence[Batch], weight: Tensor | None = None) -> Tensor:
        """Return this rank's share of the loss and of the objective's other sums.

        Gradients are summed over the mesh on return. With `moe.capacity`, repeat the passes with a larger capacity
        until the rows of all experts fit.

        Args:
            weight: the ranks' `weight` add up to the sum of the weights of all tokens of the global batch, fp64 [1];
                None: the tokens of the ranks' batches are all tokens.
        """
        RECORDER.begin(step)
        self._use_executors(len(batches))
        self._reruns, capacity = 0, self.stages.capacity
        weight = total_weight(self.stages.objective, batches) if weight is None else weight
        if capacity is None:
            return self._forward_backward(step, batches, weight)
        while True:
            with capacity.in_use():
                loss = self._forward_backward(step, batches, weight)
            if not capacity.exceeded:
                return loss
            capacity.grow()
            self._reruns += 1

    def _forward_backward(self, step: int, batches: Sequence[Batch], weight: Tensor) -> Tensor:
        t = self.cfg.train
        self.stages.balance.begin_step(t.batch_sizes.at(step - 1) * t.seq_len)
        if self.stages.qk_clip is not None:
            self.stages.qk_clip.begin_step()
        tokens = TokenCount(weight, self.mesh.group(*DATA_AXES))
        made = contexts(self.stages, batches, tokens.scale)
        if self.look_ahead is not None:
            with self.stages.balance.looking_ahead():
                self.look_ahead.run(made)
        return self.executor.run(made, tokens)

    def update(self, step: int, loss: Tensor, signals: Signals = lambda: (0.0,)) -> PendingReport:
        """Clip the gradient and update the weights. Change nothing if the loss or the gradient is not finite.

        Args:
            signals: returns numbers of this rank (a stop request, memory), of which all ranks get the largest. It is
                called last.
        """
        RECORDER.action = "norm and update"
        lr, program = learning_rate(self.cfg.optim, step, self.cfg.train.steps), self._program()
        for index, op in enumerate(program.update, program.update_at):
            RECORDER.op = index
            match op:
                case ops.GatherStats():
                    stats = self.optimizer.reduce_stats(loss)
                case ops.GatherLogits():
                    resolved(self.stages.qk_clip).gather()
                case ops.Prepare():
                    self.optimizer.begin(step, lr, stats)
                case ops.ComputeWhole():
                    self.optimizer.compute(op.round)
                case ops.Update():
                    self.optimizer.finish()
                    self.stages.units.weights_changed(published=True)
                case ops.UpdateBiases():
                    self.stages.balance.update(stats.finite)
                case ops.Report():
                    report = self._report(step, lr, stats, signals())
                case _:
                    self.executor.run_op(op)
        RECORDER.op = None
        return report

    def _program(self) -> RankProgram:
        """Return the program of the step. An island without a share of the batch has run only the others' gradients."""
        return self.executor.ran or self.executor.program

    def _report(self, step: int, lr: float, stats: GradStats, signals: Sequence[float]) -> PendingReport:
        balance, capacity, clip = self.stages.balance, self.stages.capacity, self.stages.qk_clip
        largest = upload(signals, self.mesh.device)
        work = all_reduce_max(largest, self.mesh.world)
        parts = [torch.stack([stats.norm, stats.finite.double()]), stats.losses, balance.numbers()]
        numbers = torch.cat(parts if clip is None else [*parts, clip.numbers()])
        result, tokens = Readback(work, numbers, largest), self.rows * self.cfg.train.seq_len
        names = *self.stages.objective.sums, *balance.names, *(() if clip is None else clip.names)
        factor = None if capacity is None else capacity.factor
        return PendingReport(step, lr, tokens, result, names, self._reruns, factor)


class Evaluated(NamedTuple):
    """The loss over a set of sequences.

    Attributes:
        loss: the weighted mean over the tokens.
        tokens: the number of labels that count.
    """

    loss: float
    tokens: int


class Evaluation:
    """Computes the loss over a set of sequences, by forward passes of the trained stages."""

    def __init__(self, cfg: Config, mesh: Mesh, stages: Stages):
        self.mesh, self.stages = mesh, stages
        self.executor = forwards(cfg, mesh, stages, stages.placement.schedule)
        self._is_first = not any(mesh.coords[axis] for axis in AXES if axis not in DATA_AXES)

    def run(self, passes: Iterable[Sequence[Batch]]) -> Evaluated:
        """Evaluate a set of sequences. Every rank returns the same numbers.

        Args:
            passes: this rank's microbatches; each pass has the same number of them as a training step.
        """
        share = torch.zeros(3, dtype=torch.float64, device=self.mesh.device)  # loss, weight, tokens
        one = torch.ones((), dtype=torch.float64, device=self.mesh.device)
        counts = self._is_first  # of the ranks with the same tokens, only one counts them
        for batches in passes:
            share[0] += self.executor.run(contexts(self.stages, batches, lambda: one))[0]
            if counts:
                share[1] += total_weight(self.stages.objective, batches)[0]
                share[2] += sum((b.labels != IGNORE).sum() for b in batches)
        all_reduce(share, self.mesh.world).wait()
        loss, weight, tokens = share
        return Evaluated((loss / weight).item() if weight else 0.0, int(tokens.long()))


def forwards(cfg: Config, mesh: Mesh, stages: Stages, schedule: Schedule, loss: bool = True) -> Executor:
    """Return an executor that runs only the forward passes of a step.

    Args:
        schedule: of the step.
        loss: True to run head and loss too. False: the loss is 0, and the loads of experts are summed.
    """
    layers = line_up(stages.segments, stages.placement.last)
    if not loss:
        none = lambda x, ctx: x.new_zeros(1)
        layers = [layer._replace(run=none, units=()) if layer.loss else layer for layer in layers]
    pipeline = Pipeline(schedules.forwards(schedule), mesh, LocalShapes.of(cfg).stream, stages.units.compute)
    losses, experts = 1 + len(stages.objective.sums), NO_EXPERTS if loss else Experts.of(cfg.model, cfg.moe)
    return Executor(layers, stages, pipeline, (), losses, experts)


def contexts(stages: Stages, batches: Sequence[Batch], loss_scale: Callable[[], Tensor]) -> list[Context]:
    """Return the context of each microbatch, with everything that the layers read from it."""
    make, compute = stages.context, stages.units.compute
    return [make(b.tokens, b.labels, compute, loss_scale, b.positions, b.documents, b.columns) for b in batches]


def total_weight(objective: Objective, batches: Sequence[Batch]) -> Tensor:
    """Return the sum of the tokens' weights, fp64 [1]."""
    of_batch = (objective.weights(b.targets).sum(dtype=torch.float64) for b in batches)
    return sum(of_batch).view(1)
