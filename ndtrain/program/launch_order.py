"""Simulates the launches of all ranks under NCCL's rules, without processes. It finds deadlocks and names their causes.

The rules:

- Each rank has one stream per communicator. It runs the communicator's operations one at a time, in launch order.
- An operation begins when the previous operation on its stream has ended, and the compute stream has finished the work
  queued before the launch.
- A message is a rendezvous. A send ends only when the matching receive has begun on the other rank, and vice versa.
- A batch of messages (a ring's shift, an all-to-all) begins as one operation and ends with its last message.
- A collective ends when all its members have begun it.
- A wait blocks the compute stream, and therefore all operations that are launched after it. A wait of the host blocks
  the launches themselves, which has the same effect. One clock per thread therefore models both.

Several streams may share one of CUDA's hardware queues. This adds no waits: the head of a queue waits only for work
that the same rank queued before it. Later entries of the queue wait for that work anyway.
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
        name: the name of the operation, the same on all ranks of a collective.
        comm: the name of the communicator, the same on all its ranks.
        sends, receives: the ranks that its messages go to, and come from.
        members: the ranks of a collective. Empty: it is not a collective.
        nbytes: bytes of a message, or of a collective's whole buffer.
        seconds: how long it takes, once everything that it needs has begun.
        at: what its rank was doing, for messages to the user.
        began, ended: times. None until then.
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
        self.left = len(sends) + len(receives) + bool(members)  # messages and collectives that are not matched yet
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
    """A step that starts another thread of the rank."""

    thread: int


Step = Op | Wait | Compute | Start  # a step that is an Op launches it
Program = Sequence[Step]


@dataclass(frozen=True)
class Outcome:
    """The result of a simulation.

    Attributes:
        makespan: the time at which the last thread ended or got stuck.
        stuck: a line for each thread that waits forever. Empty: there is no deadlock.
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
    """The operations of one communicator on one rank that have not ended, in launch order.

    Attributes:
        free: the time at which the last operation ended.
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
        # operations that have begun but wait for a peer: by (communicator, source, target) or (communicator, members).
        # A rank has begun at most one operation of a communicator.
        self.sending: dict[tuple[str, int, int], Op] = {}
        self.receiving: dict[tuple[str, int, int], Op] = {}
        self.gathering: dict[tuple[str, Members], dict[int, Op]] = defaultdict(dict)

    def run(self) -> None:
        while self.ready:
            self._advance(self.ready.pop())

    def _advance(self, thread: _Thread) -> None:
        """Run a thread until it waits for an operation that has not ended."""
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
        """Begin an operation that has become the first of its stream. End every operation that this completes."""
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
            thread.waits = op.waiter = None  # avoids a reference cycle
            self.ready.append(thread)

    # ------------------------------------------------------------------------------------------------------- reporting

    def stuck(self) -> list[str]:
        """Return a line for each waiting thread, and for each operation that never ends although its rank has."""
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
        """Describe what a rank is doing that has not begun its part of an operation on the communicator."""
        stream = self.streams[rank, comm]
        return f"rank {rank} (in {stream[0]})" if stream else f"rank {rank} (which has not launched its part)"


def simulate(programs: Mapping[int, Program | Mapping[int, Program]]) -> Outcome:
    """Simulate the programs of all ranks.

    Args:
        programs: rank -> its steps, or rank -> thread -> steps.

    Raises:
        LaunchOrderError: the members of a collective launch different ones, or the sizes of a message's ends differ.
    """
    ranks = _Ranks(programs)
    ranks.run()
    return Outcome(max(t.now for t in ranks.threads.values()), ranks.stuck())


def check(programs: Mapping[int, Program | Mapping[int, Program]]) -> Outcome:
    """Simulate the programs of all ranks, and raise if they deadlock.

    Raises:
        LaunchOrderError: as `simulate`, or a deadlock. The message names what each rank waits for.
    """
    outcome = simulate(programs)
    if outcome.stuck:
        raise LaunchOrderError("deadlock:\n  " + "\n  ".join(outcome.stuck))
    return outcome


# ----------------------------------------------------------------------------------------------- from ranks' programs


def a_pair_each(source: int, target: int) -> str:
    """Return the name of the communicator from one pp rank to another. Each pair has its own, as in `Mesh.links`."""
    return f"pp {source} to {target}"


_COSTS = {kind: Compute(seconds) for kind, seconds in COST.items()}


def launches(
    program: RankProgram, rank: int, rank_of: Sequence[int], comm: NameComm = a_pair_each, seconds: float = 0.0
) -> Iterator[Step]:
    """Yield the launches, waits and computations of a pipeline rank. An action computes for its time in `COST`.

    Collectives over all ranks have the pipeline ranks as their members. Collectives over the other axes have this rank
    as their only member: the ranks along these axes run the same program, so they launch the same collectives in the
    same order.

    Args:
        rank_of: stage -> pp rank.
        comm: (source, target) -> the name of the pair's communicator.
        seconds: the duration of a message.
    """
    own = _Own(rank, tuple(range(max(rank_of) + 1)))
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
    for op in (*program.end, *program.update):
        yield from own.steps(op)


class _Own:
    """The operations of a rank other than the messages between stages, and the sends that may not have ended yet."""

    def __init__(self, rank: int, pipeline: Members):
        self.rank, self.pipeline, self.leaving = rank, pipeline, list[Op]()
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
            case ops.GatherWhole(number):
                yield self._launch("all_to_all", "whole tensors", f"gradients {number}", at)
            case ops.AwaitWhole(number):
                yield from self._wait("all_to_all", f"gradients {number}")
            case ops.ScatterWhole(number):
                yield self._launch("all_to_all", "whole tensors", f"directions {number}", at)
            case ops.AwaitScatter(number):
                yield from self._wait("all_to_all", f"directions {number}")
            case ops.FinishSends():
                yield from map(Wait, self.leaving)
            case ops.CountTokens():
                yield self._launch("all_reduce", "tokens", "tokens", at)
            case ops.AwaitTokens():
                yield from self._wait("all_reduce", "tokens")
            case ops.SumLoads():
                yield self._over_all("loads")
            case ops.AwaitLoads():
                yield from self._wait("all_reduce", "loads")
            case ops.CheckCapacity() | ops.GatherStats() | ops.GatherLogits() | ops.Report():
                together = self._over_all(type(op).__name__)
                yield from (together, Wait(together))

    def _over_all(self, key: str) -> Op:
        op = Op(key, "all ranks", members=self.pipeline)
        self._running["all_reduce", key].append(op)
        return op

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
