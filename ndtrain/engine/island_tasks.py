"""The tasks of an island: the orders of its leader, on all its ranks."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ndtrain.engine.island_wait import IslandWait, agree_s
from ndtrain.engine.shared_step import StepSum
from ndtrain.islands.exchange import Exchange
from ndtrain.islands.island import LOST_WEIGHTS
from ndtrain.islands.leader import Leader
from ndtrain.islands.orders import CatchUp, Heal, Order, Stop, Work
from ndtrain.islands.reading import Gone
from ndtrain.islands.wire import WireError
from ndtrain.mesh.flight_recorder import RECORDER
from ndtrain.mesh.json_messages import broadcast_json
from ndtrain.mesh.mesh import Mesh

_PAUSE_S = 0.1  # before an order is carried out again that has failed
_SMOOTHING = 0.8  # of the measured speed, per step


@dataclass(frozen=True)
class Task:
    """An order, as rank 0 passes it on to the ranks of its island.

    Attributes:
        kind: "work", "catch up", "heal", "stop", or "wait": nothing is to be done yet.
        rows: the rows that the island computes.
        names: work: the sharers, in order; catch up and heal: the islands to read from.
        connect: name -> the life of an island and the addresses of its ranks, for the islands to read from.
        teaches: as in `Work`.
        reason: stop: why, unless it is the planned end.
        late: True if the other islands have waited for this one's gradient for longer than the grace time.
    """

    kind: str
    step: int = 0
    epoch: int = 0
    rows: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    connect: Mapping[str, tuple[str, tuple[str, ...]]] | None = None
    teaches: bool = False
    reason: str = ""
    late: bool = False


def no_further_step(done: int, reason: str) -> StepSum:
    """Return the result that ends the run, with the reason that its last task gives."""
    return StepSum(done, None, reason, restart=reason == LOST_WEIGHTS)


class Tasks:
    """Passes the tasks of rank 0's leader on to all ranks of the island, and their results back.

    Create one on every rank, and call the same methods in the same order.

    Args:
        exchange: this rank's.
        leader: of the island, on rank 0.
        deadline_s: seconds after which a watchdog ends a rank that waits.
        asked: returns another number than 0 if somebody wants the run to stop.
        tell: prints a line for the user.

    Attributes:
        name: of the island.
    """

    def __init__(
        self,
        mesh: Mesh,
        exchange: Exchange,
        leader: Leader | None,
        deadline_s: float,
        asked: Callable[[], float],
        tell: Callable[[str], None],
    ):
        self.exchange, self.leader, self.tell = exchange, leader, tell
        self._mesh, self._asked, self._speed = mesh, asked, 0.0
        self._wait = IslandWait(mesh, deadline_s, tell, lambda: exchange.reader.nbytes)
        self._patience_s = agree_s(deadline_s)
        self._began, self._waited_s, self._reported = time.perf_counter(), 0.0, (0.0, 0)
        self.name = self._from_rank_0(leader and leader.me.name)

    def _from_rank_0(self, value: Any) -> Any:
        return value if self._mesh.world is None else broadcast_json(value, self._mesh.world, self._mesh.device)

    def next(self) -> Task:
        """Return what all ranks have to do now. Wait for it for some seconds."""
        with RECORDER.waiting("the next task of the islands"), self._timed():
            task = self._task_of(self.leader.wait_for_order(self._patience_s)) if self.leader else None
            if self.leader:
                for line in self.leader.messages():
                    self.tell(line)
            if self._mesh.world is None:
                return task
            return _task_of(self._from_rank_0(task and dict(task.__dict__)))

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._waited_s += time.perf_counter() - began

    def numbers(self) -> dict[str, float]:
        """Return numbers to log: the seconds of waiting and the bytes that were read since the last call, and the
        share of the run's time that was not waited."""
        waited_s, read_bytes = self._reported
        self._reported = self._waited_s, self._wait.read_bytes
        elapsed_s = time.perf_counter() - self._began
        return {
            "islands/wait_s": self._waited_s - waited_s,
            "islands/read_bytes": self._wait.read_bytes - read_bytes,
            "islands/goodput": 1 - self._waited_s / elapsed_s,
        }

    def wait_for_the_others(self) -> None:
        """Serve this island's gradients until no other island needs them."""
        while self.next().kind != "stop":
            pass

    def close(self) -> None:
        """Close all connections."""
        if self.leader:
            self.leader.close()
        self.exchange.close()
        self._wait.close()

    def source(self, task: Task) -> str:
        """Return the island that this rank reads from. Ranks spread over all that it may read from."""
        return task.names[self._mesh.rank % len(task.names)]

    def measured(self, rows_per_s: float) -> None:
        """Record how fast the island has computed."""
        self._speed = _SMOOTHING * self._speed + (1 - _SMOOTHING) * rows_per_s if self._speed else rows_per_s
        if self.leader:
            self.leader.set_speed(self._speed)

    def offers(self, step: int) -> None:
        """Record that all ranks offer their gradients of a step."""
        if self.leader:
            self.leader.offers(step)

    def begin(self, task: Task, read: Callable[[], None]) -> None:
        """Begin to read what a step needs from other islands. Call `finish` before any other task.

        Args:
            read: is called in another thread, and raises `Gone` if it cannot read.
        """
        may_finish = lambda: self.leader is None or self.leader.may_finish(task.step, task.epoch)
        self._wait.begin(lambda: self._reads(task, read) and may_finish())

    def finish(self, task: Task, read: Callable[[], None] | None = None) -> bool:
        """Read what a step needs from other islands. Return True if all ranks have it, and the step still belongs to
        this epoch: then it is finished.

        Args:
            read: as for `begin`; None: `begin` was called before.
        """
        if read is not None:
            self.begin(task, read)
        with self._timed():
            ok = self._wait.wait(lambda: self._awaited(task))
        if ok:
            self.exchange.withdraw_state()
        if self.leader:
            self.leader.finish(task.step, ok)
        if not ok:
            time.sleep(_PAUSE_S)
        return ok

    def _reads(self, task: Task, read: Callable[[], None]) -> bool:
        try:
            self.exchange.connect(task.connect or {})
            read()
        except Gone:
            return False
        return True

    def _awaited(self, task: Task) -> str:
        """Return the islands that this one waits for; empty on ranks that print no line."""
        if self.leader is None:
            return ""
        if task.kind == "work":
            return self.leader.awaited(task.step)
        return f"island {' or '.join(task.names)}, from which it reads step {task.step}"

    def heal(self, task: Task) -> Tensor | None:
        """Read the state of another island. Return the numbers that belong to it, or None if a rank could not read."""
        numbers: list[Tensor] = []
        began = time.perf_counter()
        read = lambda: numbers.append(self.exchange.read_state(task.step, self.source(task)))
        with self._timed():
            ok = self._wait.run(lambda: self._reads(task, read), lambda: self._awaited(task))
        if self.leader:
            ok = ok and self.leader.heal(task.step, task.epoch)
        if not self._from_rank_0(ok):
            return None
        seconds = time.perf_counter() - began
        self.tell(f"read the state after step {task.step} from {', '.join(task.names)} in {seconds:.1f} s")
        return numbers[0]

    def _task_of(self, order: Order | None) -> Task:
        try:
            match order:
                case Work(step, epoch, spans, sharers, teaches):
                    rows = tuple(r for start, stop in spans for r in range(start, stop))
                    names = tuple(x.name for x in sharers)
                    late = self.leader.is_late(step)
                    return Task("work", step, epoch, rows, names, self._places(sharers), teaches, late=late)
                case CatchUp(step, epoch, sources):
                    names = tuple(x.name for x in sources)
                    return Task("catch up" if names else "wait", step, epoch, (), names, self._places(sources))
                case Heal(step, epoch, sources):
                    names = tuple(x.name for x in sources)
                    return Task("heal" if names else "wait", step, epoch, (), names, self._places(sources))
                case Stop(reason):
                    return Task("stop", reason=reason)
        except WireError:
            time.sleep(_PAUSE_S)  # it will be lost, or answer later
        return Task("stop" if self._asked() else "wait")

    def _places(self, members: Sequence[Any]) -> dict[str, tuple[str, tuple[str, ...]]]:
        others = (x for x in members if x.life != self.leader.me.life)
        return {x.name: (x.life, tuple(self.leader.ranks_of(x))) for x in others}


def _task_of(data: Any) -> Task:
    """Return the task in a message of rank 0.

    Raises:
        ValueError: the message has another form.
    """
    match data:
        case {
            "kind": str(kind), "step": int(step), "epoch": int(epoch), "rows": list(rows), "names": list(names),
            "connect": None | dict() as connect, "teaches": bool(teaches), "reason": str(reason), "late": bool(late),
            **rest,
        } if not rest:  # fmt: skip
            places = {str(name): (str(life), tuple(map(str, there))) for name, (life, there) in (connect or {}).items()}
            listed = tuple(map(int, rows)), tuple(map(str, names))
            return Task(kind, step, epoch, *listed, places, teaches, reason, late)
    raise ValueError("rank 0 sent a message that is no task")
