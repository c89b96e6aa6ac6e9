"""Runs every rank's launches under NCCL's rules, without processes: it finds deadlocks and says what waits for what.

The rules. The operations of a communicator run on one stream of each rank, one at a time, in the order of their
launches. An operation begins when the one before it on its stream has ended, and not before the rank's compute stream
has done what was queued at the launch. A message is a rendezvous: a send ends only when the matching receive has begun
on the other rank, and the other way round. A batch of messages (a ring's shift, an all_to_all) begins as one operation
and ends with its last message. A collective ends when all its members have begun it. A wait holds up the compute
stream, and so all operations that are launched after it. A wait of the host holds up the launches themselves, which
comes to the same. So one clock for each thread of a rank serves for its host and for its compute stream.

Streams that share one of CUDA's hardware queues add no further waits: what heads such a queue only waits for what was
queued before it on the same rank, which the later entries wait for too.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ndtrain.program import ops
from ndtrain.program.ops import RankProgram
from ndtrain.schedule import COST, Message
from ndtrain.schedule.table import show

Members = tuple[int, ...]  # global ranks
NameComm = Callable[[int, int], str]  # (source, target) -> communicator


class LaunchOrderError(RuntimeError):
    """The launches of the ranks do not fit together. The message names the ranks and the operations."""


class Op:
    """An operation that one rank launches.

    Attributes:
        name: which operation, the same on all ranks of a collective.
        comm: the communicator, the same string on all its ranks.
        sends, receives: the ranks at the other end of its messages.
        members: the ranks of a collective; empty: it is no collective.
        nbytes: of a message, or of a collective's whole buffer.
        seconds: how long it takes once all that it needs has begun.
        at: what its rank was doing, for messages to a person.
        began, ended: times; None until then.
    """

    __slots__ = (
        "at", "began", "comm", "ended", "launched", "left", "members", "name", "nbytes", "rank", "receives", "seconds",
        "sends", "stream", "until", "waiter",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        comm: str,
        sends: Sequence[int] = (),
        receives: Sequence[int] = (),
        members: Members = (),
        nbytes: int = 0,
        seconds: float = 0.0,
        at: str = "",
    ):
        self.name, self.comm, self.nbytes, self.seconds, self.at = name, comm, nbytes, seconds, at
        self.sends, self.receives, self.members = sends, receives, members
        self.left = len(sends) + len(receives) + bool(members)  # what it still needs
        self.rank, self.launched, self.until = -1, 0.0, 0.0
        self.began: float | None = None
        self.ended: float | None = None
        self.waiter: _Thread | None = None
        self.stream: _Stream | None = None

    def __str__(self) -> str:
        return f"{self.name} ({self.at})" if self.at else self.name


class Wait(NamedTuple):
    op: Op


class Compute(NamedTuple):
    seconds: float


class Start(NamedTuple):
    """Another thread of the rank begins."""

    thread: int


Step = Op | Wait | Compute | Start  # an Op is launched
Program = Sequence[Step]


@dataclass(frozen=True)
class Outcome:
    """What became of the ranks' programs.

    Attributes:
        makespan: when the last rank ended.
        stuck: a line for each rank that waits for ever; empty: there is no deadlock.
    """

    makespan: float
    stuck: list[str]


class _Thread:
    """A thread of a rank, and its position in its program."""

    __slots__ = ("at", "now", "program", "rank", "waits")

    def __init__(self, rank: int, program: Program):
        self.rank, self.program = rank, program
        self.at, self.now = 0, 0.0
        self.waits: Op | None = None


class _Stream(deque):
    """The operations of one communicator on one rank that have not ended, in the order of their launches.

    Attributes:
        free: when the last operation ended.
    """

    __slots__ = ("free",)

    def __init__(self):
        super().__init__()
        self.free = 0.0


class _Ranks:
    """The state of all ranks."""

    def __init__(self, programs: Mapping[int, Program | Mapping[int, Program]]):
        by_thread = {r: p if isinstance(p, Mapping) else {0: p} for r, p in programs.items()}
        self.threads = {(r, t): _Thread(r, p) for r, mine in by_thread.items() for t, p in mine.items()}
        started = {(r, step.thread) for (r, _), t in self.threads.items() for step in t.program if type(step) is Start}
        self.ready = [thread for key, thread in self.threads.items() if key not in started]
        self.streams: dict[tuple[int, str], _Stream] = defaultdict(_Stream)  # by rank and communicator
        # what has begun and needs others: by communicator and source and target, or members. A rank has begun one
        # operation of a communicator at most.
        self.sending: dict[tuple[str, int, int], Op] = {}
        self.receiving: dict[tuple[str, int, int], Op] = {}
        self.gathering: dict[tuple[str, Members], dict[int, Op]] = defaultdict(dict)

    def run(self) -> None:
        while self.ready:
            self._advance(self.ready.pop())

    def _advance(self, thread: _Thread) -> None:
        """Runs a thread up to the next wait for something that has not ended."""
        program = thread.program
        while thread.at < len(program):
            step = program[thread.at]
            kind = type(step)
            if kind is Op:
                self._launch(step, thread)
            elif kind is Compute:
                thread.now += step.seconds
            elif kind is Start:
                other = self.threads[thread.rank, step.thread]
                other.now = thread.now  # it cannot have run before
                self.ready.append(other)
            elif step.op.ended is None:
                thread.waits, step.op.waiter = step.op, thread
                return
            else:
                thread.now = max(thread.now, step.op.ended)
            thread.at += 1

    def _launch(self, op: Op, thread: _Thread) -> None:
        op.rank, op.launched = thread.rank, thread.now
        op.stream = stream = self.streams[op.rank, op.comm]
        stream.append(op)
        if stream[0] is op:
            self._begin(op)

    def _begin(self, op: Op) -> None:
        """The operation is the first of its stream. Ends all that this completes."""
        op.began = op.until = max(op.launched, op.stream.free)
        ended = [] if op.left else [op]
        for peer in op.sends:
            self._meet(op, (op.comm, op.rank, peer), self.sending, self.receiving, ended)
        for peer in op.receives:
            self._meet(op, (op.comm, peer, op.rank), self.receiving, self.sending, ended)
        if op.members:
            self._gather(op, ended)
        for done in ended:
            self._end(done)

    @staticmethod
    def _meet(op: Op, link: tuple[str, int, int], mine: dict, theirs: dict, ended: list[Op]) -> None:
        other = theirs.pop(link, None)
        if other is None:
            mine[link] = op
            return
        if op.nbytes != other.nbytes:
            raise LaunchOrderError(
                f"a message over {link} has {op.nbytes} bytes at one end, {other.nbytes} at the other"
            )
        until = max(op.began, other.began) + max(op.seconds, other.seconds)
        for x in (op, other):
            x.until = max(x.until, until)
            x.left -= 1
            if not x.left:
                ended.append(x)

    def _gather(self, op: Op, ended: list[Op]) -> None:
        begun = self.gathering[op.comm, op.members]
        begun[op.rank] = op
        if len(begun) < len(op.members):
            return
        together = list(begun.values())
        begun.clear()
        if len({(x.name, x.nbytes) for x in together}) > 1:
            raise LaunchOrderError(f"ranks disagree on a collective over {op.comm}: {[str(x) for x in together]}")
        until = max(x.began for x in together) + max(x.seconds for x in together)
        for x in together:
            x.until, x.left = until, 0
        ended += together

    def _end(self, op: Op) -> None:
        stream = op.stream
        op.ended = stream.free = op.until
        stream.popleft()
        if stream:
            self._begin(stream[0])
        if thread := op.waiter:
            thread.waits = op.waiter = None  # no cycle of objects
            self.ready.append(thread)

    # ------------------------------------------------------------------------------------------------------- reporting

    def stuck(self) -> list[str]:
        """A line for each thread that waits, and for each stream that never empties though its rank has ended."""
        waiting = [t for t in self.threads.values() if t.waits]
        lines = [f"rank {t.rank} waits for {self._why(t.waits)}" for t in waiting]
        blocked = {t.rank for t in waiting}
        left = [stream[0] for stream in self.streams.values() if stream and stream[0].rank not in blocked]
        return lines + [f"rank {op.rank} never ends {self._why(op)}" for op in left]

    def _why(self, op: Op) -> str:
        head = self.streams[op.rank, op.comm][0]
        behind = "" if head is op else f" behind {head}"
        return f"{op} on {op.comm}{behind}, which needs {self._needs(head)}"

    def _needs(self, op: Op) -> str:
        missing = [p for p in op.sends if self.sending.get((op.comm, op.rank, p)) is op]
        missing += [p for p in op.receives if self.receiving.get((op.comm, p, op.rank)) is op]
        missing += [r for r in op.members if r not in self.gathering[op.comm, op.members]]
        return ", ".join(self._busy(rank, op.comm) for rank in missing)

    def _busy(self, rank: int, comm: str) -> str:
        """What a rank does that has not begun its part of an operation on the communicator."""
        stream = self.streams[rank, comm]
        return f"rank {rank} (in {stream[0]})" if stream else f"rank {rank} (which has not launched its part)"


def simulate(programs: Mapping[int, Program | Mapping[int, Program]]) -> Outcome:
    """Runs the programs of all ranks: rank -> its steps, or thread -> steps.

    Raises:
        LaunchOrderError: the members of a collective launch different ones.
    """
    ranks = _Ranks(programs)
    ranks.run()
    return Outcome(max(t.now for t in ranks.threads.values()), ranks.stuck())


def check(programs: Mapping[int, Program | Mapping[int, Program]]) -> Outcome:
    """As `simulate`.

    Raises:
        LaunchOrderError: a deadlock; the message names what waits for what.
    """
    outcome = simulate(programs)
    if outcome.stuck:
        raise LaunchOrderError("deadlock:\n  " + "\n  ".join(outcome.stuck))
    return outcome


# ----------------------------------------------------------------------------------------------- from ranks' programs


def a_pair_each(source: int, target: int) -> str:
    """Name the communicator of the messages from one pp rank to another, as `Mesh.links` makes them."""
    return f"pp {source} to {target}"


_COSTS = {kind: Compute(seconds) for kind, seconds in COST.items()}


def launches(
    program: RankProgram, rank: int, rank_of: Sequence[int], comm: NameComm = a_pair_each, seconds: float = 0.0
) -> Iterator[Step]:
    """Yield what a pipeline rank launches and waits for. Each action computes for as long as `COST` says.

    The collectives over the other axes have this rank as their only member: the ranks along these axes run the same
    program, so they launch the same collectives in the same order.

    Args:
        rank_of: stage -> pp rank.
        comm: names the communicator of each pair.
        seconds: of a message.
    """
    own = _Own(rank)
    coming: dict[Message, Op] = {}
    for op in program.begin:
        yield from own.steps(op)
    for turn in program.turns:
        at = show(turn.action)
        for message, source in turn.posts:
            coming[message] = Op("receives", comm(source, rank), (), (source,), (), 0, seconds, at)
            yield coming[message]
        compute = _COSTS[turn.action.kind]
        for op in turn.ops:
            if isinstance(op, ops.Receive) and turn.needs is not None:
                yield Wait(coming.pop(turn.needs))
            elif isinstance(op, ops.Send) and turn.gives is not None:
                yield compute
                compute = None
                target = rank_of[turn.gives.stage]
                own.leaving.append(Op("sends", comm(rank, target), (target,), (), (), 0, seconds, at))
                yield own.leaving[-1]
            else:
                yield from own.steps(op, at)
        if compute is not None:
            yield compute
    for op in program.end:
        yield from own.steps(op)


class _Own:
    """The operations of a rank that are no messages between stages, and its messages that are leaving."""

    def __init__(self, rank: int):
        self.rank, self.leaving = rank, list[Op]()
        self._running: dict[tuple[str, str], list[Op]] = defaultdict(list)

    def steps(self, op: ops.Op, at: str = "") -> Iterator[Step]:
        match op:
            case ops.Gather(unit):
                yield self._launch("all_gather", "gathers", unit, at)
            case ops.Await(unit):
                yield from self._wait("all_gather", unit)
            case ops.Reduce(unit):
                yield self._launch("reduce_scatter", "reductions", unit, at)
            case ops.Collect(unit, _):
                yield from self._wait("reduce_scatter", unit)
            case ops.Sum(axes, _):
                yield self._launch("all_reduce", axes, axes, at)
            case ops.AwaitSums(axes):
                yield from self._wait("all_reduce", axes)
            case ops.FinishSends():
                yield from map(Wait, self.leaving)

    def _launch(self, name: str, comm: str, key: str, at: str) -> Op:
        if name != "all_reduce" and (name, key) in self._running:
            raise LaunchOrderError(
                f"pp rank {self.rank} launches the {name} of {key} again before it waits for the first"
            )
        op = Op(name, f"{comm} of pp rank {self.rank}", members=(self.rank,), at=at)
        self._running[name, key].append(op)
        return op

    def _wait(self, name: str, key: str) -> Iterator[Step]:
        yield from map(Wait, self._running.pop((name, key), []))
