"""Every pipeline rank's program of a training step as the executor would run it: data, from the configuration alone.

The ranks along the other axes do the same at the same time, so the first one of them stands for all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import torch

from ndtrain.config import Config
from ndtrain.distributed.mesh import MeshSpec
from ndtrain.distributed.sharding import TENSOR_AXIS, FlatLayout
from ndtrain.engine.instructions import Instruction, Layer, expand, line_up, units_ahead
from ndtrain.model import Segment, Transformer
from ndtrain.parallel.build import flat_layouts, layouts_of, state_plan
from ndtrain.parallel.pp import Placement, input_of, receives
from ndtrain.parallel.recompute import RecomputeGroup, always_saved_ops, plan_recompute
from ndtrain.parallel.unit import Residency, StatePlan
from ndtrain.plan.pieces import Variant, kind_of_unit, variants
from ndtrain.schedule import Action, Message, Schedule, sends
from ndtrain.schedule.check import in_order


class Run(NamedTuple):
    """Passes of layers, one after another."""

    variants: tuple[Variant, ...]


class Gather(NamedTuple):
    """The launch of a unit's all-gather."""

    unit: str


class Await(NamedTuple):
    """The wait for it."""

    unit: str


class Reduce(NamedTuple):
    """A unit's gradient is complete.

    Attributes:
        first, final: whether it is the step's first reduction of the unit, or its last.
    """

    unit: str
    first: bool
    final: bool


class SendTo(NamedTuple):
    """The launch of a message to another pipeline rank."""

    message: Message


Op = Run | Gather | Await | Reduce | SendTo


class Turn(NamedTuple):
    """An action of a rank's row.

    Attributes:
        receives: the messages whose receive is posted before it, each with its source.
        needs: the message from another rank that it waits for.
    """

    action: Action
    receives: tuple[tuple[Message, int], ...]
    needs: Message | None
    ops: tuple[Op, ...]


@dataclass(frozen=True)
class UnitFacts:
    """What a rank holds of a unit.

    Attributes:
        numel: elements of its flat buffer, after the cut over tp.
        shards, axes: the number of parts that the buffer is cut into, and along which axes, "fsdp+cp".
        replicas, replica_axes: ranks that hold the same part, along which axes.
        tp_replicated: elements whose gradients are summed over the ranks of tp.
        tied: whether another stage holds it too.
    """

    numel: int
    shards: int
    axes: str
    replicas: int
    replica_axes: str
    residency: Residency
    tp_replicated: int
    tied: bool

    @classmethod
    def of(cls, layout: FlatLayout, plan: StatePlan) -> "UnitFacts":
        groups = layout.groups
        summed = sum(t.local_numel for t in layout.tensors if t.tp_replicas > 1 and TENSOR_AXIS in t.partial)
        return cls(
            numel=layout.numel,
            shards=groups.shards,
            axes="+".join(groups.shard_axes),
            replicas=groups.replicas,
            replica_axes="+".join(groups.replica_axes),
            residency=Residency.of(plan, groups.shards),
            tp_replicated=summed,
            tied=any(t.pp_replicas > 1 for t in layout.tensors),
        )

    @property
    def shard(self) -> int:
        """Elements of a part."""
        return self.numel // self.shards


@dataclass(frozen=True)
class RankProgram:
    """The program of a pipeline rank.

    Attributes:
        layers: of its stages.
        kinds: of these layers.
        instructions: of each action of its row.
        groups: its recompute groups.
    """

    layers: list[Layer]
    kinds: list[str]
    instructions: list[list[Instruction]]
    groups: list[RecomputeGroup]

    @cached_property
    def variants(self) -> list[Variant]:
        """Of all instructions, one after another."""
        return list(variants((ins for action in self.instructions for ins in action), self.kinds))

    @cached_property
    def unit_names(self) -> list[str]:
        return list(dict.fromkeys(u for layer in self.layers for u in layer.units))


@dataclass(frozen=True)
class StepProgram:
    """The programs of all pipeline ranks.

    Attributes:
        units: of the whole model, by name.
    """

    schedule: Schedule
    plan: StatePlan
    units: dict[str, UnitFacts]
    ranks: list[RankProgram]

    @classmethod
    def of(cls, cfg: Config) -> "StepProgram":
        """Of a resolved configuration.

        Raises:
            ConfigError: the optimizer cannot keep its state so.
        """
        placement, plan = Placement.of(cfg), state_plan(cfg)
        layouts = layouts_of(cfg, MeshSpec.of(cfg.mesh), 0, placement)
        units = {name: UnitFacts.of(f, plan) for name, f in flat_layouts(layouts, layouts.names()).items()}
        segments = _segments(cfg, placement)
        ranks = [_rank_program(cfg, placement, segments, units, rank) for rank in range(placement.schedule.pp)]
        return cls(placement.schedule, plan, units, ranks)

    @cached_property
    def turns(self) -> list[list[Turn]]:
        """Of each rank, in order."""
        return [_turns(self, rank) for rank in range(self.schedule.pp)]

    @cached_property
    def order(self) -> list[tuple[int, int]]:
        """(rank, index of its turn) of all turns, in an order in which they can run."""
        at = [0] * self.schedule.pp
        order = []
        for rank, _, _ in in_order(self.schedule.table):
            order.append((rank, at[rank]))
            at[rank] += 1
        return order


def _segments(cfg: Config, placement: Placement) -> dict[int, list[Segment]]:
    """Stage -> its segments, cut out of those of a whole model without weights."""
    with torch.device("meta"):
        whole = Transformer(cfg.model).segments()
    blocks = [s for s in whole if s.is_block]
    cut = {stage: [blocks[i] for i in layers] for stage, layers in enumerate(placement.layers)}
    cut[0] = [whole[0], *cut[0]]
    cut[placement.last] = [*cut[placement.last], *whole[-2:]]
    return cut


def _rank_program(
    cfg: Config, placement: Placement, segments: dict[int, list[Segment]], units: dict[str, UnitFacts], rank: int
) -> RankProgram:
    mine = {stage: segments[stage] for stage in placement.schedule.stages_of(rank)}
    layers = line_up(mine, placement.last)
    kinds = [kind_of_unit(layer.units[0], layer.loss) for layer in layers]
    held = [units[name] for layer in layers for name in layer.units]
    reshards = any(u.residency.reshard_after_forward for u in held)
    resident = not reshards and all(u.shards == u.replicas == 1 for u in held)
    groups = _recompute_groups(cfg, layers, kinds)
    row = placement.schedule.table[rank]
    return RankProgram(layers, kinds, expand(row, layers, groups, units_ahead(resident, reshards)), groups)


def _recompute_groups(cfg: Config, layers: Sequence[Layer], kinds: Sequence[str]) -> list[RecomputeGroup]:
    always, groups = always_saved_ops(cfg), []
    for _, members in groupby(range(len(layers)), key=lambda i: layers[i].stage):
        groups += plan_recompute([i for i in members if kinds[i] == "block"], cfg.recompute, always)
    return groups


def _turns(program: StepProgram, rank: int) -> list[Turn]:
    """The row of a rank with what each action launches and waits for."""
    mine, schedule, walk = program.ranks[rank], program.schedule, _Walk(program, rank)
    flat, posts, turns = iter(mine.variants), receives(schedule, rank), []
    for number, (action, instructions) in enumerate(zip(schedule.table[rank], mine.instructions, strict=True)):
        ops = [op for ins in instructions for op in walk.ops(ins, action, next(flat))]
        received = tuple(posts[number])
        turns.append(Turn(action, received, _needs(schedule, rank, action), tuple(_joined(ops))))
    return turns


def _needs(schedule: Schedule, rank: int, action: Action) -> Message | None:
    """The message from another rank that an action waits for."""
    message = input_of(schedule, action)
    if message is None:
        return None
    source = message.stage - 1 if message.kind == "F" else message.stage + 1
    return None if schedule.rank_of[source] == rank else message


class _Walk:
    """Follows a rank's program, as `Executor` and `ShardedUnits` do: which gathers and reductions it really launches.

    Attributes:
        whole, coming: units that are unsharded, or being gathered.
        reduced: units that have been reduced in this step.
    """

    def __init__(self, program: StepProgram, rank: int):
        self.program, self.schedule, self.rank = program, program.schedule, rank
        self.layers = program.ranks[rank].layers
        self.whole: set[str] = set()
        self.coming: set[str] = set()
        self.reduced: set[str] = set()

    def ops(self, ins: Instruction, action: Action, variant: Variant) -> Iterator[Op]:
        """What one instruction launches, runs and waits for, in order."""
        for unit in ins.weights:
            if unit not in self.whole:
                yield from self._gather(unit)
                yield Await(unit)
                self.coming.discard(unit)
                self.whole.add(unit)
        for unit in ins.prefetch:
            yield from self._gather(unit)
        yield Run((variant,))
        if message := self._sent(ins, action):
            yield SendTo(message)
        if ins.reshard:
            self.whole -= {u for u in ins.weights if self._residency(u).reshard_after_forward}
        for unit, final in ins.reduce:
            if final or not self._residency(unit).holds_full_grad:
                yield Reduce(unit, unit not in self.reduced, final)
                self.reduced.add(unit)

    def _gather(self, unit: str) -> Iterator[Op]:
        if unit not in self.whole and unit not in self.coming:
            self.coming.add(unit)
            yield Gather(unit)

    def _sent(self, ins: Instruction, action: Action) -> Message | None:
        """The message that an instruction sends to another rank."""
        layer, message = self.layers[ins.layer], sends(action)
        at_end = layer.last and ins.feed and not layer.loss if ins.kind == "F" else layer.first and ins.kind in "BI"
        stays = not message or not 0 <= message.stage < self.schedule.stages
        return None if not at_end or stays or self.schedule.rank_of[message.stage] == self.rank else message

    def _residency(self, unit: str) -> Residency:
        return self.program.units[unit].residency


def _joined(ops: Sequence[Op]) -> Iterator[Op]:
    """The same with neighbouring passes as one `Run`."""
    for kind, members in groupby(ops, key=type):
        if kind is Run:
            yield Run(tuple(v for run in members for v in run.variants))
        else:
            yield from members
