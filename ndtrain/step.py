"""Executes one training step: the schedule's actions, gradient sums, clip, optimizer.

An action of the table (forward or backward of a microbatch) becomes instructions, one per segment and pass. The list
is the same every step, so what each instruction needs beside its own compute is looked up in it beforehand: which
unit's weights, which to prefetch while it runs, which to free after it, which gradients are then complete.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ndtrain.collectives import all_gather_row
from ndtrain.config import Config, RecomputeConfig
from ndtrain.data import Batch
from ndtrain.layout import BATCH_AXES, DATA_AXES, MODEL_AXES
from ndtrain.mesh import Mesh
from ndtrain.model import Context, Segment
from ndtrain.model.loss import IGNORE
from ndtrain.optim import Optimizer, learning_rate
from ndtrain.parallel.apply import Stage
from ndtrain.parallel.fsdp import ShardedUnits
from ndtrain.parallel.recompute import groups
from ndtrain.schedule import GENERATORS, Action, check


@dataclass(frozen=True)
class Instruction:
    """One segment's forward or backward for one microbatch.

    Attributes:
        weights: the unit it reads, None where it reads none.
        prefetch: the units to start gathering while it runs.
        release: its unit is not the next one read.
        keep_graph: (forward) its backward follows without running it again.
        drop_input: (forward) nothing needs its input any more.
        feed: (forward) its output is the next segment's input, and not already there.
        reduce: (backward) the unit's gradient of this microbatch is complete.
        final: ... and it was the step's last microbatch.
    """

    backward: bool
    microbatch: int
    segment: int
    weights: str | None
    prefetch: tuple[str, ...] = ()
    release: bool = False
    keep_graph: bool = True
    drop_input: bool = False
    feed: bool = True
    reduce: bool = False
    final: bool = False


def expand(
    actions: Sequence[Action], segments: Sequence[Segment], recompute: RecomputeConfig, ahead: int
) -> list[Instruction]:
    """The instructions of a rank's actions; `ahead`: how many units to prefetch.

    The last segment (head and loss) runs forward inside the backward action: its value is not needed earlier, and its
    gradients then never wait in memory.
    """
    blocks = [i for i, s in enumerate(segments) if ".layers." in s.unit]
    groups_ = groups(blocks, recompute)
    found: list[Instruction] = []
    for a in actions:
        found += (
            _forward(a.microbatch, segments, groups_) if a.kind == "F" else _backward(a.microbatch, segments, groups_)
        )
    return _with_reductions(_with_gathers(found, ahead), segments)


def _forward(m: int, segments: Sequence[Segment], groups_: list[list[int]]) -> list[Instruction]:
    again = {i: i == g[0] for g in groups_ for i in g}  # run again later -> is it where its group starts
    return [
        Instruction(False, m, i, s.unit, keep_graph=i not in again, drop_input=i in again and not again[i])
        for i, s in enumerate(segments[:-1])
    ]


def _backward(m: int, segments: Sequence[Segment], groups_: list[list[int]]) -> list[Instruction]:
    last = len(segments) - 1
    group_ending = {g[-1]: g for g in groups_}
    found = [Instruction(False, m, last, segments[last].unit, feed=False)]
    for i in range(last, -1, -1):
        for j in group_ending.get(i, ()):
            found.append(Instruction(False, m, j, segments[j].unit, feed=j != i))
        found.append(Instruction(True, m, i, segments[i].unit if segments[i].weight_in_backward else None))
    return found


def _with_gathers(found: list[Instruction], ahead: int) -> list[Instruction]:
    """Fills in prefetch and release: the next `ahead` units that the list reads after each instruction."""
    out: list[Instruction] = []
    upcoming: list[str] = []  # the units read after this instruction, nearest first, without repeats in a row
    for ins in reversed(found):
        release = ins.weights is not None and (not upcoming or upcoming[0] != ins.weights)
        others = [u for u in upcoming[: ahead + 1] if u != ins.weights][:ahead]
        out.append(replace(ins, prefetch=tuple(others), release=release))
        if release:
            upcoming.insert(0, ins.weights)
    return out[::-1]


def _with_reductions(found: list[Instruction], segments: Sequence[Segment]) -> list[Instruction]:
    """Marks the last backward of each unit in each microbatch, and in the step."""
    in_microbatch: set[tuple[int, str]] = set()
    in_step: set[str] = set()
    out: list[Instruction] = []
    for ins in reversed(found):
        unit = segments[ins.segment].unit
        if ins.backward:
            ins = replace(ins, reduce=(ins.microbatch, unit) not in in_microbatch, final=unit not in in_step)
            in_microbatch.add((ins.microbatch, unit))
            in_step.add(unit)
        out.append(ins)
    return out[::-1]


class Executor:
    """Runs instructions over a stage's segments and their sharded units."""

    def __init__(self, segments: Sequence[Segment], units: ShardedUnits, instructions: list[Instruction]):
        self.segments, self.units, self.instructions = segments, units, instructions

    def run(self, contexts: Sequence[Context]) -> Tensor:
        """Forward and backward of every microbatch (one context each); gradients are summed over the mesh when this
        returns. The result is the sum of this rank's losses, fp32 or wider.
        """
        self._contexts = contexts
        self._inputs: dict[tuple[int, int], Tensor | None] = {(m, 0): None for m in range(len(contexts))}
        self._outputs: dict[tuple[int, int], Tensor] = {}
        self._gradients: dict[tuple[int, int], Tensor | None] = {}
        self._losses: list[Tensor] = []
        self.units.begin_step()
        for ins in self.instructions:
            self._run(ins)
        self.units.finish_step()
        return torch.stack(self._losses).sum()

    def _run(self, ins: Instruction) -> None:
        if ins.weights:
            self.units.use(ins.weights)
        for name in ins.prefetch:
            self.units.fetch(name)
        if ins.backward:
            self._backward(ins)
        else:
            self._forward(ins)
        if ins.release:
            self.units.release(ins.weights)
        if ins.reduce:
            self.units.reduce(self.segments[ins.segment].unit, ins.final)

    def _forward(self, ins: Instruction) -> None:
        at = (ins.microbatch, ins.segment)
        x = self._inputs.pop(at) if ins.drop_input else self._inputs[at]
        if ins.segment == len(self.segments) - 1:
            self.units.open_gradients(self.segments[ins.segment].unit)  # the loss makes gradients in its forward
        with torch.set_grad_enabled(ins.keep_graph):
            y = self.segments[ins.segment].run(x, self._contexts[ins.microbatch])
        if ins.keep_graph:
            self._outputs[at] = y
        if ins.segment == len(self.segments) - 1:
            self._losses.append(y.detach())
        elif ins.feed:
            self._inputs[ins.microbatch, ins.segment + 1] = y.detach().requires_grad_()

    def _backward(self, ins: Instruction) -> None:
        at = (ins.microbatch, ins.segment)
        y, x = self._outputs.pop(at), self._inputs.pop(at)
        self.units.open_gradients(self.segments[ins.segment].unit)
        torch.autograd.backward(y, self._gradients.pop(at, None))
        if x is not None:
            self._gradients[ins.microbatch, ins.segment - 1] = x.grad


@dataclass(frozen=True)
class StepReport:
    """What one step came to over the whole mesh.

    Attributes:
        loss: mean over the global batch's valid tokens, before the update.
        grad_norm: before clipping.
        tokens: positions processed, valid or not.
        signals: each rank's `signals` row, fp64 [ranks, k].
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    signals: Tensor


class TrainingStep:
    """Forward, backward, gradient sums, clip and update of one global batch, by the schedule that `cfg` names."""

    def __init__(self, cfg: Config, mesh: Mesh, stage: Stage):
        self.cfg, self.mesh, self.stage = cfg, mesh, stage
        microbatches = cfg.train.global_batch // (mesh.size(*BATCH_AXES) * cfg.train.micro_batch)
        table = GENERATORS[cfg.schedule.name](mesh.size("pp"), microbatches)
        check(table, microbatches, stages=mesh.size("pp"))
        ahead = 2 if stage.units.keeps_full else 1
        instructions = expand(table[mesh.coords["pp"]], stage.segments, cfg.recompute, ahead)
        self.executor = Executor(stage.segments, stage.units, instructions)
        self.optimizer = Optimizer(stage.units, cfg.optim, mesh.group(*MODEL_AXES))

    def run(
        self, step: int, batches: Sequence[Batch], signals: Callable[[], Sequence[float]] = tuple
    ) -> Callable[[], StepReport]:
        """Makes update number `step` (from 1) from this rank's microbatches.

        Args:
            signals: gives numbers of this rank that every rank is to see (a stop request, memory), asked at the end.

        Returns:
            A function that gives the report. Calling it late leaves the device unblocked.
        """
        valid = sum((b.labels != IGNORE).sum() for b in batches).double()
        counts, counted = all_gather_row(valid.view(1), self.mesh.group(*DATA_AXES))

        def loss_scale() -> Tensor:
            counted.wait()
            return 1 / counts.sum().clamp(min=1)

        compute, context = self.stage.units.compute, self.stage.model.context
        contexts = [context(b.tokens, b.labels, compute, loss_scale, b.positions, b.documents) for b in batches]
        loss_share = self.executor.run(contexts)
        norm = self.optimizer.gradient_norm()
        lr = learning_rate(self.cfg.optim, step, self.cfg.train.steps)
        self.optimizer.step(step, lr, norm)
        self.stage.units.weights_changed()
        return self._report(step, lr, norm, loss_share, signals())

    def _report(self, step: int, lr: float, norm: Tensor, loss_share: Tensor, signals: Sequence[float]):
        row = torch.tensor([0.0, *signals], dtype=torch.float64)
        row = row.to(loss_share.device)
        row[0] = loss_share
        rows, flight = all_gather_row(row, self.mesh.world)
        t = self.cfg.train

        def report() -> StepReport:
            flight.wait()
            loss = rows[:, 0].sum().item()
            return StepReport(step, loss, norm.item(), lr, t.global_batch * t.seq_len, rows[:, 1:].cpu())

        return report
