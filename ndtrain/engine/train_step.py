"""One training step: forward and backward of a global batch by the schedule, gradient sums, clip and update. And
forwards alone, to evaluate."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ndtrain import schedule as schedules
from ndtrain.config import AXES, DATA_AXES, Config, LocalShapes
from ndtrain.data import Batch
from ndtrain.engine.executor import Executor
from ndtrain.mesh.collectives import all_gather_row
from ndtrain.mesh.flight_recorder import RECORDER
from ndtrain.mesh.host_device import Readback, upload
from ndtrain.mesh.mesh import Mesh
from ndtrain.model import Context
from ndtrain.model.objective import Objective
from ndtrain.model.vocabulary import IGNORE
from ndtrain.optim import learning_rate
from ndtrain.parallel.build import Stages
from ndtrain.parallel.pp import Pipeline
from ndtrain.parallel.sharded_optimizer import ShardedOptimizer
from ndtrain.program.passes import line_up

Signals = Callable[[], Sequence[float]]


@dataclass(frozen=True)
class StepReport:
    """The numbers of one step over the whole mesh.

    Attributes:
        loss: mean over the tokens of the global batch, by their weights, before the update.
        grad_norm: before clipping.
        tokens: positions processed, valid or not.
        skipped: loss or gradient was not finite, so nothing was updated.
        signals: each rank's `signals` row, fp64 [ranks, k].
        numbers: the objective's other sums, and those of the experts' balance, by their names.
        reruns: how often the step was run again, because rows of experts did not fit (`moe.capacity`).
        capacity: the one with which they fitted; None: it is not set.
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
        """The report. Calling this late leaves the device unblocked."""
        results, signals = self.result.wait(f"the result of step {self.step}")
        norm, finite, loss, *others = results.tolist()
        numbers = dict(zip(self.names, others, strict=True))
        ran = self.reruns, self.capacity
        return StepReport(self.step, loss, norm, self.lr, self.tokens, not finite, signals, numbers, *ran)


class TrainingStep:
    """Forward, backward, gradient sums, clip and update of one global batch, by the schedule that `cfg` names. Where a
    balance loss is over the whole batch (`moe.balance=hf`), a forward of all blocks comes first."""

    def __init__(self, cfg: Config, mesh: Mesh, stages: Stages):
        self.cfg, self.mesh, self.stages = cfg, mesh, stages
        schedule = stages.placement.schedule
        layers = line_up(stages.segments, stages.placement.last)
        pipeline = Pipeline(schedule, mesh, LocalShapes.of(cfg).stream, stages.units.compute)
        losses = 1 + len(stages.objective.sums)
        self.executor = Executor(layers, stages.units, pipeline, stages.saved_ops, stages.recompute.groups, losses)
        self.look_ahead = forwards(cfg, mesh, stages, loss=False) if stages.balance.pooled else None
        self.optimizer = ShardedOptimizer(stages.units, cfg.optim, mesh)
        self._reruns = 0  # of the step that is running

    def run(self, step: int, batches: Sequence[Batch], signals: Signals = lambda: (0.0,)) -> PendingReport:
        """Makes update number `step` (from 1) from this rank's microbatches."""
        loss = self.forward_backward(step, batches)
        return self.update(step, loss, signals)

    def forward_backward(self, step: int, batches: Sequence[Batch]) -> Tensor:
        """This rank's share of the loss and of the objective's other sums; gradients are summed over the mesh when this
        returns. With `moe.capacity` all of it is run again for as long as rows of experts do not fit."""
        RECORDER.begin(step)
        self._reruns, capacity = 0, self.stages.capacity
        if capacity is None:
            return self._forward_backward(batches)
        while True:
            with capacity.in_use():
                loss = self._forward_backward(batches)
            if not capacity.overflowed():
                return loss
            capacity.grow()
            self._reruns += 1

    def _forward_backward(self, batches: Sequence[Batch]) -> Tensor:
        self.stages.balance.begin_step()
        weight = total_weight(self.stages.objective, batches)
        weights, gathered = all_gather_row(weight, self.mesh.group(*DATA_AXES))

        def loss_scale() -> Tensor:
            gathered.wait()
            total = weights.sum()
            return 1 / total.where(total > 0, 1)

        made = contexts(self.stages, batches, loss_scale)
        if self.look_ahead is not None:
            with self.stages.balance.looking_ahead():
                self.look_ahead.run(made)
        loss = self.executor.run(made)
        gathered.wait()  # where no stage of this rank has the loss, nobody has
        return loss

    def update(self, step: int, loss: Tensor, signals: Signals = lambda: (0.0,)) -> PendingReport:
        """Clips and updates; changes nothing where the loss or the gradient is not finite.

        Args:
            signals: gives numbers of this rank that every rank is to see (a stop request, memory), asked at the end.
        """
        RECORDER.action = "norm and update"
        balance = self.stages.balance
        balanced = balance.start_sum()
        stats = self.optimizer.reduce_stats(loss)
        lr = learning_rate(self.cfg.optim, step, self.cfg.train.steps)
        self.optimizer.step(step, lr, stats)
        balanced.wait()
        balance.update(stats.finite)
        self.stages.units.weights_changed(published=True)
        rows, work = all_gather_row(upload(signals(), self.mesh.device), self.mesh.world)
        numbers = torch.cat([torch.stack([stats.norm, stats.finite.double()]), stats.losses, balance.numbers()])
        result, tokens = Readback(work, numbers, rows), self.cfg.train.global_batch * self.cfg.train.seq_len
        capacity = None if self.stages.capacity is None else self.stages.capacity.factor
        names = *self.stages.objective.sums, *balance.names
        return PendingReport(step, lr, tokens, result, names, self._reruns, capacity)


class Evaluated(NamedTuple):
    """The loss over a set of sequences.

    Attributes:
        loss: the mean over its tokens, by their weights.
        tokens: the number of labels that count.
    """

    loss: float
    tokens: int


class Evaluation:
    """The loss over a whole set of sequences, by forwards alone, on the stages that are trained."""

    def __init__(self, cfg: Config, mesh: Mesh, stages: Stages):
        self.mesh, self.stages = mesh, stages
        self.executor = forwards(cfg, mesh, stages)
        self._is_first = not any(mesh.coords[axis] for axis in AXES if axis not in DATA_AXES)

    def run(self, passes: Iterable[Sequence[Batch]]) -> Evaluated:
        """Evaluate a set of sequences. Every rank returns the same numbers.

        Args:
            passes: this rank's microbatches, as many in each pass as in a training step.
        """
        share = torch.zeros(3, dtype=torch.float64, device=self.mesh.device)  # loss, weight, tokens
        one = torch.ones((), dtype=torch.float64, device=self.mesh.device)
        counts = self._is_first  # ranks with the same tokens count them once
        for batches in passes:
            share[0] += self.executor.run(contexts(self.stages, batches, lambda: one))[0]
            if counts:
                share[1] += total_weight(self.stages.objective, batches)[0]
                share[2] += sum((b.labels != IGNORE).sum() for b in batches)
        rows, work = all_gather_row(share, self.mesh.world)
        work.wait()
        loss, weight, tokens = rows.sum(0)
        return Evaluated((loss / weight).item() if weight else 0.0, int(tokens.long()))


def forwards(cfg: Config, mesh: Mesh, stages: Stages, loss: bool = True) -> Executor:
    """Runs the forwards of a step alone.

    Args:
        loss: whether head and loss run too; otherwise the loss is 0.
    """
    schedule = schedules.forwards(stages.placement.schedule)
    layers = line_up(stages.segments, stages.placement.last)
    if not loss:
        none = lambda x, ctx: x.new_zeros(1)
        layers = [layer._replace(run=none, units=()) if layer.loss else layer for layer in layers]
    pipeline = Pipeline(schedule, mesh, LocalShapes.of(cfg).stream, stages.units.compute)
    return Executor(layers, stages.units, pipeline, stages.saved_ops, [], 1 + len(stages.objective.sums))


def contexts(stages: Stages, batches: Sequence[Batch], loss_scale: Callable[[], Tensor]) -> list[Context]:
    """What the layers need of each microbatch."""
    make, compute = stages.context, stages.units.compute
    return [make(b.tokens, b.labels, compute, loss_scale, b.positions, b.documents, b.columns) for b in batches]


def total_weight(objective: Objective, batches: Sequence[Batch]) -> Tensor:
    """Return the sum of the tokens' weights, fp64 [1]."""
    of_batch = (objective.weights(b.targets).sum(dtype=torch.float64) for b in batches)
    return sum(of_batch).view(1)
