"""DiLoCo between islands: each trains alone for some steps, then the outer optimizer averages how far they have come.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023 (arXiv 2311.08105). With
`islands.fragments` and `islands.delay` the parts of the model are exchanged in turn, while training goes on: Douillard
et al., "Streaming DiLoCo with overlapping communication", 2025 (arXiv 2501.18512). Unlike there, an island keeps what
it has learned during an exchange: its weights become the new outer weights plus their change since it began.
"""

import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ndtrain.config import Config
from ndtrain.engine.island_step import LocalRun
from ndtrain.engine.island_tasks import Task, Tasks, no_further_step
from ndtrain.engine.shared_step import SharedStep, StepSum
from ndtrain.engine.train_step import TrainingStep
from ndtrain.islands.encoding import Outer
from ndtrain.islands.reading import Gone
from ndtrain.mesh.collectives import all_reduce, all_reduce_max
from ndtrain.mesh.mesh import Mesh
from ndtrain.parallel.unit import Unit

# The best outer learning rates in Charles et al., "Scaling laws for DiLoCo", 2025 (arXiv 2503.09799). They depend on
# the number of islands, and not on the size of the model.
_OUTER_LR = {1: 0.4, 4: 0.6}
_MOST_OUTER_LR = 0.8
OUTER_NUMBERS = 2  # numbers that the islands add up besides losses and selection biases: weights and rows


def outer_lr(islands: int) -> float:
    """Return the outer learning rate for a number of islands."""
    return next((lr for most, lr in _OUTER_LR.items() if islands <= most), _MOST_OUTER_LR)


@dataclass(frozen=True)
class Exchanges:
    """The exchanges of a run: when each of them happens, and which units it is of.

    Exchange k is offered after inner step k x every, and its sum is used `delay` inner steps later. The last one is of
    all units, after the last step of the run. So all islands end with the same weights. An exchange that would not end
    before it is left out. If the run stops earlier (`train.stop_at`), the last exchange is of no unit: it only makes
    the islands stop together.

    Attributes:
        every: inner steps from one exchange to the next.
        last: the last inner step of this process.
        is_end: True if it is the last one of the whole run.
    """

    every: int
    fragments: int
    delay: int
    last: int
    is_end: bool = True

    @classmethod
    def of(cls, cfg: Config) -> "Exchanges":
        i, last = cfg.islands, cfg.train.stop_at or cfg.train.steps
        return cls(i.inner_steps // i.fragments, i.fragments, i.delay, last, last == cfg.train.steps)

    @property
    def count(self) -> int:
        return 1 + max(0, self.last - self.delay - self.is_end) // self.every

    def begins(self, k: int) -> int:
        """Return the inner step after which an exchange is offered."""
        return self.last if k >= self.count else k * self.every

    def ends(self, k: int) -> int:
        """Return the inner step after which the sum of an exchange is used."""
        return self.last if k >= self.count else k * self.every + self.delay if k else 0

    def done_at(self, step: int) -> int:
        """Return the number of exchanges whose sums are used after an inner step."""
        return self.count if step >= self.last else max(0, min(self.count - 1, (step - self.delay) // self.every))

    def units(self, k: int, units: list[str]) -> list[str]:
        """Return the units of an exchange: every `fragments`-th one, so that fragments are about equally large."""
        if k >= self.count:
            return units if self.is_end else []
        return units[(k - 1) % self.fragments :: self.fragments]


@dataclass
class _Exchange:
    """An exchange that this island has offered.

    Attributes:
        base: unit -> its weights when it was offered, if training goes on meanwhile.
        reading: the thread that reads the other islands' outer gradients.
        epoch: in which it reads.
        ok: True when it has read them.
    """

    base: dict[str, Tensor]
    reading: threading.Thread | None = None
    epoch: int = 0
    ok: bool = False


class OuterStep(SharedStep):
    """Computes inner steps alone, and outer steps together with other islands.

    Args:
        tasks: of this rank.
        encoding: of the outer gradients.
    """

    def __init__(self, cfg: Config, mesh: Mesh, train_step: TrainingStep, run: LocalRun, tasks: Tasks, encoding: Outer):
        self._cfg, self._mesh, self._train_step, self._run = cfg, mesh, train_step, run
        self._tasks, self._exchange, self._encoding = tasks, tasks.exchange, encoding
        self._exchanges = Exchanges.of(cfg)
        self._units = train_step.stages.units.units
        self._work: Task | None = None  # the exchange that comes next, or is in progress
        self._offered: _Exchange | None = None
        self._rows: tuple[int, ...] = ()
        self._since, self._rows_each = _Since(), deque[int](maxlen=self._exchanges.fragments)
        self._began, self._stopped = 0.0, None
        self._finished = False  # the last exchange
        self.numbers: dict[str, float] = {}

    # ------------------------------------------------------------------------------------------------------ inner steps

    def run(self, done: int) -> StepSum:
        """Compute the gradients of an inner step, over this island's rows of the global batch.

        Args:
            done: the number of finished inner steps.
        """
        while True:
            if self._stopped is None and self._work is None:
                done = self._begin(done)
            if self._stopped is not None:
                return no_further_step(done, self._stopped)
            if self._work and self._rows and done < self._exchanges.last:
                break
            if self._work:  # it has no rows, or has resumed after the last step: it takes part in the exchange alone
                return StepSum(self.after_update(max(done, self._exchanges.ends(self._work.step)), False), None)
        self._train_step.rows, self._began = len(self._rows), time.perf_counter()
        losses = self._train_step.forward_backward(done + 1, self._run.batches(done, self._rows))
        self._since.losses = len(self._rows) * losses.detach().double() + self._since.losses
        return StepSum(done, losses)

    def _begin(self, done: int) -> int:
        """Find out what the next exchange is. Return the number of finished inner steps."""
        task = self._tasks.next()
        match task.kind:
            case "stop":
                self._stopped = task.reason
            case "heal":
                return self._heal(task, done)
            case "catch up":
                if self._tasks.finish(task, lambda: self._read_sum(task)):
                    self._use_sum(task)
                    return max(done, self._exchanges.ends(task.step))
            case "work":
                self._work, self._rows = task, self._real(task.rows)
                self._teach(task)
        return done

    def _real(self, rows: tuple[int, ...]) -> tuple[int, ...]:
        """Return the rows of an island. Those after the last one of the global batch are its first ones again."""
        batch = self._cfg.train.global_batch
        return tuple(row % batch for row in rows)

    def _teach(self, task: Task) -> None:
        if task.teaches:
            self._exchange.offer_state(task.step - 1, self._run.describe(), copied=True)

    def signal(self) -> float:
        """Return a number other than 0 if the leader has news for all ranks."""
        leader, work = self._tasks.leader, self._work
        if leader is None or work is None or self._offered is not None:
            return 0.0
        return float(leader.is_late(work.step) or leader.has_news(work.step, work.epoch))

    # ------------------------------------------------------------------------------------------------------ outer steps

    def after_update(self, done: int, signalled: bool) -> int:
        """Take part in an exchange if it is time. Return the number of finished inner steps.

        Args:
            signalled: True if the leader has news for all ranks.
        """
        work, exchanges = self._work, self._exchanges
        self.numbers = {
            "islands/epoch": work.epoch,
            "islands/sharers": len(work.names),
            "islands/rows": len(self._rows),
        }
        if self._began:
            self._since.rows += len(self._rows)
            self._tasks.measured(len(self._rows) / (time.perf_counter() - self._began))
            self._began = 0.0
        if signalled and self._offered is None:
            done = self._hear_news(done)
            if (work := self._work) is None:
                return done
        if self._offered is None and done >= exchanges.begins(work.step):
            self._offer(work, keep=exchanges.ends(work.step) > done)
        if self._offered is not None and done >= exchanges.ends(work.step):
            return self._finish(done)
        return done

    def _hear_news(self, done: int) -> int:
        """Look at the orders before an exchange begins: the others may wait for this island, or may need its state."""
        task = self._tasks.next()
        if task.kind != "work" or task.step != self._work.step:
            self._work = None  # `run` follows the new orders
            return done
        self._work, self._rows = task, self._real(task.rows)
        self._teach(task)
        return max(done, self._exchanges.begins(task.step)) if task.late else done

    def _offer(self, work: Task, keep: bool) -> None:
        """Offer the outer gradients, and begin to read the other islands' outer gradients.

        Args:
            keep: True if training goes on before the sum is used.
        """
        base, delta = {}, {}
        for name in self._units_of(work.step):
            weights = self._units[name].master.detach().cpu()
            delta[name] = self._units[name].outer - weights
            if keep:
                base[name] = weights.clone()
        scales = self._encoding.scales_here(delta)
        if len(scales):
            scales = scales.to(self._mesh.device)
            all_reduce_max(scales, self._mesh.world).wait()
        self._offered = _Exchange(base)
        self._exchange.offer_gradient(work.step, work.epoch, delta, self._numbers_here(), scales.cpu())
        self._tasks.offers(work.step)
        self._since = _Since()
        if keep:
            self._read_meanwhile(work)

    def _numbers_here(self) -> Tensor:
        """Return the numbers that the islands add up, fp64.

        They are the weight of the outer gradient, which is the number of rows since these units were exchanged last;
        the number of rows since any were; the losses of these rows; and the selection biases times the weight.
        """
        losses = torch.zeros(self._train_step.executor.losses, dtype=torch.float64, device=self._mesh.device)
        losses += self._since.losses
        all_reduce(losses, self._mesh.world).wait()
        self._rows_each.append(self._since.rows)
        weight = float(sum(self._rows_each))
        biases = self._train_step.stages.balance.bias_LX.flatten().double().cpu()
        rows = torch.tensor([weight, self._since.rows], dtype=torch.float64)
        return torch.cat([rows, losses.cpu(), weight * biases])

    def _read_meanwhile(self, work: Task) -> None:
        """Read the other islands' outer gradients in a thread."""
        offered = self._offered
        offered.epoch = work.epoch

        def read() -> None:
            with suppress(Gone), torch.no_grad():
                self._exchange.connect(work.connect or {})
                self._read_gradients(work)
                offered.ok = True

        offered.reading = threading.Thread(target=read, name="outer gradients", daemon=True)
        offered.reading.start()

    def _finish(self, done: int) -> int:
        """Wait until the sum is known on all ranks, and use it. Return the number of finished inner steps."""
        while True:
            task = self._tasks.next()
            match task.kind:
                case "stop":
                    self._stopped = task.reason
                    return done
                case "heal":
                    return self._heal(task, done)
                case "work" if task.step != self._work.step:
                    raise AssertionError("the leader has finished an exchange that this rank has not")
                case "work":
                    self._teach(task)
                    self._exchange.offer_again(task.step, task.epoch, self._units_of(task.step))
                case "wait":
                    continue
            if self._tasks.finish(task, partial(self._read, task)):
                self._count(task)
                self._use_sum(task)
                return done

    def _read(self, task: Task) -> None:
        """Read what an exchange needs, unless it has been read meanwhile."""
        offered = self._offered
        if offered.reading:
            offered.reading.join()
        has_read = offered.ok and task.epoch == offered.epoch
        offered.ok = False  # a second attempt reads again
        if task.kind == "catch up":
            self._read_sum(task)
        elif not has_read:
            self._read_gradients(task)

    def _read_gradients(self, task: Task) -> None:
        units = self._units_of(task.step)
        self._exchange.read_gradients(task.step, task.epoch, units, task.names, self._tasks.name)

    def _read_sum(self, task: Task) -> None:
        self._exchange.read_sum(task.step, self._units_of(task.step), self._tasks.source(task))

    def _units_of(self, step: int) -> list[str]:
        return self._exchanges.units(step, list(self._units))

    # ------------------------------------------------------------------------------------------------- outer optimizer

    def _use_sum(self, task: Task) -> None:
        """Make the outer step with the mean of the outer gradients."""
        units = self._units_of(task.step)
        grads, numbers = self._exchange.take_sum(task.step, units)
        i, offered = self._cfg.islands, self._offered
        lr = outer_lr(len(task.names)) if i.outer_lr is None else i.outer_lr
        for name in units:
            unit = self._units[name]
            _nesterov(unit, grads[name], lr, i.outer_momentum)
            weights = unit.outer
            if offered and name in offered.base:
                weights = weights + (unit.master.cpu() - offered.base[name])
            unit.master.copy_(weights)
        self._train_step.stages.units.weights_changed()
        self._take_numbers(numbers)
        self._work = self._offered = None
        self._finished = task.step == self._exchanges.count

    def _take_numbers(self, numbers: Tensor) -> None:
        """Take over the mean of the selection biases, and log the mean of the losses."""
        weight, rows, first = float(numbers[0]), float(numbers[1]), OUTER_NUMBERS + self._train_step.executor.losses
        bias_LX = self._train_step.stages.balance.bias_LX
        if weight and bias_LX.numel():
            bias_LX.copy_((numbers[first : first + bias_LX.numel()] / weight).view_as(bias_LX))
        if rows:
            self.numbers["islands/loss"] = float(numbers[OUTER_NUMBERS]) / rows

    def _count(self, task: Task) -> None:
        """Log the bytes that were read, and the norms of the outer gradients."""
        self.numbers |= self._tasks.numbers()
        if task.kind == "work":
            products = self._encoding.products.to(self._mesh.device, copy=True)
            all_reduce(products, self._mesh.world).wait()
            error, own, mean, *each = products.tolist()
            self.numbers["islands/outer_norm"] = mean**0.5
            pairs = zip(each[::2], each[1::2], strict=True)
            cosines = [dot / (square * mean) ** 0.5 for square, dot in pairs if square * mean]
            self.numbers["islands/outer_cosine"] = sum(cosines) / len(cosines) if cosines else 0.0
            if own:
                self.numbers["islands/outer_error"] = (error / own) ** 0.5

    def _heal(self, task: Task, done: int) -> int:
        """Read the state of another island, and begin from its outer weights."""
        if self._offered and self._offered.reading:
            self._exchange.reader.cancel()
            self._offered.reading.join()
        numbers = self._tasks.heal(task)
        if numbers is None:
            return done
        for unit in self._units.values():
            unit.master.copy_(unit.outer)
        self._train_step.stages.units.weights_changed()
        self._run.restore(numbers)
        self._encoding.forget()
        self._work = self._offered = None
        self._since = _Since()
        self._rows_each.clear()
        return self._exchanges.ends(task.step)

    def wait_for_the_others(self) -> None:
        """Serve this island's outer gradients until no other island needs them, at the end of the whole run."""
        if self._finished:
            self._tasks.wait_for_the_others()

    def close(self) -> None:
        """Close all connections."""
        self._tasks.close()


@dataclass
class _Since:
    """The work of this island since the last exchange.

    Attributes:
        rows: the number of rows that it has trained on.
        losses: this rank's sums of the losses.
    """

    rows: int = 0
    losses: Tensor | float = 0.0


def _nesterov(unit: Unit, grad: Tensor, lr: float, momentum: float) -> None:
    """Make a step of SGD with Nesterov momentum on the outer weights, as torch.optim.SGD does."""
    unit.outer_momentum.mul_(momentum).add_(grad)
    unit.outer.add_(grad.add(unit.outer_momentum, alpha=momentum), alpha=-lr)
