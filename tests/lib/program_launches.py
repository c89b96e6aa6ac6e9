"""Compares what a training step launches and waits for with the rank's program, op by op.

The flight recorder's journal names the op of every launch and every wait. The passes of layers launch messages of their
own (tp, cp, ep), which the program does not list; the traffic of these is tested in tests/plan.
"""

import math
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

from ndtrain.config import AXES, DATA_AXES
from ndtrain.engine.executor import Executor
from ndtrain.engine.train_step import TrainingStep
from ndtrain.mesh.flight_recorder import RECORDER, Entry
from ndtrain.mesh.sharding import TENSOR_AXIS
from ndtrain.parallel.unit import Unit
from ndtrain.program import ops
from ndtrain.program.ops import Op, RankProgram, Turn

NUMBER = 8  # bytes of a number that all ranks gather or sum


class Event(NamedTuple):
    """A launch, or the beginning of a wait.

    Attributes:
        ranks: the global ranks of the group. For a message: this rank and the other end, whatever group carries it.
    """

    kind: str
    op: str
    ranks: tuple[int, ...]
    nbytes: int


@contextmanager
def compared(step: TrainingStep) -> Iterator[None]:
    """Compare the block, which runs one training step, with its programs.

    Raises:
        AssertionError: an op has launched something else. The message names the op.
    """
    RECORDER.journal = entries = []
    # with its program and the number of entries before it. `moe.capacity` may repeat a run, by another program
    runs: list[tuple[Executor, RankProgram, int]] = []

    def noted(executor: Executor, *args: Any) -> Any:
        runs.append((executor, executor.program, len(entries)))
        return run(executor, *args)

    run = Executor.run
    try:
        with mock.patch.object(Executor, "run", noted):
            yield
    finally:
        RECORDER.journal = None
    planned = _Planned(step)
    for i, (executor, program, start) in enumerate(runs):
        if i < len(runs) - 1:
            planned.check(executor, replace(program, update=()), entries[start : runs[i + 1][2]])
        else:
            planned.check(executor, executor.ran, entries[start:])


class _Planned:
    """What the ops of a rank launch and wait for."""

    def __init__(self, step: TrainingStep):
        self.step, self.units, self.plan = step, step.stages.units, step.stages.units.plan
        self.spec, self.rank = step.mesh.spec, step.mesh.rank
        self.losses = 1 + len(step.stages.objective.sums)

    def check(self, executor: Executor, program: RankProgram, entries: Sequence[Entry]) -> None:
        ran = _by_op(entries, self.rank)
        self.facts, self.pipeline = executor.holdings.units, executor.pipeline
        self.sums: dict[str, list[Event]] = defaultdict(list)
        for index, (turn, first, op) in enumerate(_with_turns(program)):
            made = ran.pop(index, [])
            posts = [self._message("receive", source) for _, source in turn.posts] if turn and first else []
            if isinstance(op, ops.Run):
                assert made[: len(posts)] == posts, f"op {index}, the posts of {op}: {made}"
            elif isinstance(op, ops.SumTPReplicas):
                self._check_tp_replicas(index, op, made)
            elif isinstance(op, ops.FinishSends):  # sends that have ended are not waited for
                assert all(event[:2] == ("wait", "send") for event in made), f"op {index}, {op}: {made}"
            else:
                expected = [e for e in (*posts, *self._events(op, turn)) if len(e.ranks) > 1]
                if isinstance(op, ops.AwaitWhole | ops.AwaitScatter) and not made:
                    expected = []  # the rank takes no part in the exchange
                assert made == expected, f"op {index}, {op}: launched {made}, expected {expected}"
        assert not ran, f"launched outside of the program: {ran}"

    def _events(self, op: Op, turn: Turn | None) -> Iterator[Event]:
        compute, master = self.plan.compute.itemsize, self.plan.master.itemsize
        match op:
            case ops.Gather(unit) | ops.Await(unit):
                yield self._of_unit(unit, "all_gather", self.facts[unit].numel * compute, isinstance(op, ops.Gather))
            case ops.Reduce(unit) | ops.Collect(unit, _):
                yield self._of_unit(unit, "reduce_scatter", self.facts[unit].numel * master, isinstance(op, ops.Reduce))
            case ops.Sum(axes, units):
                nbytes = sum(self.facts[unit].shard for unit in units) * master
                self.sums[axes].append(self._over(axes.split("+"), "all_reduce", nbytes))
                yield self.sums[axes][-1]
            case ops.AwaitSums(axes):
                yield from (event._replace(kind="wait") for event in self.sums.pop(axes))
            case ops.GatherWhole(number) | ops.AwaitWhole(number):
                yield self._of_round(number, isinstance(op, ops.GatherWhole), copies=False)
            case ops.ScatterWhole(number) | ops.AwaitScatter(number):
                yield self._of_round(number, isinstance(op, ops.ScatterWhole), copies=True)
            case ops.SumTied(unit):
                first, *_, last = self.pipeline.schedule.rank_of
                launch = self._to("shift", first + last - self.pipeline.rank, self.facts[unit].shard * master)
                yield from (launch, launch._replace(kind="wait"))
            case ops.Receive():
                source = self.pipeline.schedule.rank_of[turn.needs.source]
                yield self._message("receive", source)._replace(kind="wait")
            case ops.Send():
                yield self._message("send", self.pipeline.schedule.rank_of[turn.gives.stage])
            case ops.CountTokens() | ops.AwaitTokens():
                event = self._over(DATA_AXES, "all_reduce", NUMBER)
                yield event if isinstance(op, ops.CountTokens) else event._replace(kind="wait")
            case _:
                yield from self._over_all_ranks(op)

    def _over_all_ranks(self, op: Op) -> Iterator[Event]:
        balance = self.step.stages.balance
        match op:
            case ops.SumLoads() | ops.AwaitLoads():
                ahead = self.pipeline is not self.step.executor.pipeline
                loads = balance.pooled.loads_LX if ahead else balance._sums
                event = self._over(AXES, "all_reduce", loads.nbytes)
                yield event if isinstance(op, ops.SumLoads) else event._replace(kind="wait")
            case ops.CheckCapacity():
                event = self._over(AXES, "all_reduce", NUMBER)
                yield from (event, event._replace(kind="wait"))
            case ops.GatherLogits():
                event = self._over(AXES, "all_reduce", self.step.stages.qk_clip.largest_LH.nbytes)
                yield from (event, event._replace(kind="wait"))
            case ops.GatherStats():
                event = self._over(AXES, "all_reduce", NUMBER * (1 + self.losses))
                yield from (event, event._replace(kind="wait"))
            case ops.Report():
                yield self._over(AXES, "all_reduce", NUMBER)

    def _of_round(self, number: int, launched: bool, copies: bool) -> Event:
        """The exchange with the owners of whole tensors.

        Args:
            copies: True if all ranks that hold an element receive it.
        """
        round_, layouts = self.units.owners.rounds[number], self.step.stages.layouts
        names = [name for batch in round_.batches.values() for name in batch.names]
        held = lambda name: layouts.groups(name).replicas * layouts[name].tp_replicas if copies else 1
        nbytes = sum(layouts[name].numel * held(name) for name in names) * self.plan.sent.itemsize
        event = self._over(round_.axes, "all_to_all", nbytes)
        return event if launched else event._replace(kind="wait")

    def _check_tp_replicas(self, index: int, op: ops.SumTPReplicas, made: Sequence[Event]) -> None:
        launched = [event for event in made if event.kind == "launch"]
        nbytes = sum(_replicated(self.units.units[name]) for name in op.units) * self.plan.master.itemsize
        assert sum(event.nbytes for event in launched) == nbytes, f"op {index}: {made}, expected {nbytes} bytes"
        assert {event.op for event in launched} <= {"all_reduce"}, f"op {index}: {made}"
        assert sorted(event[1:] for event in launched) == sorted(e[1:] for e in made if e.kind == "wait")
        assert all(set(event.ranks) <= set(self.spec.members(self.rank, "tp")) for event in launched)

    def _of_unit(self, unit: str, op: str, nbytes: int, launch: bool) -> Event:
        event = self._over(self.facts[unit].groups.shard_axes, op, nbytes)
        return event if launch else event._replace(kind="wait")

    def _message(self, op: str, peer: int) -> Event:
        """Return the launch of an activation's message, or of its gradient's, from or to a pp rank."""
        return self._to(op, peer, math.prod(self.pipeline.shape) * self.pipeline.dtype.itemsize)

    def _to(self, op: str, peer: int, nbytes: int) -> Event:
        return Event("launch", op, (self.rank, self.spec.members(self.rank, "pp")[peer]), nbytes)

    def _over(self, axes: Sequence[str], op: str, nbytes: int) -> Event:
        return Event("launch", op, tuple(self.spec.members(self.rank, *axes)), nbytes)


def _replicated(unit: Unit) -> int:
    """Return the number of elements of the rank's shard that several ranks of tp hold and sum."""
    (start, stop), offsets = unit.layout.own, unit.layout.offsets
    summed = [t for t in unit.layout.tensors if t.tp_replicas > 1 and TENSOR_AXIS in t.partial]
    spans = [(max(start, offsets[t.name]), min(stop, offsets[t.name] + t.local_numel)) for t in summed]
    return sum(max(0, b - a) for a, b in spans)


def _with_turns(program: RankProgram) -> Iterator[tuple[Turn | None, bool, Op]]:
    """Yield (its turn or None, True if it is the first op of the turn, the op) for each op in order."""
    yield from ((None, False, op) for op in program.begin)
    yield from ((turn, i == 0, op) for turn in program.turns for i, op in enumerate(turn.ops))
    yield from ((None, False, op) for op in (*program.end, *program.update))


def _by_op(entries: Sequence[Entry], rank: int) -> dict[int | None, list[Event]]:
    """Group the launches and waits of this thread by the index of their op."""
    made: dict[int | None, list[Event]] = defaultdict(list)
    launched: dict[int, Event] = {}  # by the ids of their records
    for entry in entries:
        if entry.thread != threading.get_ident():
            continue
        if entry.group is not None:
            peer = entry.source if entry.to is None else entry.to
            ranks = entry.ranks if peer is None else (rank, entry.ranks[peer])
            event = Event("launch", entry.record.op, ranks, entry.record.nbytes)
            launched[id(entry.record)] = event
            made[entry.op].append(event)
        elif id(entry.record) in launched:
            made[entry.op].append(launched[id(entry.record)]._replace(kind="wait"))
    return made
