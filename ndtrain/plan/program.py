"""Every pipeline rank's program of a training step as the executor would run it: data, from the configuration alone.

The ranks along the other axes do the same at the same time, so the first one of them stands for all.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, groupby, islice
from typing import NamedTuple, overload

import torch

from ndtrain.config import Config
from ndtrain.distributed.mesh import MeshSpec
from ndtrain.engine.instructions import Instruction, Layer, expand, line_up, units_ahead
from ndtrain.model import Segment, Transformer
from ndtrain.parallel.balance import looks_ahead
from ndtrain.parallel.build import flat_layouts, layouts_of, linear_in_graph, state_plan
from ndtrain.parallel.pp import Placement, input_of, receives
from ndtrain.parallel.recompute import (
    NOTHING,
    RecomputeGroup,
    always_saved_ops,
    plan_recompute,
    results_unread,
    skipped_ops,
)
from ndtrain.parallel.unit import StatePlan
from ndtrain.plan.variants import BLOCKS, Variant, kind_of_layer, variants
from ndtrain.plan.walk import Op, Run, UnitFacts, Walk
from ndtrain.schedule import Action, Message, Schedule, forwards, sends
from ndtrain.schedule.check import in_order


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
class RankProgram:
    """The program of a pipeline rank.

    Attributes:
        units: the names of those that it holds.
        turns: its row. Those that do the same mostly share it.
        look_ahead: the turns of a forward before that (`looks_ahead`).
        skipped_ops: for each block what its recompute skips, None where it is not recomputed.
    """

    units: tuple[str, ...]
    turns: list[Turn]
    skipped_ops: list[frozenset[str] | None]
    look_ahead: list[Turn]

    @cached_property
    def passes(self) -> Counter[Variant]:
        """How often it makes each pass of a layer in a step."""
        turns = chain(self.look_ahead, self.turns)
        runs = Counter(op.variants for turn in turns for op in turn.ops if isinstance(op, Run))
        passes: Counter[Variant] = Counter()
        for variants_of_run, times in runs.items():
            for variant in variants_of_run:
                passes[variant] += times
        return passes


@dataclass(frozen=True)
class StepProgram:
    """The programs of all pipeline ranks.

    Attributes:
        look_ahead: of the forward before the step (`looks_ahead`); None: there is none.
        units: of the whole model, by name.
    """

    schedule: Schedule
    look_ahead: Schedule | None
    plan: StatePlan
    units: dict[str, UnitFacts]
    ranks: Sequence[RankProgram]

    def turns(self, schedule: Schedule) -> Iterator[tuple[int, Turn]]:
        """(rank, its turn) of all turns of one of the schedules, in an order in which they can run."""
        of_rank = lambda rank: self.ranks[rank].turns if schedule is self.schedule else self.ranks[rank].look_ahead
        return ((rank, of_rank(rank)[index]) for rank, index in _order(schedule))

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
        ahead = forwards(placement.schedule) if looks_ahead(cfg) else None
        ranks = _shared(_Ranks(cfg, placement, units, in_graph, ahead))
        return cls(placement.schedule, ranks.look_ahead, plan, units, ranks)


@dataclass(frozen=True, eq=False)
class _Ranks(Sequence[RankProgram]):
    """The programs of the ranks. Each is made when it is first asked for: where one does not fit into memory, a search
    needs no other. Two are equal if they give the same programs."""

    cfg: Config
    placement: Placement
    units: dict[str, UnitFacts]
    in_graph: bool
    look_ahead: Schedule | None

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
        schedules = self.placement.schedule, self.look_ahead
        return _rank_program(self.cfg, *schedules, rank, self._segments, self.units, self.in_graph)

    @cached_property
    def _facts(self) -> str:
        units = [(name, u.residency, u.shards == u.replicas == 1) for name, u in self.units.items()]
        saved = sorted(always_saved_ops(self.cfg))
        ahead = self.look_ahead is not None
        return repr((self.cfg.model, self.cfg.recompute, saved, self.placement.layers, units, self.in_graph, ahead))

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


@lru_cache(maxsize=2)
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
    look_ahead: Schedule | None,
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
    prefetched, walk = units_ahead(resident, reshards), Walk(layers, units)
    before = _look_ahead(look_ahead, rank, layers, kinds, prefetched, walk) if look_ahead else []
    instructions = expand(schedule.table[rank], layers, groups, prefetched)
    passes = variants((ins for action in instructions for ins in action), kinds)
    turns = _turns(schedule, rank, instructions, passes, walk)
    blocks = [i for i, kind in enumerate(kinds) if kind in BLOCKS]
    return RankProgram(names, turns, skipped_ops(blocks, groups, in_graph), before)


def _look_ahead(
    schedule: Schedule, rank: int, layers: Sequence[Layer], kinds: Sequence[str], prefetched: int, walk: Walk
) -> list[Turn]:
    """The turns of a forward of all blocks that keeps nothing. It has no head."""
    headless = [layer._replace(units=()) if layer.loss else layer for layer in layers]
    expanded = expand(schedule.table[rank], headless, [], prefetched)
    instructions = [[ins for ins in action if not layers[ins.layer].loss] for action in expanded]
    unsaved = NOTHING, results_unread(NOTHING)  # a forward without a graph
    of = lambda kind: Variant("F", kind, *unsaved) if kind in BLOCKS else Variant("F", kind)
    passes = (of(kinds[ins.layer]) for action in instructions for ins in action)
    return _turns(schedule, rank, instructions, passes, walk)


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
    walk: Walk,
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
