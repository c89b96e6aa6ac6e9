"""Every pipeline rank's program of a training step as the executor would run it: data, from the configuration alone.

The ranks along the other axes do the same at the same time, so the first one of them stands for all.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby, islice
from typing import NamedTuple, overload

import torch

from ndtrain.config import Config
from ndtrain.distributed.mesh import MeshSpec
from ndtrain.distributed.sharding import TENSOR_AXIS, FlatLayout
from ndtrain.engine.instructions import Instruction, Layer, expand, line_up, units_ahead
from ndtrain.model import Segment, Transformer
from ndtrain.parallel.build import flat_layouts, layouts_of, linear_in_graph, state_plan
from ndtrain.parallel.pp import Placement, input_of, receives
from ndtrain.parallel.recompute import RecomputeGroup, always_saved_ops, plan_recompute, skipped_ops
from ndtrain.parallel.unit import Residency, StatePlan
from ndtrain.plan.variants import BLOCKS, Variant, kind_of_layer, variants
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


class Reshard(NamedTuple):
    """A unit's unsharded weights are freed."""

    unit: str


class Open(NamedTuple):
    """The gradient of a whole unit is allocated, unless it is there."""

    unit: str


class Reduce(NamedTuple):
    """A unit's gradient is complete.

    Attributes:
        first, final: whether it is the step's first reduction of the unit, or its last.
    """

    unit: str
    first: bool
    final: bool


class Receive(NamedTuple):
    """The wait for the action's message from another pipeline rank."""


class Send(NamedTuple):
    """The launch of the action's message to another pipeline rank."""


Op = Run | Gather | Await | Reshard | Open | Reduce | Receive | Send
_AFTER_MICROBATCH = Instruction._fields.index("microbatch") + 1  # what an instruction does, whichever it is of


class Turn(NamedTuple):
    """An action of a rank's row.

    Attributes:
        receives: the messages whose receive is posted before it, each with its source.
        needs: the message from another rank that its `Receive` waits for.
        sends: the message to another rank that its `Send` launches.
    """

    action: Action
    receives: tuple[tuple[Message, int], ...]
    needs: Message | None
    sends: Message | None
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
        units: the names of those that it holds.
        turns: its row. Those that do the same mostly share it.
        skipped_ops: for each block what its recompute skips, None where it is not recomputed.
    """

    units: tuple[str, ...]
    turns: list[Turn]
    skipped_ops: list[frozenset[str] | None]

    @cached_property
    def passes(self) -> Counter[Variant]:
        """How often it makes each pass of a layer in a step."""
        runs = Counter(op.variants for turn in self.turns for op in turn.ops if isinstance(op, Run))
        passes: Counter[Variant] = Counter()
        for variants_of_run, times in runs.items():
            for variant in variants_of_run:
                passes[variant] += times
        return passes


@dataclass(frozen=True)
class StepProgram:
    """The programs of all pipeline ranks.

    Attributes:
        units: of the whole model, by name.
    """

    schedule: Schedule
    plan: StatePlan
    units: dict[str, UnitFacts]
    ranks: Sequence[RankProgram]

    @property
    def order(self) -> list[tuple[int, int]]:
        """(rank, index of its turn) of all turns, in an order in which they can run."""
        return _order(self.schedule)

    @classmethod
    def of(cls, cfg: Config, compiled: bool = False) -> "StepProgram":
        """Of a resolved configuration.

        Args:
            compiled: whether blocks are.

        Raises:
            ConfigError: the optimizer cannot keep its state so.
        """
        placement, plan = Placement.of(cfg), state_plan(cfg)
        layouts = layouts_of(cfg, MeshSpec.of(cfg.mesh), 0, placement)
        names = [name for name in layouts.names() if layouts.is_along_ep(name)]
        units = {name: UnitFacts.of(f, plan) for name, f in flat_layouts(layouts, names).items()}
        in_graph = compiled and linear_in_graph(cfg, placement)
        return cls(placement.schedule, plan, units, _shared(_Ranks(cfg, placement, units, in_graph)))


@dataclass(frozen=True, eq=False)
class _Ranks(Sequence[RankProgram]):
    """The programs of the ranks. Each is made when it is first asked for: where one does not fit into memory, a search
    needs no other. Two are equal if they give the same programs."""

    cfg: Config
    placement: Placement
    units: dict[str, UnitFacts]
    in_graph: bool

    def __len__(self) -> int:
        return self.placement.schedule.pp

    @overload
    def __getitem__(self, index: int) -> RankProgram: ...
    @overload
    def __getitem__(self, index: slice) -> list[RankProgram]: ...
    def __getitem__(self, index: int | slice) -> RankProgram | list[RankProgram]:
        if isinstance(index, slice):
            return [self[rank] for rank in range(len(self))[index]]
        rank = range(len(self))[index]
        if rank not in self._made:
            self._made[rank] = self._program(rank)
        return self._made[rank]

    @cached_property
    def _made(self) -> dict[int, RankProgram]:
        return {}

    @cached_property
    def _segments(self) -> dict[int, list[Segment]]:
        return _segments(self.cfg, self.placement)

    def _program(self, rank: int) -> RankProgram:
        return _rank_program(self.cfg, self.placement.schedule, rank, self._segments, self.units, self.in_graph)

    @cached_property
    def _facts(self) -> str:
        units = [(name, u.residency, u.shards == u.replicas == 1) for name, u in self.units.items()]
        saved = sorted(always_saved_ops(self.cfg))
        return repr((self.cfg.model, self.cfg.recompute, saved, self.placement.layers, units, self.in_graph))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Ranks):
            return NotImplemented
        return self.placement.schedule is other.placement.schedule and self._facts == other._facts

    def __hash__(self) -> int:
        return hash(self._facts)


@lru_cache(maxsize=1)
def _shared(ranks: _Ranks) -> _Ranks:
    """Those that were made before, where they are equal. A search plans steps one after another that share them, as
    they differ in the sizes of dp and fsdp alone."""
    return ranks


@lru_cache(maxsize=1)
def _order(schedule: Schedule) -> list[tuple[int, int]]:
    at = [0] * schedule.pp
    order = []
    for rank, _, _ in in_order(schedule.table):
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
    cfg: Config,
    schedule: Schedule,
    rank: int,
    segments: dict[int, list[Segment]],
    units: dict[str, UnitFacts],
    in_graph: bool,
) -> RankProgram:
    layers = line_up({stage: segments[stage] for stage in schedule.stages_of(rank)}, schedule.stages - 1)
    kinds = [kind_of_layer(layer.units, layer.loss) for layer in layers]
    groups = _recompute_groups(cfg, layers, kinds)
    names = tuple(dict.fromkeys(u for layer in layers for u in layer.units))
    held = [units[name] for name in names]
    reshards = any(u.residency.reshard_after_forward for u in held)
    resident = not reshards and all(u.shards == u.replicas == 1 for u in held)
    row = schedule.table[rank]
    instructions = expand(row, layers, groups, units_ahead(resident, reshards))
    passes = variants((ins for action in instructions for ins in action), kinds)
    turns = _turns(schedule, rank, instructions, passes, _Walk(layers, units))
    blocks = [i for i, kind in enumerate(kinds) if kind in BLOCKS]
    return RankProgram(names, turns, skipped_ops(blocks, groups, in_graph))


def _recompute_groups(cfg: Config, layers: Sequence[Layer], kinds: Sequence[str]) -> list[RecomputeGroup]:
    always, groups = always_saved_ops(cfg), []
    for _, members in groupby(range(len(layers)), key=lambda i: layers[i].stage):
        groups += plan_recompute([i for i in members if kinds[i] in BLOCKS], cfg.recompute, always)
    return groups


def _turns(
    schedule: Schedule,
    rank: int,
    instructions: Sequence[Sequence[Instruction]],
    passes: Iterator[Variant],
    walk: "_Walk",
) -> list[Turn]:
    """The row of a rank with what each action launches and waits for."""
    turns = []
    for action, of_action, posted in zip(schedule.table[rank], instructions, receives(schedule, rank), strict=True):
        needs, sent = _needs(schedule, rank, action), _sent(schedule, rank, action)
        ops = walk.turn(of_action, tuple(islice(passes, len(of_action))), needs is not None, sent is not None)
        turns.append(Turn(action, tuple(posted), needs, sent, ops))
    return turns


def _needs(schedule: Schedule, rank: int, action: Action) -> Message | None:
    """The message from another rank that an action waits for."""
    message = input_of(schedule, action)
    if message is None:
        return None
    source = message.stage - 1 if message.kind == "F" else message.stage + 1
    return None if schedule.rank_of[source] == rank else message


def _sent(schedule: Schedule, rank: int, action: Action) -> Message | None:
    """The message that an action sends to another rank."""
    message = sends(action)
    stays = not message or not 0 <= message.stage < schedule.stages or schedule.rank_of[message.stage] == rank
    return None if stays else message


class _Walk:
    """Follows a rank's program, as `Executor` and `ShardedUnits` do: which gathers and reductions it really launches.

    Attributes:
        whole, coming: units that are unsharded, or being gathered.
        reduced: units that have been reduced in this step.
    """

    def __init__(self, layers: Sequence[Layer], units: Mapping[str, UnitFacts]):
        self.layers, self.units = layers, units
        self.whole: frozenset[str] = frozenset()
        self.coming: frozenset[str] = frozenset()
        self.reduced: frozenset[str] = frozenset()
        self._known: dict[tuple, tuple] = {}

    def turn(
        self, instructions: Sequence[Instruction], passes: tuple[Variant, ...], receives: bool, sends: bool
    ) -> tuple[Op, ...]:
        """What an action does. Most actions differ in their microbatch alone, which nothing here depends on: those that
        begin alike are walked through once.

        Args:
            passes: the variant of each instruction. receives, sends: whether messages go between ranks.
        """
        facts = tuple((ins.kind, *ins[_AFTER_MICROBATCH:]) for ins in instructions)
        begin = facts, passes, receives, sends, self.whole, self.coming, self.reduced
        if begin not in self._known:
            ops = [*self.gathers(instructions[0]), *([Receive()] if receives else [])]
            for ins, variant in zip(instructions, passes, strict=True):
                ops += self.ops(ins, variant, sends)
            self._known[begin] = tuple(_joined(ops)), self.whole, self.coming, self.reduced
        done, self.whole, self.coming, self.reduced = self._known[begin]
        return done

    def gathers(self, ins: Instruction) -> Iterator[Op]:
        """The gathers that an instruction starts, of its own weights and of later ones."""
        for unit in (*ins.weights, *ins.prefetch):
            if unit not in self.whole and unit not in self.coming:
                self.coming |= {unit}
                yield Gather(unit)

    def ops(self, ins: Instruction, variant: Variant, sends: bool) -> Iterator[Op]:
        """What one instruction launches, runs and waits for, in order."""
        yield from self.gathers(ins)
        for unit in ins.weights:
            if unit not in self.whole:
                yield Await(unit)
                self.coming -= {unit}
                self.whole |= {unit}
        layer = self.layers[ins.layer]
        if ins.kind != "F" or layer.loss:
            yield from (Open(u) for u in layer.units if not self._residency(u).holds_full_grad)
        yield Run((variant,))
        if sends and self._sends(ins, layer):
            yield Send()
        for unit in ins.weights if ins.reshard else ():
            if self._residency(unit).reshard_after_forward:
                self.whole -= {unit}
                yield Reshard(unit)
        for unit, final in ins.reduce:
            if final or not self._residency(unit).holds_full_grad:
                yield Reduce(unit, unit not in self.reduced, final)
                self.reduced |= {unit}

    def _sends(self, ins: Instruction, layer: Layer) -> bool:
        """Whether the result of an instruction leaves its stage."""
        return layer.last and ins.feed and not layer.loss if ins.kind == "F" else layer.first and ins.kind in "BI"

    def _residency(self, unit: str) -> Residency:
        return self.units[unit].residency


def _joined(ops: Sequence[Op]) -> Iterator[Op]:
    """The same with neighbouring passes as one `Run`."""
    passes: list[Variant] = []
    for op in ops:
        if isinstance(op, Run):
            passes += op.variants
            continue
        if passes:
            yield Run(tuple(passes))
            passes = []
        yield op
    if passes:
        yield Run(tuple(passes))
