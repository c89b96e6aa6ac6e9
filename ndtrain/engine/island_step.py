"""A training step of an island: it computes its part of the global batch, and adds the gradients of other islands.

The rank's program offers each unit's gradient to the other islands as soon as it is final (`ops.Offer`). A thread reads
theirs meanwhile, from the last unit of the model to the first.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ndtrain.config import Config
from ndtrain.data import Batch
from ndtrain.engine.island_tasks import Task, Tasks, no_further_step
from ndtrain.engine.shared_step import SharedStep, StepSum
from ndtrain.engine.train_step import TrainingStep
from ndtrain.engine.validation import rows_here
from ndtrain.mesh.collectives import all_reduce
from ndtrain.mesh.mesh import Mesh
from ndtrain.model.vocabulary import IGNORE
from ndtrain.parallel.unit import Unit

Rows = Sequence[int]


@dataclass(frozen=True)
class LocalRun:
    """The parts of a run that the steps of an island use.

    Attributes:
        batches: returns this rank's microbatches of a step (counted from 0), for rows of the global batch.
        weight: returns the sum of the weights of a part of the global batch; the ranks with other tokens have the rest.
        describe: returns the numbers that belong to the state, fp64 [state_numbers].
        restore: is called with these numbers of a state that was read from another island.
    """

    batches: Callable[[int, Rows], list[Batch]]
    weight: Callable[[int], Tensor]
    describe: Callable[[], Tensor]
    restore: Callable[[Tensor], None]


class IslandStep(SharedStep):
    """Computes steps whose gradient is the sum over all islands.

    Args:
        tasks: of this rank.
    """

    def __init__(self, cfg: Config, mesh: Mesh, train_step: TrainingStep, run: LocalRun, tasks: Tasks):
        self._batch, self._mesh, self._train_step, self._run = cfg.train.global_batch, mesh, train_step, run
        self._tasks, self._exchange = tasks, tasks.exchange
        self._units = train_step.stages.units.units
        train_step.stages.units.offer_unit = self._offer_unit
        self._computed: tuple[int, frozenset[int]] = (0, frozenset())  # step and rows whose gradient is offered
        self._computing, self._adds = 0, False  # the step; True if the gradient of other rows is added
        self._numbers: Tensor | None = None  # of these rows
        self.numbers: dict[str, float] = {}

    def run(self, done: int) -> StepSum:
        """Compute gradients until the sum over all islands is known on all ranks."""
        while True:
            task = self._tasks.next()
            if task.kind == "stop":
                return no_further_step(done, task.reason)
            if task.kind == "heal":
                numbers = self._tasks.heal(task)
                if numbers is not None:
                    self._run.restore(numbers)
                    done = task.step
            elif task.kind != "wait" and self._carry_out(task):
                self._count(task)
                return StepSum(task.step - 1, self._take_sum(task))

    def after_update(self, done: int, signalled: bool) -> int:
        """Return the number of finished steps, which an update does not change."""
        return done

    def signal(self) -> float:
        """Return 0, because the ranks hear of news at the start of the next step."""
        return 0.0

    def _count(self, task: Task) -> None:
        """Set the numbers of a step. A step that was caught up with has no rows here."""
        self._train_step.rows = len(task.rows)
        self.numbers = {
            "islands/epoch": task.epoch,
            "islands/sharers": len(task.names),
            "islands/rows": len(task.rows),
            **self._tasks.numbers(),
        }

    def wait_for_the_others(self) -> None:
        """Serve this island's gradients until no other island needs them."""
        self._tasks.wait_for_the_others()

    def close(self) -> None:
        """Close all connections."""
        self._tasks.close()

    def _carry_out(self, task: Task) -> bool:
        """Return True if all ranks have the sum of the gradients, and the step still belongs to this epoch."""
        self._tasks.begin(task, lambda: self._read(task))
        if task.kind == "work":
            self._compute(task)
        return self._tasks.finish(task)

    def _read(self, task: Task) -> None:
        if task.kind == "work":
            units = list(reversed(self._units))  # in this order they become final
            names = task.names, self._tasks.name
            self._exchange.read_gradients(task.step, task.epoch, units, *names, numbers_last=True)
        else:
            self._exchange.read_sum(task.step, self._units, self._tasks.source(task))

    def _compute(self, task: Task) -> None:
        """Compute the island's rows, except those that it has computed before, and offer the gradient."""
        if task.teaches:
            self._exchange.offer_state(task.step - 1, self._run.describe())
        if not task.rows:
            return
        wanted = frozenset(task.rows)
        step, have = self._computed
        have = have if step == task.step and have <= wanted else frozenset()
        if not (new := sorted(wanted - have)):
            self._exchange.offer_again(task.step, task.epoch, self._units)
            return
        self._exchange.begin_gradient(task.step, task.epoch)
        self._computing, self._adds, began = task.step, bool(have), time.perf_counter()
        losses = self._forward_backward(task.step, new)
        self._exchange.check_offered(task.step)
        numbers = self._island_numbers(losses)
        self._numbers = self._numbers + numbers if have else numbers
        self._computed = task.step, wanted
        self._tasks.offers(task.step)  # before the numbers, with which the step may be finished
        self._exchange.offer_numbers(task.step, self._numbers)
        self._tasks.measured(len(new) / (time.perf_counter() - began))

    def _offer_unit(self, unit: Unit) -> None:
        """Offer a unit's gradient, which is final for the rows that are computed now."""
        if self._adds:
            unit.grad.add_(self._exchange.offered(self._computing)[unit.name].to(self._mesh.device))
        self._exchange.offer_unit(self._computing, unit.name, unit.grad)

    def _forward_backward(self, step: int, rows: Rows) -> Tensor:
        """Return this rank's losses of rows. Rows after the last one of the global batch are empty."""
        real = [row if row < self._batch else 0 for row in rows]
        batches = self._run.batches(step - 1, real)
        if real != list(rows):
            batches = _without(batches, [row >= self._batch for row in rows_here(self._mesh, rows)])
        return self._train_step.forward_backward(step, batches, self._run.weight(step - 1))

    def _island_numbers(self, losses: Tensor) -> Tensor:
        """Return the sums over the ranks of this island: losses, and the loads and losses of experts. fp64."""
        numbers = torch.cat([losses.double(), self._train_step.stages.balance.sums_here().flatten()])
        all_reduce(numbers, self._mesh.world).wait()
        return numbers

    def _take_sum(self, task: Task) -> Tensor:
        """Make the sum over all islands the gradient, and return this rank's share of the losses: rank 0 has all."""
        grads, numbers = self._exchange.take_sum(task.step, self._units)
        for name, unit in self._units.items():
            unit.grad.copy_(grads[name])
        numbers = numbers.to(self._mesh.device)
        if self._mesh.rank > 0:
            numbers.zero_()
        count, balance = self._train_step.executor.losses, self._train_step.stages.balance
        balance.set_sums(numbers[count : count + balance.sums_here().numel()])
        return numbers[:count]


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
