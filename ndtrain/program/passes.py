"""Expands a rank's row of the schedule into passes over its layers.

Each action of the table becomes a list of instructions, one per layer and pass. The list is the same in every step, so
each instruction can state in advance what it needs besides its own compute:

- the units whose weights it reads,
- the units to prefetch while it runs,
- whether to reshard its units afterwards,
- the units whose gradients it completes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

from torch import Tensor

from ndtrain.model import Context, Segment
from ndtrain.parallel.recompute import RecomputeGroup
from ndtrain.program.ops import NOTHING, Run
from ndtrain.schedule import Action

Units = tuple[str, ...]  # names


class Instruction(NamedTuple):
    """A pass of a layer for one microbatch.

    Attributes:
        run: the pass.
        action: the index of its action in the row.
        weights: the units that it reads. They are unsharded before it runs.
        prefetch: the units whose all-gather starts while it runs.
        reshard: True if its units are resharded afterwards, because other units are read next.
        reduce: (B, I, W) the units whose gradient of this microbatch is complete. Each comes with True if the gradient
            of the whole step is complete too.
    """

    run: Run
    action: int
    microbatch: int
    weights: Units
    prefetch: Units = ()
    reshard: bool = False
    reduce: tuple[tuple[str, bool], ...] = ()


class Layer(NamedTuple):
    """The code that one instruction runs: a segment of a stage, or several segments with one autograd graph.

    Attributes:
        run: as `Segment.run`.
        units: the units whose parameters it reads in its forward.
        backward_units: the units whose parameters it reads again in its backward.
        first, last: whether it is the first or the last of its stage.
        loss: whether its output is the loss.
        kind: as `Segment.kind`.
    """

    run: Callable[[Tensor | None, Context], Tensor]
    units: Units
    backward_units: Units
    stage: int
    first: bool
    last: bool
    loss: bool
    kind: str


def line_up(segments: dict[int, list[Segment]], last_stage: int) -> list[Layer]:
    """Return all segments of a rank as layers, stage after stage."""
    layers = []
    for stage, mine in sorted(segments.items()):
        for i, s in enumerate(mine):
            last = i == len(mine) - 1
            backward_units = s.units if s.weight_in_backward else ()
            loss = last and stage == last_stage
            layers.append(Layer(s.run, s.units, backward_units, stage, i == 0, last, loss, s.kind))
    return layers


def join(
    layers: Sequence[Layer], recompute_groups: Sequence[RecomputeGroup]
) -> tuple[list[Layer], list[RecomputeGroup]]:
    """Join consecutive layers of a stage into one, so that there are fewer autograd graphs. This is for ranks that do
    nothing between layers. The loss and the recomputed layers stay separate.

    Returns:
        The joined layers, and the recompute groups with the new layer indices.
    """
    alone = {i for g in recompute_groups for i in g.layers} | {i for i, layer in enumerate(layers) if layer.loss}
    runs: list[list[int]] = []
    for i, layer in enumerate(layers):
        if runs and not alone & {i, runs[-1][-1]} and layers[runs[-1][-1]].stage == layer.stage:
            runs[-1].append(i)
        else:
            runs.append([i])
    new_index = {i: n for n, run in enumerate(runs) for i in run}
    renumbered = [replace(g, layers=[new_index[i] for i in g.layers]) for g in recompute_groups]
    return [_joined([layers[i] for i in run]) for run in runs], renumbered


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


def units_ahead(fully_resident: bool, reshards: bool) -> int:
    """Return the number of units that a rank prefetches: 0 if nothing is gathered, otherwise 2. If units are resharded
    after each use, it is only 1, because prefetched weights take memory."""
    return 0 if fully_resident else 1 if reshards else 2


def expand(
    row: Sequence[Action], layers: Sequence[Layer], recompute_groups: Sequence[RecomputeGroup], ahead: int
) -> list[list[Instruction]]:
    """Return the instructions of each action of a rank's row.

    The loss runs its forward inside the backward action. Its value is not needed earlier, and its gradients are then
    used at once. A row with only forwards (an evaluation) saves nothing for a backward and ends with the loss.

    Args:
        recompute_groups: the blocks that are recomputed.
        ahead: the number of units to prefetch.
    """
    of_stage = {s: [i for i, _ in members] for s, members in groupby(enumerate(layers), key=lambda item: item[1].stage)}
    program: list[Instruction] = []
    forward = _evaluate if all(a.kind == "F" for a in row) else _forward
    for number, a in enumerate(row):
        passes = {"F": forward, "B": _backward, "I": _backward, "W": _weights}[a.kind]
        for ins in passes(a, layers, of_stage[a.stage], recompute_groups):
            program.append(ins._replace(action=number))
    program = _with_reductions(_with_gathers(program, ahead), layers)
    return [list(same) for _, same in groupby(program, key=lambda ins: ins.action)]


def _instruction(kind: str, a: Action, layer: int, weights: Units, **flags: Any) -> Instruction:
    return Instruction(Run(kind, layer, **flags), 0, a.microbatch, weights)


def _evaluate(
    a: Action, layers: Sequence[Layer], stage: list[int], recompute_groups: Sequence[RecomputeGroup]
) -> list[Instruction]:
    flags = {"keep_graph": False, "drop_input": True}
    return [_instruction("F", a, i, layers[i].units, feed=not layers[i].loss, **flags) for i in stage]


def _forward(
    a: Action, layers: Sequence[Layer], stage: list[int], recompute_groups: Sequence[RecomputeGroup]
) -> list[Instruction]:
    group = {i: g for g in recompute_groups for i in g.layers}
    instructions = []
    for i in stage:
        if layers[i].loss:
            continue
        flags: dict[str, Any] = {}
        if g := group.get(i):
            inner = i != g.layers[0]
            flags = {"keep_graph": False, "drop_input": inner, "save": g.save, "shape_only": g.shape_only(i)}
        instructions.append(_instruction("F", a, i, layers[i].units, **flags))
    return instructions


def _backward(
    a: Action, layers: Sequence[Layer], stage: list[int], recompute_groups: Sequence[RecomputeGroup]
) -> list[Instruction]:
    ending_at = {g.layers[-1]: g for g in recompute_groups}
    instructions = []
    for i in reversed(stage):
        if layers[i].loss:
            instructions.append(_instruction("F", a, i, layers[i].units, feed=False))
        if g := ending_at.get(i):
            for j in g.layers:
                flags = {"feed": j != i, "save": g.save, "shape_only": g.shape_only(j), "recompute": True}
                instructions.append(_instruction("F", a, j, layers[j].units, **flags))
        instructions.append(_instruction(a.kind, a, i, layers[i].backward_units))
    return instructions


def _weights(
    a: Action, layers: Sequence[Layer], stage: list[int], recompute_groups: Sequence[RecomputeGroup]
) -> list[Instruction]:
    return [_instruction("W", a, i, ()) for i in reversed(stage)]


def _with_gathers(instructions: list[Instruction], ahead: int) -> list[Instruction]:
    """Fill in `prefetch` and `reshard`. An instruction prefetches the next `ahead` units that are read after it."""
    out: list[Instruction] = []
    upcoming: list[Units] = []  # the units read after this instruction, nearest first, without consecutive repeats
    for ins in reversed(instructions):
        reshard = bool(ins.weights) and (not upcoming or upcoming[0] != ins.weights)
        others = [units for units in upcoming if units != ins.weights][:ahead]
        out.append(ins._replace(prefetch=tuple(u for units in others for u in units), reshard=reshard))
        if reshard:
            upcoming = [ins.weights, *upcoming[:ahead]]
    return out[::-1]


def _with_reductions(instructions: list[Instruction], layers: Sequence[Layer]) -> list[Instruction]:
    """Fill in `reduce`: the units whose gradient each instruction completes, for its microbatch or for the whole
    step."""
    in_microbatch: set[tuple[int, str]] = set()
    in_step: set[str] = set()
    out: list[Instruction] = []
    for ins in reversed(instructions):
        if ins.run.kind != "F":
            units = layers[ins.run.layer].units[::-1]
            complete = [(u, u not in in_step) for u in units if (ins.microbatch, u) not in in_microbatch]
            ins = ins._replace(reduce=tuple(complete))
            in_microbatch |= {(ins.microbatch, u) for u in units}
            in_step |= {*units}
        out.append(ins)
    return out[::-1]


# ----------------------------------------------------------------------------------------------- passes with equal work

Save = frozenset[str] | None


class Variant(NamedTuple):
    """Everything that the work of a pass depends on.

    Attributes:
        kind: F, B, I or W.
        layer: the kind of the layer, as `Segment.kind`.
        save, shape_only: (F) of the block's recompute group, for its forward and its recompute; None: not recomputed.
        drop_input, recompute: as in `Run`.
    """

    kind: str
    layer: str
    save: Save = None
    shape_only: frozenset[str] = NOTHING
    drop_input: bool = False
    recompute: bool = False

    @classmethod
    def of(cls, run: Run, layer: str) -> "Variant":
        """Return the variant of a pass of a layer of this kind."""
        return cls(run.kind, layer, run.save, run.shape_only, run.drop_input, run.recompute)


def variants(runs: Iterable[Run], layers: Sequence[str]) -> Iterator[Variant]:
    """Yield the variant of each pass.

    Args:
        layers: the kind of each of the rank's layers.
    """
    return (Variant.of(run, layers[run.layer]) for run in runs)
