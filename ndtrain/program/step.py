"""Every pipeline rank's program of a training step, as the executor would run it, from the configuration alone.

Ranks along the other axes do the same at the same time, so the first of them represents all.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby
from typing import overload

import torch

from ndtrain.config import Config, ModelConfig, RecomputeConfig
from ndtrain.config.schema import resolved
from ndtrain.mesh.mesh import MeshSpec
from ndtrain.mesh.sharding import FlatLayout
from ndtrain.model import Segment, Transformer
from ndtrain.model.transformer import BLOCKS
from ndtrain.parallel.balance import looks_ahead
from ndtrain.parallel.build import linear_in_graph, owner_rounds, state_plan
from ndtrain.parallel.distribution import Distribution
from ndtrain.parallel.owners import Round
from ndtrain.parallel.pp import Placement
from ndtrain.parallel.recompute import NOTHING, RecomputeGroup, RecomputeOps, plan_recompute, skipped_ops
from ndtrain.parallel.unit import StatePlan
from ndtrain.program.build import Experts, Holdings, UnitFacts, build_program, offers_gradients
from ndtrain.program.launch_order import check, launches
from ndtrain.program.ops import Op, RankProgram, Run, Turn
from ndtrain.program.passes import Layer, Variant, line_up, variants
from ndtrain.schedule import Schedule, forwards
from ndtrain.schedule.check import in_order

_SHORT = 2048  # actions


@dataclass(frozen=True)
class RankPlan:
    """The work of a pipeline rank in a step.

    Attributes:
        units: the names of the rank's units, in model order.
        names, kinds: for each of its layers, the first unit that it reads, and the kind of the layer.
        program: the program of the step.
        look_ahead: the program of a forward of all blocks before the step (`looks_ahead`); None if there is none.
        skipped_ops: for each block, the ops that its recompute skips; None if it is not recomputed.
        rounds: the rounds of the owners of whole tensors.
    """

    units: tuple[str, ...]
    names: tuple[str, ...]
    kinds: tuple[str, ...]
    program: RankProgram
    look_ahead: RankProgram | None
    skipped_ops: list[frozenset[str] | None]
    rounds: Sequence[Round] = ()

    @cached_property
    def passes(self) -> Counter[Variant]:
        """The number of times that the rank runs each pass of a layer in a step."""
        programs = [p for p in (self.look_ahead, self.program) if p is not None]
        shared = {id(turn.ops): turn.ops for p in programs for turn in p.turns}
        passes: Counter[Variant] = Counter()
        for key, times in Counter(id(turn.ops) for p in programs for turn in p.turns).items():
            for variant in variants((op for op in shared[key] if isinstance(op, Run)), self.kinds):
                passes[variant] += times
        return passes


@dataclass(frozen=True)
class StepProgram:
    """The programs of all pipeline ranks.

    Attributes:
        look_ahead: the schedule of the forward before the step (`looks_ahead`); None if there is none.
        units: all units of the model, by name.
    """

    schedule: Schedule
    look_ahead: Schedule | None
    plan: StatePlan
    units: dict[str, UnitFacts]
    ranks: Sequence[RankPlan]

    def turns(self, schedule: Schedule) -> Iterator[tuple[int, Turn]]:
        """Yield (rank, its turn) for all turns of one of the schedules, in an order in which they can run."""
        programs = self._programs(schedule)
        return ((rank, programs[rank].turns[index]) for rank, index in _order(schedule))

    def prove(self) -> None:
        """Run the launches of all pipeline ranks under NCCL's rules.

        Raises:
            LaunchOrderError: a rank would wait forever. The message names what it waits for.
        """
        for schedule in (self.look_ahead, self.schedule):
            if schedule is not None:
                programs = self._programs(schedule)
                check({i: list(launches(p, i, schedule.rank_of)) for i, p in enumerate(programs)})

    def _programs(self, schedule: Schedule) -> list[RankProgram]:
        """Return the ranks' programs of one of the schedules."""
        return [resolved(rank.program if schedule is self.schedule else rank.look_ahead) for rank in self.ranks]

    @classmethod
    def of(cls, cfg: Config, compiled: bool = False, device: str = "cuda") -> "StepProgram":
        """Build the programs of a resolved configuration.

        Args:
            compiled: True if blocks are compiled.
            device: "cpu" or "cuda".

        Raises:
            ConfigError: the optimizer does not support `optim.offload`.
        """
        distribution = Distribution.of(cfg)
        placement, layouts = distribution.placement, distribution.layouts(0)
        plan = state_plan(cfg)
        flat = layouts.flat(filter(layouts.is_along_ep, layouts.names()))
        units = {name: UnitFacts.of(f, plan) for name, f in flat.items()}
        in_graph = compiled and linear_in_graph(distribution, cfg.recompute)
        ahead = forwards(placement.schedule) if looks_ahead(cfg.model, cfg.moe) else None
        ranks = _shared(_Ranks(cfg, placement, flat, units, in_graph, device == "cuda", ahead))
        return cls(placement.schedule, ranks.look_ahead, plan, units, ranks)


def prove_if_short(cfg: Config, device: str) -> bool:
    """Prove that no pipeline rank of a resolved configuration waits forever.

    Return False, without a proof, if there is no pipeline, or if `recompute=budget` has yet to choose the blocks. A
    step of more than `_SHORT` actions has no proof either, since that would take more than about a second.

    Args:
        device: "cpu" or "cuda".

    Raises:
        LaunchOrderError: as `StepProgram.prove`.
    """
    table = Distribution.of(cfg).placement.schedule.table
    if len(table) == 1 or cfg.recompute.name == "budget" or sum(map(len, table)) > _SHORT:
        return False
    for sequences in cfg.train.batch_sizes.all:
        StepProgram.of(cfg.with_batch(sequences), device=device).prove()
    return True


@dataclass(frozen=True, eq=False)
class _Ranks(Sequence[RankPlan]):
    """The programs of the ranks. Two objects are equal if they give the same programs.

    Each program is made on first access: if one rank does not fit in memory, a search does not need the others.
    """

    cfg: Config
    placement: Placement
    flat: dict[str, FlatLayout]
    units: dict[str, UnitFacts]
    in_graph: bool
    in_place: bool
    look_ahead: Schedule | None

    def __len__(self) -> int:
        return self.placement.schedule.pp

    @overload
    def __getitem__(self, index: int) -> RankPlan: ...
    @overload
    def __getitem__(self, index: slice) -> list[RankPlan]: ...
    def __getitem__(self, index: int | slice) -> RankPlan | list[RankPlan]:
        if isinstance(index, slice):
            return [self[rank] for rank in range(len(self))[index]]
        rank = range(len(self))[index]
        if rank not in self._made:
            self._made[rank] = _rank_plan(self, rank)
        return self._made[rank]

    @cached_property
    def _made(self) -> dict[int, RankPlan]:
        return {}

    @cached_property
    def experts(self) -> Experts:
        return Experts.of(self.cfg.model, self.cfg.moe)

    @property
    def offers(self) -> bool:
        return offers_gradients(self.cfg.islands)

    @cached_property
    def _segments(self) -> dict[int, list[Segment]]:
        return _segments(self.cfg.model, self.placement)

    @cached_property
    def _facts(self) -> str:
        summed = lambda u: (u.axes, u.replica_axes, u.shard, u.grad_width) if u.replicas > 1 else ()
        units = [(name, u.residency, u.shards > 1, summed(u), u.tp_replicated > 0) for name, u in self.units.items()]
        saved = sorted(RecomputeOps.of(self.cfg.model, self.cfg.mesh).always)
        ahead = self.look_ahead is not None
        how = self.in_graph, self.in_place, ahead, self.experts, self.offers, self.cfg.optim.qk_clip is not None
        how += (self.cfg.optim, self.cfg.mesh) if state_plan(self.cfg).whole is not None else ()
        return repr((self.cfg.model, self.cfg.recompute, saved, self.placement.layers, units, how))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Ranks):
            return NotImplemented
        return self.placement.schedule is other.placement.schedule and self._facts == other._facts

    def __hash__(self) -> int:
        return hash(self._facts)


@lru_cache(maxsize=1)
def _shared(ranks: _Ranks) -> _Ranks:
    """Return the object of the previous call if it is equal, otherwise `ranks`.

    A search plans steps in sequence that share their programs, because they differ only in the sizes of dp and fsdp.
    """
    return ranks


@lru_cache(maxsize=2)
def _order(schedule: Schedule) -> list[tuple[int, int]]:
    at = [0] * schedule.pp
    order = []
    for rank, _, _ in in_order(schedule.table):
        order.append((rank, at[rank]))
        at[rank] += 1
    return order


def _segments(m: ModelConfig, placement: Placement) -> dict[int, list[Segment]]:
    """Return the segments of each stage, cut out of a whole model without weights."""
    with torch.device("meta"):
        whole = Transformer(m).segments()
    blocks = [s for s in whole if s.is_block]
    cut = {stage: [blocks[i] for i in layers] for stage, layers in enumerate(placement.layers)}
    cut[0] = [whole[0], *cut[0]]
    cut[placement.last] = [*cut[placement.last], *whole[-2:]]
    return cut


def _rank_plan(step: "_Ranks", rank: int) -> RankPlan:
    schedule, ahead = step.placement.schedule, step.look_ahead
    layers = line_up({stage: step._segments[stage] for stage in schedule.stages_of(rank)}, schedule.stages - 1)
    kinds = [layer.kind for layer in layers]
    ops = RecomputeOps.of(step.cfg.model, step.cfg.mesh)
    groups = _recompute_groups(step.cfg.recompute, layers, ops)
    held = {u for layer in layers for u in layer.units}
    units = {name: facts for name, facts in step.units.items() if name in held}
    before, unsharded = None, NOTHING
    if ahead is not None:
        headless = [layer._replace(units=()) if layer.loss else layer for layer in layers]
        before = _as_recorded(
            build_program(ahead, rank, Holdings(headless, units, (), step.in_place, step.experts)), layers, ops
        )
        unsharded = before.unsharded
    flat, sent = {name: step.flat[name] for name in units}, state_plan(step.cfg).sent
    rounds = owner_rounds(step.cfg.optim, MeshSpec.of(step.cfg.mesh), 0, flat, sent)
    clips = step.cfg.optim.qk_clip is not None
    holdings = Holdings(layers, units, groups, step.in_place, step.experts, step.offers, len(rounds), clips)
    program = build_program(schedule, rank, holdings, unsharded)
    blocks = [i for i, kind in enumerate(kinds) if kind in BLOCKS]
    return RankPlan(
        tuple(units),
        tuple(layer.units[0] for layer in layers),
        tuple(kinds),
        program,
        before,
        skipped_ops(blocks, groups, step.in_graph),
        rounds,
    )


def _as_recorded(program: RankProgram, layers: Sequence[Layer], ops: RecomputeOps) -> RankProgram:
    """Return a program of forwards without the passes of the loss.

    Its blocks have the piece of a recomputed block that saves nothing.
    """

    def recorded(made: tuple[Op, ...]) -> Iterator[Op]:
        for op in made:
            if not isinstance(op, Run):
                yield op
            elif layers[op.layer].kind in BLOCKS:
                yield Run("F", op.layer, keep_graph=False, save=NOTHING, shape_only=ops.unread(NOTHING))
            elif not layers[op.layer].loss:
                yield Run("F", op.layer, keep_graph=False)

    shared: dict[tuple[Op, ...], tuple[Op, ...]] = {}
    for turn in program.turns:
        if turn.ops not in shared:
            shared[turn.ops] = tuple(recorded(turn.ops))
    return replace(program, turns=tuple(turn._replace(ops=shared[turn.ops]) for turn in program.turns))


def _recompute_groups(cfg: RecomputeConfig, layers: Sequence[Layer], ops: RecomputeOps) -> list[RecomputeGroup]:
    groups: list[RecomputeGroup] = []
    for _, members in groupby(range(len(layers)), key=lambda i: layers[i].stage):
        groups += plan_recompute([i for i in members if layers[i].kind in BLOCKS], cfg, ops)
    return groups
