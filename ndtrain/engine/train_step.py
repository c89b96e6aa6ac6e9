"""Executes a training step: the schedule's actions, gradient sums, clip, optimizer. And forwards alone, to evaluate."""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ndtrain import schedule as schedules
from ndtrain.config import Config
from ndtrain.data import Batch
from ndtrain.distributed.collectives import all_gather_row
from ndtrain.distributed.flight_recorder import RECORDER
from ndtrain.distributed.host_device import Readback, upload
from ndtrain.distributed.mesh import Mesh
from ndtrain.distributed.sharding import DATA_AXES
from ndtrain.engine.instructions import Instruction, Layer, expand, join, line_up
from ndtrain.model import Context
from ndtrain.model.loss import IGNORE
from ndtrain.optim import learning_rate
from ndtrain.parallel.build import Stages, stream_shape
from ndtrain.parallel.fsdp import ShardedUnits
from ndtrain.parallel.pp import Pipeline
from ndtrain.parallel.recompute import RecomputeGroup, SavedOps, always_saved_ops, plan_recompute, skipped_ops
from ndtrain.parallel.recompute_budget import choose
from ndtrain.parallel.sharded_optimizer import ShardedOptimizer
from ndtrain.schedule import Action, sends
from ndtrain.schedule.table import show


class ActionTiming(NamedTuple):
    """When an action was worked on, in seconds of this machine's monotonic clock; it waits for its input before."""

    action: Action
    began: float
    ended: float


class Executor:
    """Runs a rank's row of a schedule over its stages' segments and their sharded units.

    Attributes:
        watched: None, or where to append how long each action took. (On a GPU, watching makes the host wait for each.)
    """

    def __init__(
        self,
        row: Sequence[Action],
        layers: Sequence[Layer],
        units: ShardedUnits,
        pipeline: Pipeline,
        saved_ops: SavedOps,
        recompute_groups: Sequence[RecomputeGroup],
    ):
        if units.fully_resident:
            layers, recompute_groups = join(layers, recompute_groups)
        self.row, self.layers, self.units, self.pipeline, self.saved_ops = row, layers, units, pipeline, saved_ops
        self.trains = any(a.kind != "F" for a in row)
        self._names = [show(a) for a in row]
        self.program = expand(
            row, layers, recompute_groups, ahead=0 if units.fully_resident else 1 if units.reshard_after_forward else 2
        )
        self._passes = {"F": self._forward, "B": self._backward, "I": self._backward, "W": self._finish_weights}
        self.timings: list[ActionTiming] | None = None
        self._exit = {layer.stage: i for i, layer in enumerate(layers) if layer.last}
        self._entry = {layer.stage: i for i, layer in enumerate(layers) if layer.first}

    def run(self, contexts: Sequence[Context]) -> Tensor:
        """All passes of every microbatch (one context each); gradients, if the row makes any, are summed over the mesh
        when this returns. The result is the sum of this rank's losses, fp32 or wider.
        """
        self._contexts = contexts
        self._inputs: dict[tuple[int, int], Tensor | None] = {}
        self._graphs: dict[tuple[int, int], GradientEdge] = {}
        self._gradients: dict[tuple[int, int], Tensor] = {}
        self._deferred: dict[tuple[int, int], list[Callable[[], None]]] = {}
        wide = torch.promote_types(self.units.compute, torch.float32)
        self._loss = torch.zeros((), dtype=wide, device=self.units.device)
        if self.trains:
            self.units.begin_step()
        for number, (action, instructions) in enumerate(zip(self.row, self.program, strict=True)):
            RECORDER.action = self._names[number]
            self.pipeline.post_recv(number)
            self._enter(action)
            began = self._now()
            for ins in instructions:
                self._run(ins)
            if self.timings is not None:
                self.timings.append(ActionTiming(action, began, self._now()))
        RECORDER.action = "gradient sums"
        self.pipeline.finish()
        if self.trains:
            self.units.finish_step()
        return self._loss

    def _now(self) -> float:
        if self.timings is not None and self.units.device.type == "cuda":
            torch.cuda.synchronize(self.units.device)
        return time.perf_counter()

    def _enter(self, a: Action) -> None:
        """What the action takes from another stage is here."""
        needed = self.pipeline.needed(a)
        x = self.pipeline.recv(needed) if needed else None
        if a.kind == "F":
            self._inputs[a.microbatch, self._entry[a.stage]] = None if x is None else x.requires_grad_()
        elif x is not None:
            self._gradients[a.microbatch, self._exit[a.stage]] = x

    def _run(self, ins: Instruction) -> None:
        for name in ins.weights:
            self.units.unshard(name)
        for name in ins.prefetch:
            self.units.prefetch(name)
        self._passes[ins.kind](ins)
        if ins.reshard:
            for name in ins.weights:
                self.units.reshard(name)
        for name, final in ins.reduce:
            self.units.reduce(name, final)

    def _forward(self, ins: Instruction) -> None:
        at, layer = (ins.microbatch, ins.layer), self.layers[ins.layer]
        x = self._inputs.pop(at) if ins.drop_input else self._inputs[at]
        if layer.loss and ins.keep_graph:
            self._open_gradients(layer)  # the loss makes gradients in its forward
        if x is not None and not ins.keep_graph:
            x = x.detach()  # or a compiled block would be another graph for inputs that could have a gradient
        with torch.set_grad_enabled(ins.keep_graph), self._saved(ins, at):
            y = layer.run(x, self._contexts[ins.microbatch])
        if ins.keep_graph:
            self._graphs[at] = get_gradient_edge(y)  # and not y, whose memory only its readers keep
        if layer.loss:
            self._loss += y.detach()
            if ins.keep_graph:
                self._gradients[at] = torch.ones_like(y)
        elif ins.feed and layer.last:
            self.pipeline.send(sends(self.row[ins.action]), y.detach())
        elif ins.feed:
            self._inputs[ins.microbatch, ins.layer + 1] = y.detach().requires_grad_()

    def _saved(self, ins: Instruction, at: tuple[int, int]) -> AbstractContextManager:
        if ins.recompute:
            return self.saved_ops.replaying(at)
        return nullcontext() if ins.save is None else self.saved_ops.saving(at, ins.save, ins.shape_only)

    def _backward(self, ins: Instruction) -> None:
        at, layer = (ins.microbatch, ins.layer), self.layers[ins.layer]
        edge, x = self._graphs.pop(at), self._inputs.pop(at)
        self._open_gradients(layer)
        with self.units.deferring(self._deferred.setdefault(at, []) if ins.kind == "I" else None):
            torch.autograd.backward(edge, self._gradients.pop(at))
        for name in layer.units:
            self.units.close_gradients(name)
        if x is None:
            return
        if layer.first:
            self.pipeline.send(sends(self.row[ins.action]), x.grad)
        else:
            self._gradients[ins.microbatch, ins.layer - 1] = x.grad

    def _open_gradients(self, layer: Layer) -> None:
        for name in layer.units:
            self.units.open_gradients(name)

    def _finish_weights(self, ins: Instruction) -> None:
        self._open_gradients(self.layers[ins.layer])
        with torch.no_grad():
            for write in self._deferred.pop((ins.microbatch, ins.layer)):
                write()


@dataclass(frozen=True)
class StepReport:
    """What one step came to over the whole mesh.

    Attributes:
        loss: mean over the global batch's valid tokens, before the update.
        grad_norm: before clipping.
        tokens: positions processed, valid or not.
        skipped: loss or gradient was not finite, so nothing was updated.
        signals: each rank's `signals` row, fp64 [ranks, k].
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    skipped: bool
    signals: Tensor


class TrainingStep:
    """Forward, backward, gradient sums, clip and update of one global batch, by the schedule that `cfg` names."""

    def __init__(self, cfg: Config, mesh: Mesh, stages: Stages):
        self.cfg, self.mesh, self.stages = cfg, mesh, stages
        schedule = stages.placement.schedule
        layers = line_up(stages.segments, stages.placement.last)
        pipeline = Pipeline(schedule, mesh, stream_shape(cfg), stages.units.compute)
        row = schedule.table[mesh.coords["pp"]]
        again = self._again(layers)
        self.executor = Executor(row, layers, stages.units, pipeline, stages.saved_ops, again)
        self.optimizer = ShardedOptimizer(stages.units, cfg.optim, mesh)

    def _again(self, layers: Sequence[Layer]) -> list[RecomputeGroup]:
        """The blocks that are recomputed, stage by stage. Sets `skipped_ops`: for each block the ops that its recompute
        skips, None where it is not recomputed."""
        cfg, always = self.cfg, always_saved_ops(self.cfg)
        blocks = {s: [i for i, x in enumerate(layers) if x.stage == s and x.is_block] for s in self.stages.segments}
        choice = choose(cfg, self.mesh, self.stages, always) if cfg.recompute.name == "budget" else []
        found, at = [], 0
        for mine in blocks.values():
            found += plan_recompute(mine, cfg.recompute, always, choice[at : at + len(mine)])
            at += len(mine)
        in_graphs = bool(self.stages.units.by_autograd)
        self.skipped_ops = skipped_ops([i for mine in blocks.values() for i in mine], found, in_graphs)
        return found

    def run(
        self, step: int, batches: Sequence[Batch], signals: Callable[[], Sequence[float]] = lambda: (0.0,)
    ) -> Callable[[], StepReport]:
        """Makes update number `step` (from 1) from this rank's microbatches; none where the loss or the gradient is not
        finite.

        Args:
            signals: gives numbers of this rank that every rank is to see (a stop request, memory), asked at the end.

        Returns:
            A function that gives the report. Calling it late leaves the device unblocked.
        """
        RECORDER.begin(step)
        valid = sum((b.labels != IGNORE).sum() for b in batches).double()
        counts, counted = all_gather_row(valid.view(1), self.mesh.group(*DATA_AXES))

        def loss_scale() -> Tensor:
            counted.wait()
            return 1 / counts.sum().clamp(min=1)

        loss_share = self.executor.run(contexts(self.stages, batches, loss_scale))
        counted.wait()  # where no stage of this rank has the loss, nobody has
        RECORDER.action = "norm and update"
        stats = self.optimizer.reduce_stats(loss_share)
        lr = learning_rate(self.cfg.optim, step, self.cfg.train.steps)
        self.optimizer.step(step, lr, stats)
        self.stages.units.weights_changed(published=True)
        rows, work = all_gather_row(upload(signals(), self.mesh.device), self.mesh.world)
        result = Readback(work, torch.stack([stats.loss, stats.norm, stats.finite.double()]), rows)
        tokens = self.cfg.train.global_batch * self.cfg.train.seq_len

        def report() -> StepReport:
            numbers, found = result.wait(f"the result of step {step}")
            loss, norm, finite = numbers.tolist()
            return StepReport(step, loss, norm, lr, tokens, not finite, found)

        return report


class Evaluation:
    """The loss over a whole set of sequences, by forwards alone, on the stages that are trained."""

    def __init__(self, cfg: Config, mesh: Mesh, stages: Stages):
        self.mesh, self.stages = mesh, stages
        schedule = schedules.forwards(stages.placement.schedule)
        layers = line_up(stages.segments, stages.placement.last)
        pipeline = Pipeline(schedule, mesh, stream_shape(cfg), stages.units.compute)
        self.executor = Executor(
            schedule.table[mesh.coords["pp"]], layers, stages.units, pipeline, stages.saved_ops, []
        )

    def run(self, passes: Iterable[Sequence[Batch]], valid: int) -> float:
        """The mean loss over the set's valid tokens, the same number on every rank.

        Args:
            passes: this rank's microbatches, as many in each pass as in a training step.
            valid: how many labels of the whole set count.
        """
        share = torch.zeros(1, dtype=torch.float64, device=self.mesh.device)
        scale = torch.full((), 1 / max(1, valid), dtype=torch.float64, device=self.mesh.device)
        for batches in passes:
            share += self.executor.run(contexts(self.stages, batches, lambda: scale))
        rows, work = all_gather_row(share, self.mesh.world)
        work.wait()
        return rows.sum().item()


def contexts(stages: Stages, batches: Sequence[Batch], loss_scale: Callable[[], Tensor]) -> list[Context]:
    """What the segments need of each microbatch."""
    make, compute = stages.context, stages.units.compute
    return [make(b.tokens, b.labels, compute, loss_scale, b.positions, b.documents) for b in batches]
