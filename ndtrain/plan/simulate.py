"""Computes the time of a training step, from the clocks of every pipeline rank's host, device and communicators.

A rank is a vector of clocks: the times at which its host, its compute stream and each communicator become free. A
kernel starts when the stream is free and the host has launched it. A collective starts when its communicator is free,
the host has launched it and the stream has reached the launch, as with NCCL. A wait moves the stream's clock to the
collective's end. All of this only adds durations and takes maxima. So the effect of a layer's pass on the clocks is a
matrix over (max, +). It is made once for each kind of pass (`Passage`), and it is exact however often the pass repeats.

Compute that overlaps with a collective is slower (`Rates.interference`): a wait for a collective of d seconds delays
the stream by that share of d. A rank notices the end late (`Prices.late_s`). Overlapping compute hides this too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import groupby
from typing import NamedTuple

from ndtrain.mesh.mesh import EP
from ndtrain.plan.events import Collective, Event, Kernel, Piece
from ndtrain.plan.operators import DTYPE_NAMES
from ndtrain.plan.price import Prices
from ndtrain.program import ops
from ndtrain.program.build import UnitFacts
from ndtrain.program.ops import Op, Run, Turn
from ndtrain.program.passes import Variant, variants
from ndtrain.program.step import RankPlan, StepProgram
from ndtrain.schedule import Message

HOST, STREAM = 0, 1
_NEVER = -math.inf
_UNTIMED = (ops.Accept, ops.Hand, ops.Free, ops.Open, ops.Close, ops.Offer, ops.AwaitTokens)
CAUSES = ("launch", "tp", "cp", "ep", "fsdp", "dp", "pp")  # costs of a step besides kernels


class Sizes(NamedTuple):
    """Sizes in bytes that a step's durations depend on, in addition to its pieces.

    Attributes:
        compute, master: of an element of the weights, and of an element of the gradients.
        message: of an activation that a stage sends.
        context: memory that a microbatch holds over the whole step.
        update: traffic of the optimizer per element.
        gradient: memory of the gradient per element.
        loads: of the token counts of all layers' experts.
    """

    compute: int
    master: int
    message: int
    context: int
    update: int
    gradient: int
    loads: int = 0


class Costs:
    """Durations of a program's operations.

    Args:
        free: the causes in `CAUSES` that take no time.
    """

    def __init__(self, prices: Prices, free: frozenset[str] = frozenset()):
        self.prices, self.free = prices, free
        self.launch_s = 0.0 if "launch" in free else prices.launch_s

    def collective(self, cause: str, axis: str, op: str, nbytes: float) -> float:
        return 0.0 if cause in self.free else self.prices.collective(axis, op, int(nbytes))

    def after(self, clock: float, end: float, seconds: float) -> float:
        """Return the stream's clock after a wait for a collective that took `seconds` until `end` (0 if free)."""
        if not seconds:
            return max(clock, end)
        return max(clock + self.prices.rates.interference * seconds, end + self.prices.late_s)

    def message(self, nbytes: int) -> float:
        return 0.0 if "pp" in self.free else self.prices.message("pp", nbytes)

    def copy(self, nbytes: float, op: str = "copy_") -> float:
        """Return the seconds of an operator that moves `nbytes`, including the fixed part. Return 0 for 0 bytes."""
        return self.prices.kernel(Kernel("memory", 0, int(nbytes), "fp32", (), op)) if nbytes else 0.0


# ------------------------------------------------------------------------------------------------------------ passages

Row = list[tuple[int, float]]  # (old clock, seconds): the new clock is the maximum of old clock + seconds


class Passage:
    """The effect of some events on the clocks, as a matrix over (max, +).

    Args:
        rows: one for each new clock.
    """

    def __init__(self, rows: list[Row]):
        self.rows = rows

    @classmethod
    def of(cls, events: Sequence[Event], costs: Costs, axes: Sequence[str]) -> "Passage":
        """Return the passage of recorded events.

        Args:
            axes: the axes with a communicator. Their clocks come after the stream's.
        """
        clocks = range(2 + len(axes))
        columns = [_clocks_after(events, costs, axes, start) for start in clocks]
        return cls([[(j, columns[j][i]) for j in clocks if columns[j][i] > _NEVER] for i in clocks])

    def then(self, other: "Passage") -> "Passage":
        """Return the passage through this one and then through `other`."""
        rows = []
        for row in other.rows:
            best: dict[int, float] = {}
            for k, later in row:
                for j, sooner in self.rows[k]:
                    best[j] = max(best.get(j, _NEVER), sooner + later)
            rows.append(sorted(best.items()))
        return Passage(rows)

    def apply(self, clocks: list[float]) -> None:
        """Advance the clocks."""
        clocks[:] = [max([clocks[j] + seconds for j, seconds in row]) for row in self.rows]


def _clocks_after(events: Sequence[Event], costs: Costs, axes: Sequence[str], start: int) -> list[float]:
    """Return the clocks after the events if only the clock `start`, which is at 0, holds anything back."""
    clocks = [_NEVER] * (2 + len(axes))
    clocks[start] = 0.0
    ends: dict[int, tuple[float, float]] = {}  # work -> (end, seconds)
    for event in events:
        if isinstance(event, Kernel):
            clocks[HOST] += costs.launch_s
            clocks[STREAM] = max(clocks[STREAM], clocks[HOST]) + costs.prices.kernel(event)
        elif isinstance(event, Collective):
            at = 2 + axes.index(event.axis)
            clocks[HOST] += costs.launch_s
            seconds = costs.collective(event.axis, event.axis, event.op, event.bytes)
            if event.axis == EP:
                seconds *= costs.prices.rates.imbalance
            clocks[at] = max(clocks[at], clocks[HOST], clocks[STREAM]) + seconds
            ends[event.work] = clocks[at], seconds
        else:
            end, seconds = ends[event.work]
            clocks[STREAM] = costs.after(clocks[STREAM], end, seconds)
    return clocks


# ------------------------------------------------------------------------------------------------------------- a rank


@dataclass
class _Rank:
    """The clocks of a rank, and its operations in flight.

    Attributes:
        clocks: host, stream, and the communicators of the axes used inside passes of layers.
        lanes: the clocks of the other communicators.
        gathers, reductions: unit -> (end, seconds) of the gather or reduction in flight.
        sums: axes -> (end, seconds) of each sum over replicas in flight.
        copies: seconds of kernels outside the passes of layers.
    """

    step: "Simulation"
    clocks: list[float]

    def __post_init__(self) -> None:
        self.lanes: dict[str, float] = {}
        self.gathers: dict[str, tuple[float, float]] = {}
        self.reductions: dict[str, tuple[float, float]] = {}
        self.sums: dict[str, list[tuple[float, float]]] = {}
        self.copies = 0.0

    def launch(self, lane: str, seconds: float) -> float:
        """Launch a collective and return its end."""
        clocks = self.clocks
        clocks[HOST] += self.step.costs.launch_s
        self.lanes[lane] = max(self.lanes.get(lane, 0.0), clocks[HOST], clocks[STREAM]) + seconds
        return self.lanes[lane]

    def wait(self, end: float, seconds: float) -> None:
        self.clocks[STREAM] = self.step.costs.after(self.clocks[STREAM], end, seconds)

    def kernel(self, nbytes: float) -> None:
        """Run a kernel that moves `nbytes`."""
        if nbytes:
            seconds = self.step.costs.copy(nbytes)
            self.copies += seconds
            self.clocks[HOST] += self.step.costs.launch_s
            self.clocks[STREAM] = max(self.clocks[STREAM], self.clocks[HOST]) + seconds

    # ---------------------------------------------------------------------------------------------------- the units

    def gather(self, name: str) -> None:
        u, sizes = self.step.program.units[name], self.step.sizes
        self.kernel(copied_bytes(u, sizes))
        seconds = 0.0
        if u.shards > 1:
            seconds = self.step.costs.collective("fsdp", u.axes, "all_gather", u.numel * sizes.compute)
        end = self.launch("gathers", seconds) if u.shards > 1 else 0.0
        self.gathers[name] = end, seconds

    def reduce(self, name: str) -> None:
        u = self.step.program.units[name]
        seconds = self.step.costs.collective("fsdp", u.axes, "reduce_scatter", u.numel * self.step.sizes.master)
        lane = "reductions" if u.residency.reshard_after_forward else "gathers"
        self.reductions[name] = self.launch(lane, seconds), seconds

    def collect(self, op: ops.Collect) -> None:
        self.wait(*self.reductions.pop(op.unit))
        self.kernel(added_bytes(self.step.program.units[op.unit], op.first, self.step.sizes))

    def sum(self, op: ops.Sum) -> None:
        shards = sum(self.step.program.units[name].shard for name in op.units)
        seconds = self.step.costs.collective("dp", op.axes, "all_reduce", shards * self.step.sizes.master)
        self.sums.setdefault(op.axes, []).append((self.launch(op.axes, seconds), seconds))

    def await_sums(self, axes: str) -> None:
        for end, seconds in self.sums.pop(axes):
            self.wait(end, seconds)

    def sum_tp_replicas(self, names: Sequence[str]) -> None:
        summed = sum(self.step.program.units[name].tp_replicated for name in names)
        seconds = self.step.costs.collective("tp", "tp", "all_reduce", summed * self.step.sizes.master)
        self.wait(self.launch("tp replicas", seconds), seconds)

    def end(self, op: Op, plan: RankPlan) -> None:
        """Run an op of the end of a step."""
        step, units = self.step, self.step.program.units
        match op:
            case ops.FinishSends():
                for turn in plan.program.turns:
                    if any(isinstance(op, ops.Send) for op in turn.ops):
                        self.wait(step.arrived[turn.gives], 0.0)
            case ops.Collect():
                self.collect(op)
            case ops.Sum():
                self.sum(op)
            case ops.AwaitSums():
                self.await_sums(op.axes)
            case ops.SumTPReplicas():
                self.sum_tp_replicas(op.units)
            case ops.SumTied():
                seconds = step.costs.message(units[op.unit].shard * step.sizes.master)
                self.wait(self.launch("ties", seconds), seconds)
            case ops.Reduce():
                self.reduce(op.unit)


def copied_bytes(u: UnitFacts, sizes: Sizes) -> int:
    """Return the bytes that a rank reads and writes to copy its own part of a unit into place for a gather."""
    return 0 if u.residency.shares_master else u.shard * (sizes.master + sizes.compute)


def added_bytes(u: UnitFacts, first: bool, sizes: Sizes) -> int:
    """Return the bytes that a rank reads and writes to copy the `first` reduced gradient, or to add a later one."""
    return 0 if u.residency.holds_full_grad else u.shard * sizes.master * (2 if first else 3)


# ------------------------------------------------------------------------------------------------------ the whole step


class StepTimes(NamedTuple):
    """Seconds from the start of a step.

    Attributes:
        gradients: when the last rank has its gradients.
        end: when the last rank has updated its weights.
        copies: seconds of kernels outside the passes of layers before `gradients`: they put weights in place and add
            gradients. Mean over the ranks.
    """

    gradients: float
    end: float
    copies: float


class Simulation:
    """One training step of all pipeline ranks.

    Args:
        pieces: the work of each kind of pass.
        free: the causes in `CAUSES` that take no time.
    """

    def __init__(
        self,
        program: StepProgram,
        pieces: Mapping[Variant, Piece],
        sizes: Sizes,
        prices: Prices,
        free: frozenset[str] = frozenset(),
    ):
        self.program, self.pieces, self.sizes, self.costs = program, pieces, sizes, Costs(prices, free)
        used = {v for rank in program.ranks for v in rank.passes}
        self.axes = sorted({e.axis for v in used for e in pieces[v].events if isinstance(e, Collective)})
        self._passages: dict[tuple[Variant, ...], Passage] = {}
        self._timed_ops: dict[tuple[int, int], list[Op | Passage]] = {}
        self._sent: dict[Message, float] = {}  # when the sender has reached it
        self.arrived: dict[Message, float] = {}
        self._links: dict[tuple[int, int], float] = {}  # (source, target) -> when the link is free
        self._posted: dict[tuple[int, int], list[tuple[Message, float]]] = {}  # not yet arrived, in order

    @cached_property
    def times(self) -> StepTimes:
        """The times of the step. The first access simulates it."""
        program, costs = self.program, self.costs
        ranks = [_Rank(self, [0.0] * (2 + len(self.axes))) for _ in program.ranks]
        if program.look_ahead is not None:
            for rank, turn in program.turns(program.look_ahead):
                self._turn(rank, ranks[rank], turn)
            self._add_up_loads(ranks)
        for rank, turn in program.turns(program.schedule):
            self._turn(rank, ranks[rank], turn)
        for state, own in zip(ranks, program.ranks, strict=True):
            for op in own.program.end:
                state.end(op, own)
        gradients = [max(state.clocks[:2]) for state in ranks]
        copies = sum(state.copies for state in ranks) / len(ranks)
        return StepTimes(max(gradients), self._updated(gradients) + costs.prices.rates.step_s, copies)

    def _updated(self, ends: list[float]) -> float:
        """Return when the last rank has run the ops of the update.

        Args:
            ends: when each rank has its gradients.
        """
        costs, ranks = self.costs, self.program.ranks
        shards = [sum(self.program.units[name].shard for name in own.units) for own in ranks]
        norms = [costs.copy(elements * self.sizes.master, "linalg_vector_norm") for elements in shards]
        known = max(map(sum, zip(ends, norms, strict=True))) + self._statistics()
        updates = [costs.copy(elements * self.sizes.update, "_fused_adamw_") for elements in shards]
        return known + max(map(sum, zip(updates, map(self._of_whole_tensors, ranks), strict=True)))

    def _of_whole_tensors(self, own: RankPlan) -> float:
        """Return the seconds of the owners' rounds. Exchanges run one after the other, in parallel to the computations.
        The owner with the most work in a round represents all."""
        costs, sent = self.costs, self.program.plan.sent
        now = link = 0.0
        arrives: dict[tuple[str, int], float] = {}
        for op in own.program.update:
            match op:
                case ops.GatherWhole(number) | ops.ScatterWhole(number):
                    one = own.rounds[number]
                    copies = one.replicas if isinstance(op, ops.ScatterWhole) else 1
                    nbytes = one.numel * sent.itemsize // one.ranks * copies
                    link = max(now, link) + costs.collective("dp", "+".join(one.axes), "all_to_all", nbytes)
                    arrives[type(op).__name__, number] = link
                case ops.AwaitWhole(number):
                    now = max(now, arrives["GatherWhole", number])
                case ops.AwaitScatter(number):
                    now = max(now, arrives["ScatterWhole", number])
                case ops.ComputeWhole(number):
                    flops = max(batch.cost for batch in own.rounds[number].batches.values())
                    now += costs.prices.kernel(Kernel("matmul", int(flops), 0, DTYPE_NAMES[sent]))
        return now

    def _add_up_loads(self, ranks: Sequence[_Rank]) -> None:
        """Make all ranks wait for the sum of expert loads after the forward before the step. Forget its messages."""
        counted = max(state.clocks[STREAM] for state in ranks)
        mesh = self.costs.prices.mesh
        known = counted + self.costs.prices.collective("+".join(mesh.order), "all_reduce", self.sizes.loads)
        for state in ranks:
            state.clocks[STREAM] = max(state.clocks[STREAM], known)
        self._sent.clear()
        self.arrived.clear()

    @cached_property
    def _message_s(self) -> float:
        return self.costs.message(self.sizes.message)

    def _statistics(self) -> float:
        """Return the seconds of the all-reduce of loss and norm, which are two fp64 numbers."""
        mesh = self.costs.prices.mesh
        return self.costs.prices.collective("+".join(mesh.order), "all_reduce", 16)

    def _turn(self, number: int, rank: _Rank, turn: Turn) -> None:
        clocks, launch_s = rank.clocks, self.costs.launch_s
        for message, source in turn.posts:
            clocks[HOST] += launch_s
            self._posted.setdefault((source, number), []).append((message, max(clocks[HOST], clocks[STREAM])))
        for op in self._timed(number, turn.ops):
            match op:
                case Passage():
                    op.apply(clocks)
                case ops.Gather():
                    rank.gather(op.unit)
                case ops.Await():
                    rank.wait(*rank.gathers.pop(op.unit))
                case ops.Reduce():
                    rank.reduce(op.unit)
                case ops.Collect():
                    rank.collect(op)
                case ops.Sum():
                    rank.sum(op)
                case ops.AwaitSums():
                    rank.await_sums(op.axes)
                case ops.SumTPReplicas():
                    rank.sum_tp_replicas(op.units)
                case ops.Receive():
                    assert turn.needs, "it receives from another rank"
                    clocks[STREAM] = max(clocks[STREAM], self._arrival(turn.needs, number))
                case ops.Send():
                    clocks[HOST] += launch_s
                    assert turn.gives, "it sends to another rank"
                    self._sent[turn.gives] = max(clocks[HOST], clocks[STREAM])

    def _timed(self, number: int, made: tuple[Op, ...]) -> list[Op | Passage]:
        """Return the ops of an action that take time, with neighbouring passes of layers as one `Passage`. Actions that
        share their ops share the result."""
        key = number, id(made)
        if key not in self._timed_ops:
            timed_ops: list[Op | Passage] = []
            kinds = self.program.ranks[number].kinds
            timed = (op for op in made if not isinstance(op, _UNTIMED))
            for is_run, neighbours in groupby(timed, key=lambda op: isinstance(op, Run)):
                same = list(neighbours)
                timed_ops += [self._passage(tuple(variants(same, kinds)))] if is_run else same
            self._timed_ops[key] = timed_ops
        return self._timed_ops[key]

    def _arrival(self, message: Message, target: int) -> float:
        """Return the time at which a message arrives.

        Messages of one pair of ranks are sent one after another. Each begins when both ranks have reached it.
        """
        source = self.program.schedule.rank_of[message.source]
        queue, link = self._posted[source, target], (source, target)
        while message not in self.arrived:
            first, posted = queue.pop(0)
            begin = max(self._links.get(link, 0.0), self._sent[first], posted)
            self._links[link] = self.arrived[first] = begin + self._message_s
        return self.arrived[message]

    def _passage(self, passes: tuple[Variant, ...]) -> Passage:
        """Return the passage of passes of layers, one after another."""
        if passes not in self._passages:
            self._passages[passes] = reduce(Passage.then, (self._single(v) for v in passes))
        return self._passages[passes]

    def _single(self, v: Variant) -> Passage:
        if (v,) not in self._passages:
            self._passages[v,] = Passage.of(self.pieces[v].events, self.costs, self.axes)
        return self._passages[v,]
