"""A training step of an island: it computes its part of the global batch, and adds the gradients of other islands."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ndtrain.config import Config
from ndtrain.data import Batch
from ndtrain.engine.island_wait import IslandWait, agree_s
from ndtrain.engine.train_step import TrainingStep
from ndtrain.engine.validation import rows_here
from ndtrain.islands.exchange import Exchange
from ndtrain.islands.leader import Leader
from ndtrain.islands.orders import CatchUp, Heal, Order, Stop, Work
from ndtrain.islands.reading import Gone
from ndtrain.islands.wire import WireError
from ndtrain.mesh.collectives import all_reduce
from ndtrain.mesh.flight_recorder import RECORDER
from ndtrain.mesh.json_messages import broadcast_json
from ndtrain.mesh.mesh import Mesh
from ndtrain.model.vocabulary import IGNORE

_PAUSE_S = 0.1  # before an order is carried out again that has failed
_SMOOTHING = 0.8  # of the measured speed, per step

Rows = Sequence[int]


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
    """

    kind: str
    step: int = 0
    epoch: int = 0
    rows: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    connect: Mapping[str, tuple[str, tuple[str, ...]]] | None = None
    teaches: bool = False
    reason: str = ""


class StepSum(NamedTuple):
    """The result of the islands' step.

    Attributes:
        done: the number of steps that were finished before it. It jumps if the island has read a newer state.
        losses: this rank's share of the loss and of the objective's other sums, over all islands.
            None: there is no further step.
        stopped: why there is no further step. Empty at the planned end.
    """

    done: int
    losses: Tensor | None
    stopped: str = ""


class IslandStep:
    """Computes steps together with other islands.

    Create one on every rank, and call the same methods in the same order.

    Attributes:
        numbers: numbers of the last step that are logged.

    Args:
        batches: returns this rank's microbatches of a step, for rows of the global batch.
        weight: returns the sum of the weights of a part of the global batch; the ranks with other tokens have the rest.
        exchange: this rank's.
        leader: of the island, on rank 0.
        restore: is called with the numbers of a state that was read from another island.
        describe: returns the numbers that belong to the state, fp64 [state_numbers].
        asked: returns another number than 0 if somebody wants the run to stop.
        tell: prints a line for the user.
    """

    def __init__(
        self,
        cfg: Config,
        mesh: Mesh,
        train_step: TrainingStep,
        batches: Callable[[int, Rows], list[Batch]],
        weight: Callable[[int], Tensor],
        exchange: Exchange,
        leader: Leader | None,
        describe: Callable[[], Tensor],
        restore: Callable[[Tensor], None],
        asked: Callable[[], float],
        tell: Callable[[str], None],
    ):
        self._batch, self._mesh, self._train_step = cfg.train.global_batch, mesh, train_step
        self._batches, self._weight, self._exchange, self._leader = batches, weight, exchange, leader
        self._describe, self._restore, self._asked, self._tell = describe, restore, asked, tell
        self._wait = IslandWait(mesh, cfg.hardware.timeout_s, tell)
        self._patience_s = agree_s(cfg.hardware.timeout_s)  # between two messages of rank 0 while nothing is to be done
        self._computed: tuple[int, frozenset[int]] = (0, frozenset())  # step and rows whose gradient is offered
        self._numbers: Tensor | None = None  # of these rows
        self._speed, self._waited_s = 0.0, 0.0
        self.numbers: dict[str, float] = {}
        self._name = (
            broadcast_json(leader and leader.me.name, mesh.world, mesh.device) if mesh.world else leader.me.name
        )

    def run(self, done: int) -> StepSum:
        """Compute gradients until the sum over all islands is known on all ranks.

        Args:
            done: the number of finished steps.
        """
        while True:
            task = self._next_task()
            if task.kind == "stop":
                return StepSum(done, None, task.reason)
            if task.kind == "heal":
                done = task.step if self._heal(task) else done
            elif task.kind != "wait" and self._finish(task, self._carry_out(task)):
                self._count(task)
                return StepSum(task.step - 1, self._take_sum(task))

    def _count(self, task: Task) -> None:
        """Set the numbers of a step. A step that was caught up with has no rows here."""
        self._train_step.rows = len(task.rows)
        self.numbers = {
            "islands/epoch": task.epoch,
            "islands/sharers": len(task.names),
            "islands/rows": len(task.rows),
            "islands/wait_s": self._waited_s,
        }
        self._waited_s = 0.0

    def wait_for_the_others(self) -> None:
        """Serve this island's gradients until no other island needs them."""
        while self._next_task().kind != "stop":
            pass

    def close(self) -> None:
        """Close all connections."""
        if self._leader:
            self._leader.close()
        self._exchange.close()
        self._wait.close()

    # ----------------------------------------------------------------------------------------------------------- orders

    def _next_task(self) -> Task:
        """Return what all ranks have to do now."""
        with RECORDER.waiting("the next task of the islands"):
            task = self._task_of(self._leader.wait_for_order(self._patience_s)) if self._leader else None
            if self._leader:
                for line in self._leader.messages():
                    self._tell(line)
            if self._mesh.world is None:
                return task
            return _task_of(broadcast_json(task and _written(task), self._mesh.world, self._mesh.device))

    def _task_of(self, order: Order | None) -> Task:
        try:
            match order:
                case Work(step, epoch, spans, sharers, teaches):
                    rows = tuple(r for start, stop in spans for r in range(start, stop))
                    names = tuple(x.name for x in sharers)
                    return Task("work", step, epoch, rows, names, self._places(sharers), teaches)
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
        others = (x for x in members if x.life != self._leader.me.life)
        return {x.name: (x.life, tuple(self._leader.ranks_of(x))) for x in others}

    # ------------------------------------------------------------------------------------------------------------- work

    def _carry_out(self, task: Task) -> bool:
        """Return True if all ranks have the sum of the gradients, and the step still belongs to this epoch."""
        if task.kind == "work":
            self._compute(task)
        began = time.perf_counter()
        ok = self._wait.run(lambda: self._read_sum(task), lambda: self._awaited(task))
        self._waited_s += time.perf_counter() - began
        return ok

    def _read_sum(self, task: Task) -> bool:
        """Return True if this rank has the sum of the gradients over all islands."""
        try:
            self._exchange.connect(task.connect or {})
            if task.kind == "work":
                self._exchange.read_gradients(task.step, task.epoch, task.names, self._name)
            else:
                self._exchange.read_sum(task.step, self._source(task))
        except Gone:
            return False
        return self._leader is None or self._leader.may_finish(task.step, task.epoch)

    def _awaited(self, task: Task) -> str:
        """Return the islands that this one waits for; empty on ranks that print no line."""
        if self._leader is None:
            return ""
        if task.kind == "work":
            return self._leader.awaited(task.step)
        return f"island {' or '.join(task.names)}, from which it reads step {task.step}"

    def _source(self, task: Task) -> str:
        """Return the island that this rank reads from. Ranks spread over all that it may read from."""
        return task.names[self._mesh.rank % len(task.names)]

    def _compute(self, task: Task) -> None:
        """Compute the island's rows, except those that it has computed before, and offer the gradient."""
        if task.teaches:
            self._exchange.offer_state(task.step - 1, self._describe())
        if not task.rows:
            return
        wanted = frozenset(task.rows)
        step, have = self._computed
        have = have if step == task.step and have <= wanted else frozenset()
        if new := sorted(wanted - have):
            began = time.perf_counter()
            losses = self._forward_backward(task.step, new)
            numbers = self._island_numbers(losses)
            if have:
                self._exchange.add_offered_gradient(task.step)
                numbers = self._numbers + numbers
            self._numbers, self._computed = numbers, (task.step, wanted)
            self._measure(len(new) / (time.perf_counter() - began))
        self._exchange.offer_gradient(task.step, task.epoch, self._numbers)
        if self._leader:
            self._leader.offers(task.step)

    def _forward_backward(self, step: int, rows: Rows) -> Tensor:
        """Return this rank's losses of rows. Rows after the last one of the global batch are empty."""
        real = [row if row < self._batch else 0 for row in rows]
        batches = self._batches(step - 1, real)
        if real != list(rows):
            batches = _without(batches, [row >= self._batch for row in rows_here(self._mesh, rows)])
        return self._train_step.forward_backward(step, batches, self._weight(step - 1))

    def _island_numbers(self, losses: Tensor) -> Tensor:
        """Return the sums over the ranks of this island: losses, and the loads and losses of experts. fp64."""
        numbers = torch.cat([losses.double(), self._train_step.stages.balance.sums_here().flatten()])
        all_reduce(numbers, self._mesh.world).wait()
        return numbers

    def _measure(self, rows_per_s: float) -> None:
        self._speed = _SMOOTHING * self._speed + (1 - _SMOOTHING) * rows_per_s if self._speed else rows_per_s
        if self._leader:
            self._leader.set_speed(self._speed)

    def _finish(self, task: Task, ok: bool) -> bool:
        """Record that the step is complete, or that it has to be tried again. Return `ok`."""
        if ok:
            self._exchange.withdraw_state()
        if self._leader:
            self._leader.finish(task.step, ok)
        if not ok:
            time.sleep(_PAUSE_S)
        return ok

    def _take_sum(self, task: Task) -> Tensor:
        """Make the sum over all islands the gradient, and return this rank's share of the losses: rank 0 has all."""
        numbers = self._exchange.use_sum(task.step).to(self._mesh.device)
        if self._mesh.rank > 0:
            numbers.zero_()
        count, balance = self._train_step.executor.losses, self._train_step.stages.balance
        balance.set_sums(numbers[count : count + balance.sums_here().numel()])
        return numbers[:count]

    # ------------------------------------------------------------------------------------------------------------- heal

    def _heal(self, task: Task) -> bool:
        """Read the state of another island. Return True if all ranks have it."""
        read: list[Tensor] = []
        began = time.perf_counter()
        ok = self._wait.run(lambda: self._read_state(task, read), lambda: self._awaited(task))
        if self._leader:
            ok = ok and self._leader.heal(task.step, task.epoch)
        if self._mesh.world is not None:
            ok = broadcast_json(ok, self._mesh.world, self._mesh.device)
        if ok:
            self._restore(read[0])
            seconds = time.perf_counter() - began
            self._tell(f"read the state after step {task.step} from {', '.join(task.names)} in {seconds:.1f} s")
        return ok

    def _read_state(self, task: Task, read: list[Tensor]) -> bool:
        """Read weights and optimizer state, and append the numbers of the state to `read`. Return True if all came."""
        try:
            self._exchange.connect(task.connect or {})
            read.append(self._exchange.read_state(task.step, self._source(task)))
        except Gone:
            return False
        return True


def _without(batches: Sequence[Batch], empty: Sequence[bool]) -> list[Batch]:
    """Return microbatches in which no token of the empty rows counts."""
    made, at = [], 0
    for batch in batches:
        rows = torch.tensor(empty[at : at + len(batch.tokens)], device=batch.labels.device)
        at += len(batch.tokens)
        labels = batch.labels.masked_fill(rows[:, None], IGNORE)
        columns = {name: x.masked_fill(rows.view(-1, *[1] * (x.dim() - 1)), 0) for name, x in batch.columns.items()}
        made.append(Batch(batch.tokens, labels, batch.positions, batch.documents, columns))
    return made


def _written(task: Task) -> dict[str, Any]:
    return dict(task.__dict__)


def _task_of(data: Any) -> Task:
    """Return the task in a message of rank 0.

    Raises:
        ValueError: the message has another form.
    """
    match data:
        case {
            "kind": str(kind), "step": int(step), "epoch": int(epoch), "rows": list(rows), "names": list(names),
            "connect": None | dict() as connect, "teaches": bool(teaches), "reason": str(reason), **rest,
        } if not rest:  # fmt: skip
            places = {str(name): (str(life), tuple(map(str, there))) for name, (life, there) in (connect or {}).items()}
            return Task(kind, step, epoch, tuple(map(int, rows)), tuple(map(str, names)), places, teaches, reason)
    raise ValueError("rank 0 sent a message that is no task")
