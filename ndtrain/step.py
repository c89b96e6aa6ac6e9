"""Executes one training step: the schedule's actions, gradient sums, clip, optimizer.

An action of the table becomes instructions, one per segment and pass. The list is the same every step, so what each
instruction needs beside its own compute is looked up in it beforehand: which unit's weights, which to prefetch while it
runs, which to free after it, which gradients are then complete.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ndtrain.collectives import all_gather_row
from ndtrain.config import Config
from ndtrain.data import Batch
from ndtrain.layout import DATA_AXES, MODEL_AXES
from ndtrain.mesh import Mesh
from ndtrain.model import Context, Segment
from ndtrain.model.loss import IGNORE
from ndtrain.optim import Optimizer, learning_rate
from ndtrain.parallel.apply import Stages, stream_shape
from ndtrain.parallel.budget import choose
from ndtrain.parallel.fsdp import ShardedUnits
from ndtrain.parallel.pp import Pipeline
from ndtrain.parallel.recompute import Group, Keep, always_kept, groups, spared
from ndtrain.schedule import Action, Message

Units = tuple[str, ...]  # names


@dataclass(frozen=True)
class Instruction:
    """One pass of one layer for one microbatch.

    Attributes:
        kind: F forward | B backward | I backward that puts the gradients of matrices off | W what I put off.
        action: which action of the row it is part of.
        segment: which of this rank's layers.
        weights: the units it reads.
        prefetch: the units to start gathering while it runs.
        release: its units are not the next ones read.
        keep_graph: (F) its backward follows without running it again.
        drop_input: (F) nothing needs its input any more.
        feed: (F) its output is the input of the next layer, or of the next stage, and not already there.
        keep: (F) what its block keeps for a second run; None: it has no second run, or this is it.
        unneeded: (F) the ops whose values that second run does not read.
        again: (F) this is the second run.
        reduce: (B, I, W) the units whose gradient of this microbatch is complete, and whether it was the step's last.
    """

    kind: str
    action: int
    microbatch: int
    segment: int
    weights: Units
    prefetch: tuple[str, ...] = ()
    release: bool = False
    keep_graph: bool = True
    drop_input: bool = False
    feed: bool = True
    keep: frozenset[str] | None = None
    unneeded: frozenset[str] = frozenset()
    again: bool = False
    reduce: tuple[tuple[str, bool], ...] = ()


class Layer(NamedTuple):
    """One of the pieces that a rank's stages are run in: a segment, or several with one graph.

    Attributes:
        run: as `Segment.run`.
        units: whose parameters it reads; `backward_units`: those it reads again in its backward.
        first, last: of its stage.
        loss: its output is the loss.
    """

    run: Callable[[Tensor | None, Context], Tensor]
    units: Units
    backward_units: Units
    stage: int
    first: bool
    last: bool
    loss: bool

    @property
    def is_block(self) -> bool:
        return ".layers." in self.units[0]


def line_up(segments: dict[int, list[Segment]], last_stage: int) -> list[Layer]:
    """All segments of a rank, stage after stage."""
    found = []
    for stage, mine in sorted(segments.items()):
        for i, s in enumerate(mine):
            units, last = (s.unit,), i == len(mine) - 1
            again = units if s.weight_in_backward else ()
            found.append(Layer(s.run, units, again, stage, i == 0, last, last and stage == last_stage))
    return found


def join(layers: Sequence[Layer], groups_: Sequence[Group]) -> tuple[list[Layer], list[Group]]:
    """Layers of a stage that follow each other as one, but for the loss and what is run again: fewer graphs, where
    nothing is to be done between them. Returns the groups with their new places too."""
    alone = {i for g in groups_ for i in g.segments} | {i for i, layer in enumerate(layers) if layer.loss}
    runs: list[list[int]] = []
    for i, layer in enumerate(layers):
        if runs and not alone & {i, runs[-1][-1]} and layers[runs[-1][-1]].stage == layer.stage:
            runs[-1].append(i)
        else:
            runs.append([i])
    place = {i: n for n, run in enumerate(runs) for i in run}
    moved = [replace(g, segments=[place[i] for i in g.segments]) for g in groups_]
    return [_joined([layers[i] for i in run]) for run in runs], moved


def _joined(layers: list[Layer]) -> Layer:
    if len(layers) == 1:
        return layers[0]

    def run(x: Tensor | None, ctx: Context) -> Tensor:
        for layer in layers:
            x = layer.run(x, ctx)
        return x

    unique = lambda units: tuple(dict.fromkeys(units))
    return layers[-1]._replace(
        run=run,
        units=unique(u for layer in layers for u in layer.units),
        backward_units=unique(u for layer in layers for u in layer.backward_units),
        first=layers[0].first,
    )


def expand(
    row: Sequence[Action], layers: Sequence[Layer], groups_: Sequence[Group], ahead: int
) -> list[list[Instruction]]:
    """The instructions of each action of a rank's row; `groups_`: blocks that are run again; `ahead`: how many units to
    prefetch.

    The loss's segment runs forward inside the backward action: its value is not needed earlier, and its gradients then
    never wait in memory.
    """
    of_stage = {s: [i for i, _ in found] for s, found in groupby(enumerate(layers), key=lambda item: item[1].stage)}
    found: list[Instruction] = []
    for number, a in enumerate(row):
        passes = {"F": _forward, "B": _backward, "I": _backward, "W": _weights}[a.kind]
        for ins in passes(a, layers, of_stage[a.stage], groups_):
            found.append(replace(ins, action=number))
    found = _with_reductions(_with_gathers(found, ahead), layers)
    return [list(same) for _, same in groupby(found, key=lambda ins: ins.action)]


def _instruction(kind: str, a: Action, i: int, weights: Units, **flags: Any) -> Instruction:
    return Instruction(kind, 0, a.microbatch, i, weights, **flags)


def _forward(a: Action, layers: Sequence[Layer], stage: list[int], groups_: Sequence[Group]) -> list[Instruction]:
    group = {i: g for g in groups_ for i in g.segments}
    found = []
    for i in stage:
        if layers[i].loss:
            continue
        ins = _instruction("F", a, i, layers[i].units)
        if g := group.get(i):
            inner = i != g.segments[0]
            ins = replace(ins, keep_graph=False, drop_input=inner, keep=g.keep, unneeded=g.unneeded(i))
        found.append(ins)
    return found


def _backward(a: Action, layers: Sequence[Layer], stage: list[int], groups_: Sequence[Group]) -> list[Instruction]:
    group_ending = {g.segments[-1]: g.segments for g in groups_}
    found = []
    for i in reversed(stage):
        if layers[i].loss:
            found.append(_instruction("F", a, i, layers[i].units, feed=False))
        for j in group_ending.get(i, ()):
            found.append(_instruction("F", a, j, layers[j].units, feed=j != i, again=True))
        found.append(_instruction(a.kind, a, i, layers[i].backward_units))
    return found


def _weights(a: Action, layers: Sequence[Layer], stage: list[int], groups_: Sequence[Group]) -> list[Instruction]:
    return [_instruction("W", a, i, ()) for i in reversed(stage)]


def _with_gathers(found: list[Instruction], ahead: int) -> list[Instruction]:
    """Fills in prefetch and release: the next `ahead` units that the list reads after each instruction."""
    out: list[Instruction] = []
    upcoming: list[Units] = []  # the units read after this instruction, nearest first, without repeats in a row
    for ins in reversed(found):
        release = bool(ins.weights) and (not upcoming or upcoming[0] != ins.weights)
        others = [units for units in upcoming if units != ins.weights][:ahead]
        out.append(replace(ins, prefetch=tuple(u for units in others for u in units), release=release))
        if release:
            upcoming = [ins.weights, *upcoming[:ahead]]
    return out[::-1]


def _with_reductions(found: list[Instruction], layers: Sequence[Layer]) -> list[Instruction]:
    """Marks what makes the last part of each unit's gradient in each microbatch, and in the step."""
    in_microbatch: set[tuple[int, str]] = set()
    in_step: set[str] = set()
    out: list[Instruction] = []
    for ins in reversed(found):
        if ins.kind != "F":
            units = layers[ins.segment].units[::-1]
            complete = [(u, u not in in_step) for u in units if (ins.microbatch, u) not in in_microbatch]
            ins = replace(ins, reduce=tuple(complete))
            in_microbatch |= {(ins.microbatch, u) for u in units}
            in_step |= {*units}
        out.append(ins)
    return out[::-1]


class Took(NamedTuple):
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
        keep: Keep,
        groups_: Sequence[Group],
    ):
        if units.stay:
            layers, groups_ = join(layers, groups_)
        self.row, self.layers, self.units, self.pipeline, self.keep = row, layers, units, pipeline, keep
        self.program = expand(row, layers, groups_, ahead=0 if units.stay else 2 if units.keeps_full else 1)
        self._passes = {"F": self._forward, "B": self._backward, "I": self._backward, "W": self._finish_weights}
        self.watched: list[Took] | None = None
        self._exit = {layer.stage: i for i, layer in enumerate(layers) if layer.last}
        self._entry = {layer.stage: i for i, layer in enumerate(layers) if layer.first}

    def run(self, contexts: Sequence[Context]) -> Tensor:
        """All passes of every microbatch (one context each); gradients are summed over the mesh when this returns. The
        result is the sum of this rank's losses, fp32 or wider.
        """
        self._contexts = contexts
        self._inputs: dict[tuple[int, int], Tensor | None] = {}
        self._graphs: dict[tuple[int, int], GradientEdge] = {}
        self._gradients: dict[tuple[int, int], Tensor] = {}
        self._deferred: dict[tuple[int, int], list[Callable[[], None]]] = {}
        wide = torch.promote_types(self.units.compute, torch.float32)
        self._loss = torch.zeros((), dtype=wide, device=self.units.device)
        self.units.begin_step()
        for number, (action, instructions) in enumerate(zip(self.row, self.program, strict=True)):
            self.pipeline.post(number)
            self._enter(action)
            began = self._now()
            for ins in instructions:
                self._run(ins)
            if self.watched is not None:
                self.watched.append(Took(action, began, self._now()))
        self.pipeline.finish()
        self.units.finish_step()
        return self._loss

    def _now(self) -> float:
        if self.watched is not None and self.units.device.type == "cuda":
            torch.cuda.synchronize(self.units.device)
        return time.perf_counter()

    def _enter(self, a: Action) -> None:
        """What the action takes from another stage is here."""
        needed = self.pipeline.needed(a)
        x = self.pipeline.take(needed) if needed else None
        if a.kind == "F":
            self._inputs[a.microbatch, self._entry[a.stage]] = None if x is None else x.requires_grad_()
        elif x is not None:
            self._gradients[a.microbatch, self._exit[a.stage]] = x

    def _run(self, ins: Instruction) -> None:
        for name in ins.weights:
            self.units.use(name)
        for name in ins.prefetch:
            self.units.fetch(name)
        self._passes[ins.kind](ins)
        if ins.release:
            for name in ins.weights:
                self.units.release(name)
        for name, final in ins.reduce:
            self.units.reduce(name, final)

    def _forward(self, ins: Instruction) -> None:
        at, layer = (ins.microbatch, ins.segment), self.layers[ins.segment]
        x = self._inputs.pop(at) if ins.drop_input else self._inputs[at]
        if layer.loss:
            self._open_gradients(layer)  # the loss makes gradients in its forward
        with torch.set_grad_enabled(ins.keep_graph), self._kept(ins, at):
            y = layer.run(x, self._contexts[ins.microbatch])
        if ins.keep_graph:
            self._graphs[at] = get_gradient_edge(y)  # and not y, whose memory only its readers keep
        if layer.loss:
            self._loss += y.detach()
            self._gradients[at] = torch.ones_like(y)
        elif ins.feed and layer.last:
            self.pipeline.give(Message("F", ins.microbatch, layer.stage + 1), y.detach())
        elif ins.feed:
            self._inputs[ins.microbatch, ins.segment + 1] = y.detach().requires_grad_()

    def _kept(self, ins: Instruction, at: tuple[int, int]) -> AbstractContextManager:
        if ins.again:
            return self.keep.replaying(at)
        return nullcontext() if ins.keep is None else self.keep.recording(at, ins.keep, ins.unneeded)

    def _backward(self, ins: Instruction) -> None:
        at, layer = (ins.microbatch, ins.segment), self.layers[ins.segment]
        edge, x = self._graphs.pop(at), self._inputs.pop(at)
        self._open_gradients(layer)
        with self.units.deferring(self._deferred.setdefault(at, []) if ins.kind == "I" else None):
            torch.autograd.backward(edge, self._gradients.pop(at))
        if x is None:
            return
        if layer.first:
            self.pipeline.give(Message("B", ins.microbatch, layer.stage - 1), x.grad)
        else:
            self._gradients[ins.microbatch, ins.segment - 1] = x.grad

    def _open_gradients(self, layer: Layer) -> None:
        for name in layer.units:
            self.units.open_gradients(name)

    def _finish_weights(self, ins: Instruction) -> None:
        self._open_gradients(self.layers[ins.segment])
        with torch.no_grad():
            for write in self._deferred.pop((ins.microbatch, ins.segment)):
                write()


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

    def __init__(self, cfg: Config, mesh: Mesh, stages: Stages):
        self.cfg, self.mesh, self.stages = cfg, mesh, stages
        schedule = stages.placement.schedule
        layers = line_up(stages.segments, stages.placement.last)
        pipeline = Pipeline(schedule, mesh, stream_shape(cfg), stages.units.compute)
        row = schedule.table[mesh.coords["pp"]]
        again = self._again(layers)
        self.executor = Executor(row, layers, stages.units, pipeline, stages.keep, again)
        self.optimizer = Optimizer(stages.units, cfg.optim, mesh.group(*MODEL_AXES))

    def _again(self, layers: Sequence[Layer]) -> list[Group]:
        """The blocks that are run again, stage by stage. Sets `spared`: for each block what its second run leaves out,
        None where it has none."""
        cfg, always = self.cfg, always_kept(self.cfg)
        blocks = {s: [i for i, x in enumerate(layers) if x.stage == s and x.is_block] for s in self.stages.segments}
        choice = choose(cfg, self.mesh, self.stages, always) if cfg.recompute.name == "budget" else []
        found, at = [], 0
        for mine in blocks.values():
            found += groups(mine, cfg.recompute, always, choice[at : at + len(mine)])
            at += len(mine)
        compiled = cfg.train.compile and cfg.mesh.tp == 1
        self.spared = spared([i for mine in blocks.values() for i in mine], found, compiled)
        return found

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

        compute, context = self.stages.units.compute, self.stages.context
        contexts = [context(b.tokens, b.labels, compute, loss_scale, b.positions, b.documents) for b in batches]
        loss_share = self.executor.run(contexts)
        counted.wait()  # where no stage of this rank has the loss, nobody has
        norm = self.optimizer.gradient_norm()
        lr = learning_rate(self.cfg.optim, step, self.cfg.train.steps)
        self.optimizer.step(step, lr, norm)
        self.stages.units.weights_changed()
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
