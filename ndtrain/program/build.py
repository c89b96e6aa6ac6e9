"""Builds the program of a rank: the gathers, reductions, sums and messages that it launches, and where it waits.

All decisions that depend on the ZeRO stage, the residency of a unit or the number of microbatches are made here. The
executor runs the result and decides nothing.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ndtrain.config import ModelConfig, MoEConfig
from ndtrain.config.schema import GRADIENTS, IslandsConfig
from ndtrain.mesh.sharding import TENSOR_AXIS, FlatLayout, UnitGroups
from ndtrain.model.transformer import sparse_layers
from ndtrain.parallel.grad_sums import BUCKET_BYTES
from ndtrain.parallel.pp import input_of, receives
from ndtrain.parallel.recompute import RecomputeGroup
from ndtrain.parallel.unit import Residency, StatePlan, hidden_in_shard
from ndtrain.program import ops
from ndtrain.program.ops import Op, RankProgram, Run, Turn
from ndtrain.program.passes import Instruction, Layer, expand, join, units_ahead
from ndtrain.schedule import Action, Message, Schedule, sends

_AFTER_MICROBATCH = Instruction._fields.index("microbatch") + 1  # the fields that do not depend on the action


@dataclass(frozen=True)
class UnitFacts:
    """The size and placement of a unit on a rank.

    Attributes:
        numel: number of elements of its flat buffer, after sharding over tp.
        hidden: number of elements of the rank's shard that belong to hidden matrices.
        groups: the ranks that shard and replicate it.
        residency: when its weights and gradient are unsharded on the rank.
        grad_width: bytes of an element of its gradient.
        tp_replicated: number of elements whose gradients are summed over the ranks of tp.
        tied: True if another stage holds it too.
    """

    numel: int
    hidden: int
    groups: UnitGroups
    residency: Residency
    grad_width: int
    tp_replicated: int
    tied: bool

    @classmethod
    def of(cls, layout: FlatLayout, plan: StatePlan) -> "UnitFacts":
        summed = sum(t.local_numel for t in layout.tensors if t.tp_replicas > 1 and TENSOR_AXIS in t.partial)
        return cls(
            numel=layout.numel,
            hidden=hidden_in_shard(layout),
            groups=layout.groups,
            residency=Residency.of(plan, layout.groups.shards),
            grad_width=plan.master.itemsize,
            tp_replicated=summed,
            tied=any(t.pp_replicas > 1 for t in layout.tensors),
        )

    @property
    def shards(self) -> int:
        return self.groups.shards

    @property
    def replicas(self) -> int:
        return self.groups.replicas

    @property
    def axes(self) -> str:
        """The axes that the buffer is sharded over, such as "fsdp+cp"."""
        return "+".join(self.groups.shard_axes)

    @property
    def replica_axes(self) -> str:
        """The axes along which ranks hold the same shard."""
        return "+".join(self.groups.replica_axes)

    @property
    def shard(self) -> int:
        """The number of elements of a shard."""
        return self.numel // self.shards

    @property
    def gathers(self) -> bool:
        """True if its weights have to be gathered, or copied from the master weights, before they are read."""
        return self.shards > 1 or not self.residency.shares_master


class Experts(NamedTuple):
    """The ops that experts add to a step: for their balance, and for buffers of a fixed size.

    Attributes:
        loads: True if their loads are summed over all ranks.
        biases: True if their selection biases follow from the loads.
        capacity: True if the ranks check that the experts' rows have fitted into buffers of a fixed size.
    """

    loads: bool = False
    biases: bool = False
    capacity: bool = False

    @classmethod
    def of(cls, m: ModelConfig, moe: MoEConfig) -> "Experts":
        loads = bool(sparse_layers(m))
        return cls(loads, biases=loads and moe.balance == "bias", capacity=moe.capacity is not None)


NO_EXPERTS = Experts()


def offers_gradients(islands: IslandsConfig) -> bool:
    """Return True if the gradients of each step are offered to other islands."""
    return islands.count > 0 and islands.sync == GRADIENTS


@dataclass(frozen=True)
class Holdings:
    """The layers that a rank computes and the units that it holds.

    Attributes:
        layers: the layers of its stages, in order.
        units: its units, in model order.
        recompute_groups: the blocks that are recomputed.
        in_place: True if a reduce-scatter needs no memory of its own while it is in progress.
        experts: the ops that experts add to the step.
        offers: True if each unit's gradient is offered to other islands as soon as it is final.
        rounds: the number of rounds in which the owners of whole tensors compute their updates.
        clips: True if the update reads the attention logits of all ranks (`optim.qk_clip`).
    """

    layers: Sequence[Layer]
    units: Mapping[str, UnitFacts]
    recompute_groups: Sequence[RecomputeGroup] = ()
    in_place: bool = False
    experts: Experts = NO_EXPERTS
    offers: bool = False
    rounds: int = 0
    clips: bool = False

    @property
    def reshards(self) -> bool:
        """True if some units are unsharded for each use."""
        return any(u.residency.reshard_after_forward for u in self.units.values())

    @property
    def resident(self) -> bool:
        """True if nothing is gathered, resharded or reduced while a step runs."""
        return not self.reshards and all(u.shards == u.replicas == 1 for u in self.units.values())

    def joined(self) -> "Holdings":
        """Return the same holdings with consecutive layers joined, if nothing happens between layers."""
        if not self.resident or self.offers:
            return self
        layers, groups = join(self.layers, self.recompute_groups)
        return replace(self, layers=layers, recompute_groups=groups)


def build_program(
    schedule: Schedule, rank: int, holdings: Holdings, unsharded: frozenset[str] = frozenset()
) -> RankProgram:
    """Return the program of a pipeline rank for its row of the schedule.

    Args:
        rank: the pipeline rank.
        unsharded: the units whose weights are already unsharded when the program starts.
    """
    row, layers = schedule.table[rank], holdings.layers
    ahead = units_ahead(holdings.resident, holdings.reshards)
    builder = _Builder(holdings, unsharded)
    begin, turns = tuple(builder.begin(row)), []
    instructions = expand(row, layers, holdings.recompute_groups, ahead)
    for action, of_action, posted in zip(row, instructions, receives(schedule, rank), strict=True):
        needs, gives = input_of(schedule, action), _result(schedule, action)
        takes = ops.Accept() if _is_local(schedule, rank, needs and needs.source) else ops.Receive()
        hands = ops.Hand() if _is_local(schedule, rank, gives and gives.stage) else ops.Send()
        made = builder.turn(of_action, takes if needs else None, hands if gives else None)
        turns.append(Turn(action, tuple(posted), needs, gives, made))
    end, update = tuple(builder.end(row)), tuple(builder.update(row))
    return RankProgram(begin, tuple(turns), end, update, builder.unsharded)


def _result(schedule: Schedule, action: Action) -> Message | None:
    """Return the message with the result of an action, or None if no other stage needs it."""
    message = sends(action)
    return message if message and 0 <= message.stage < schedule.stages else None


def _is_local(schedule: Schedule, rank: int, stage: int | None) -> bool:
    return stage is not None and schedule.rank_of[stage] == rank


class _Bucket(NamedTuple):
    """Adjacent gradient shards, elements [start, stop) of one gradient buffer, that one all-reduce sums."""

    buffer: UnitGroups
    start: int
    stop: int
    units: tuple[str, ...]


# attributes that a pass changes
_STATE = ("counting", "unsharded", "gathering", "opened", "reducing", "reduced", "buckets", "summing")


class _Builder:
    """Builds the ops of a rank, action by action, and tracks the state of its units.

    Attributes:
        counting: True if the weights of the tokens are being gathered.
        unsharded, gathering: units whose weights are unsharded, or being gathered.
        opened: units whose unsharded gradient exists.
        reducing: units whose reduction is in progress: (name, True if the step's first, True if the step's last).
        reduced: units that were reduced in this step.
        buckets: for each set of replica axes, the bucket of complete shards whose sum is not launched yet.
        summing: replica axes, and the units whose sums along them are in progress.
    """

    def __init__(self, holdings: Holdings, unsharded: frozenset[str]):
        self.layers, self.units, self.offers = holdings.layers, holdings.units, holdings.offers
        self.in_place = holdings.in_place and not self.offers  # offered gradients are collected one by one
        self.experts, self.rounds, self.counting = holdings.experts, holdings.rounds, False
        self.clips = holdings.clips
        self.unsharded, self.gathering = unsharded, frozenset[str]()
        self.opened, self.reduced = frozenset[str](), frozenset[str]()
        self.reducing: tuple[tuple[str, bool, bool], ...] = ()
        self.buckets: tuple[tuple[str, _Bucket], ...] = ()
        self.summing: tuple[tuple[str, tuple[str, ...]], ...] = ()
        self._spans = _gradient_spans(self.units)
        self._known: dict[tuple, tuple] = {}

    @property
    def _state(self) -> tuple:
        return tuple(getattr(self, name) for name in _STATE)

    @_state.setter
    def _state(self, state: tuple) -> None:
        vars(self).update(zip(_STATE, state, strict=True))

    # ------------------------------------------------------------------------------------------------ parts of a step

    def begin(self, row: Sequence[Action]) -> Iterator[Op]:
        """Yield the ops before the first action: count the tokens, and open the gradients that stay unsharded for the
        whole step."""
        if _trains(row):
            self.counting = True
            yield ops.CountTokens()
            for name, unit in self.units.items():
                if unit.residency.holds_full_grad:
                    yield from self._open(name)

    def turn(self, instructions: Sequence[Instruction], takes: Op | None, hands: Op | None) -> tuple[Op, ...]:
        """Return the ops of an action. Most actions differ only in their microbatch, so the ops are cached per state.

        Args:
            takes: the op that gets the action's input from another stage. None: it needs none.
            hands: the op that passes the action's result to another stage. None: no stage needs it.
        """
        facts = tuple((ins.run, *ins[_AFTER_MICROBATCH:]) for ins in instructions)
        key = facts, takes, hands, self._state
        if key not in self._known:
            made = [*self._gathers(instructions[0]), *([takes] if takes is not None else [])]
            for ins in instructions:
                made += self._pass(ins, hands)
            self._known[key] = tuple(made), self._state
        made, self._state = self._known[key]
        return made

    def end(self, row: Sequence[Action]) -> Iterator[Op]:
        """Yield the ops after the last action: wait until all messages are sent, and sum the gradients."""
        yield ops.FinishSends()
        if not _trains(row):
            if self.experts.loads:
                yield from (ops.SumLoads(), ops.AwaitLoads())
            return
        yield from self._await_tokens()
        yield from self._collect()
        buckets = dict(self.buckets)
        for axes in dict.fromkeys(u.replica_axes for u in self.units.values()):
            if axes in buckets:
                yield from self._sum(axes, buckets[axes])
            yield from self._await_sums(axes)
        if not self.offers:
            yield from self._sum_tp_replicas(self.units)
        for name, unit in self.units.items():
            if unit.tied:
                yield ops.SumTied(name)
                yield from self._offer(name)
        if self.experts.capacity:
            yield ops.CheckCapacity()
            yield from (ops.Offer(name) for name in reversed(self.units) if self.offers)

    def update(self, row: Sequence[Action]) -> Iterator[Op]:
        """Yield the ops from the summed gradients to the report of the step."""
        if not _trains(row):
            return
        if self.experts.loads:
            yield ops.SumLoads()
        yield ops.GatherStats()
        if self.clips:
            yield ops.GatherLogits()
        yield ops.Prepare()
        yield from whole_tensors(self.rounds)
        yield ops.Update()
        if self.experts.loads:
            yield ops.AwaitLoads()
        if self.experts.biases:
            yield ops.UpdateBiases()
        yield ops.Report()

    # ---------------------------------------------------------------------------------------------- parts of an action

    def _gathers(self, ins: Instruction) -> Iterator[Op]:
        """Yield the gathers that a pass launches: of the weights it reads, and of the weights it prefetches."""
        for name in (*ins.weights, *ins.prefetch):
            if self.units[name].gathers and name not in self.unsharded and name not in self.gathering:
                self.gathering |= {name}
                yield ops.Gather(name)

    def _pass(self, ins: Instruction, hands: Op | None) -> Iterator[Op]:
        yield from self._gathers(ins)
        for name in ins.weights:
            if name in self.gathering:
                self.gathering -= {name}
                self.unsharded |= {name}
                yield ops.Await(name)
        run, layer = ins.run, self.layers[ins.run.layer]
        if layer.loss:
            yield from self._await_tokens()
        if run.kind != "F" or (layer.loss and run.keep_graph):  # the loss computes gradients in its forward
            for name in layer.units:
                yield from self._open(name)
        yield run
        if hands is not None and _leaves(run, layer):
            yield hands
        for name in ins.weights if ins.reshard else ():
            if self.units[name].residency.reshard_after_forward:
                self.unsharded -= {name}
                yield ops.Free(name)
        for name, final in ins.reduce:
            if final or not self.units[name].residency.holds_full_grad:
                yield from self._reduce(name, final)

    def _await_tokens(self) -> Iterator[Op]:
        if self.counting:
            self.counting = False
            yield ops.AwaitTokens()

    def _open(self, name: str) -> Iterator[Op]:
        if name not in self.opened:
            self.opened |= {name}
            yield ops.Open(name)

    def _reduce(self, name: str, final: bool) -> Iterator[Op]:
        """Yield the ops that close a unit's unsharded gradient and launch its reduction.

        A unit has at most one reduction in progress. Of all units, at most one reduction in progress takes memory of
        its own or is followed by a sum over replicas."""
        unit = self.units[name]
        held = unit.residency.holds_full_grad
        if any(name == other for other, _, _ in self.reducing):  # a stage of one unit runs two backwards in a row
            yield from self._collect()
        yield ops.Close(name)
        if unit.shards > 1:
            yield ops.Reduce(name)
        if not held:
            self.opened -= {name}
        if not (held and unit.replicas == 1 and self.in_place):
            yield from self._collect()
        if unit.shards == unit.replicas == 1:
            yield from self._complete([name])
        else:
            self.reducing += ((name, name not in self.reduced, final),)
        self.reduced |= {name}

    def _collect(self) -> Iterator[Op]:
        """Yield the ops that finish all reductions in progress. Complete shards are then added to their buckets."""
        for name, first, final in self.reducing:
            unit = self.units[name]
            if unit.shards > 1:
                yield ops.Collect(name, first)
            if final and unit.replicas > 1:
                yield from self._add_to_bucket(name, unit)
            elif final:
                yield from self._complete([name])
        self.reducing = ()

    def _add_to_bucket(self, name: str, unit: UnitFacts) -> Iterator[Op]:
        """Extend the bucket by a shard, or start a new bucket if the shard does not end where the bucket starts.

        Gradients complete in backward order, so buckets grow towards the start of the buffer."""
        axes, (start, stop) = unit.replica_axes, self._spans[name]
        bucket = dict(self.buckets).get(axes)
        if bucket and bucket.buffer == unit.groups and bucket.start == stop:
            bucket = bucket._replace(start=start, units=(*bucket.units, name))
        else:
            if bucket:
                yield from self._sum(axes, bucket)
            bucket = _Bucket(unit.groups, start, stop, (name,))
        self.buckets = tuple((dict(self.buckets) | {axes: bucket}).items())
        if (bucket.stop - bucket.start) * unit.grad_width >= BUCKET_BYTES:
            yield from self._sum(axes, bucket)

    def _sum(self, axes: str, bucket: _Bucket) -> Iterator[Op]:
        if self.offers:
            yield from self._await_sums(axes)  # of the bucket before, so that its units need not wait for the last one
        self.buckets = tuple((a, b) for a, b in self.buckets if a != axes)
        self.summing += ((axes, bucket.units),)
        yield ops.Sum(axes, bucket.units)

    def _await_sums(self, axes: str) -> Iterator[Op]:
        summed = [name for a, units in self.summing if a == axes for name in units]
        if summed:
            self.summing = tuple((a, units) for a, units in self.summing if a != axes)
            yield ops.AwaitSums(axes)
            yield from self._complete(summed)

    def _complete(self, names: Sequence[str]) -> Iterator[Op]:
        """Yield what offered gradients still need after their sums over shards and replicas.

        Gradients that are not offered are summed over the ranks of tp at the end, in one message.
        """
        for name in names if self.offers else ():
            yield from self._sum_tp_replicas([name])
            if not self.units[name].tied:
                yield from self._offer(name)

    def _sum_tp_replicas(self, names: Iterable[str]) -> Iterator[Op]:
        if replicated := tuple(name for name in names if self.units[name].tp_replicated):
            yield ops.SumTPReplicas(replicated)

    def _offer(self, name: str) -> Iterator[Op]:
        """Offer a gradient that is final. If the step may be repeated with more room for experts, it is not yet."""
        if self.offers and not self.experts.capacity:
            yield ops.Offer(name)


def whole_tensors(rounds: int) -> Iterator[Op]:
    """Yield the ops of the owners of whole tensors. While a round is computed, gradients of the next one travel to the
    owners. Directions of the previous one travel back."""
    if rounds:
        yield ops.GatherWhole(0)
    for i in range(rounds):
        yield ops.AwaitWhole(i)
        if i + 1 < rounds:
            yield ops.GatherWhole(i + 1)
        yield ops.ComputeWhole(i)
        yield ops.ScatterWhole(i)
        if i:
            yield ops.AwaitScatter(i - 1)
    if rounds:
        yield ops.AwaitScatter(rounds - 1)


def _gradient_spans(units: Mapping[str, UnitFacts]) -> dict[str, tuple[int, int]]:
    """Return the (start, stop) of each unit's gradient shard in its buffer, as `unit.allocate` places them.

    Units with the same groups share a buffer. The spans are for the rank with shard 0, because the same shards are
    adjacent on every rank."""
    spans: dict[str, tuple[int, int]] = {}
    at: dict[UnitGroups, int] = {}
    for name, u in units.items():
        start = at.get(u.groups, 0)
        spans[name] = start, start + u.shard
        at[u.groups] = start + (u.numel if u.residency.holds_full_grad else u.shard)
    return spans


def _leaves(run: Run, layer: Layer) -> bool:
    """Return True if the result of a pass leaves its stage."""
    if run.kind == "F":
        return layer.last and run.feed and not layer.loss
    return layer.first and run.kind in "BI"


def _trains(row: Sequence[Action]) -> bool:
    return any(a.kind != "F" for a in row)
