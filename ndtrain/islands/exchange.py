"""The tensors that a rank exchanges with other islands: gradients, their sums, and the state that a new member reads.

A rank reads its own elements from the ranks that hold them, whatever mesh the other island has. Gradients are added in
the order of the members, so all islands get the same bits.

A rank keeps three copies of its shard's gradient in host memory. Two of them are this island's gradients of the last
two steps: an island that is a step behind may still read the older one. The third is the last sum, for an island that
has missed it.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ndtrain.islands.reading import Gone, Reader
from ndtrain.islands.shelf import GRAD, STATE, SUM, Shelf, Tag
from ndtrain.islands.table import Table, UnitTable
from ndtrain.islands.wire import Listener, WireError
from ndtrain.mesh.row_map import Held, Rows
from ndtrain.parallel.stages import Stages
from ndtrain.parallel.unit import Unit

NUMBERS = "numbers"  # a unit of its own: sums that belong to no tensor, in fp64
_OWN_STEPS = 2

Bits = dict[str, Tensor]  # unit -> flat tensor


class Exchange:
    """The tensors that a rank offers to other islands and reads from them.

    Args:
        rank: the rank in its island. Rank 0 serves the numbers.
        numbers: how many numbers the islands add up besides the gradients.
        host: the address on which to listen.
        token: the secret text that all islands share.

    Attributes:
        address: where the other islands' ranks connect to.
    """

    def __init__(self, stages: Stages, rank: int, numbers: int, host: str, token: str):
        self.stages, self._rank, self._count = stages, rank, numbers
        self._units = stages.units.units
        plan = stages.units.plan
        state = {"master": plan.master} | {s.name: s.dtype or plan.master for s in plan.spec}
        buffers = {
            GRAD: {"grad": plan.master},
            SUM: {"grad": plan.master},
            STATE: state | ({"ema": plan.master} if plan.ema else {}),
        }
        self._numbers = UnitTable(self._width(plan.master), {NUMBERS: (Held(0, Rows(0, self._width(plan.master))),)})
        served, wanted = (self._with_numbers(Table.of(stages, owned, buffers), owned) for owned in (True, False))
        self.reader = Reader(wanted, token)
        self.shelf = Shelf(served, self._cancel)
        self._listener = Listener(host, token, self.shelf.handlers())
        self.address = self._listener.address
        self._own = [self._empty() for _ in range(_OWN_STEPS)]
        self._own_tags: list[Tag | None] = [None] * _OWN_STEPS
        self._sum, self._sum_tag = self._empty(), Tag(SUM, -1, 0)
        self._state_tag: Tag | None = None
        self._lives: dict[str, str] = {}
        self._reading = ""

    def _width(self, dtype: torch.dtype) -> int:
        return self._count * 8 // dtype.itemsize

    def _with_numbers(self, table: Table, owned: bool) -> Table:
        units = table.units | ({NUMBERS: self._numbers} if self._rank == 0 or not owned else {})
        return Table(units, table.buffers)

    def _empty(self) -> Bits:
        master = self.stages.units.master
        made = {name: torch.zeros(unit.grad.numel(), dtype=master) for name, unit in self._units.items()}
        return made | {NUMBERS: torch.zeros(self._numbers.numel, dtype=master)}

    @property
    def _order(self) -> list[str]:
        """The units in the order in which they are read: the numbers first."""
        return [NUMBERS, *self._units]

    def _cancel(self, epoch: int) -> None:
        self.reader.cancel(epoch)
        if self._reading != GRAD:  # the source may be lost, and another one is chosen
            self.reader.cancel()

    def close(self) -> None:
        """Stop serving and reading."""
        self.reader.close()
        self.shelf.close()
        self._listener.close()

    # ------------------------------------------------------------------------------------------------------ connections

    def connect(self, endpoints: Mapping[str, tuple[str, Sequence[str]]]) -> None:
        """Connect to islands whose process is new.

        Args:
            endpoints: name -> the life of the island, and the address of each of its ranks.

        Raises:
            Gone: an island cannot be reached.
        """
        for name, (life, addresses) in endpoints.items():
            if self._lives.get(name) == life:
                continue
            self._lives.pop(name, None)
            try:
                self.reader.connect(name, addresses)
            except (WireError, ValueError) as error:
                raise Gone(name, str(error)) from error
            self._lives[name] = life

    # -------------------------------------------------------------------------------------------------------- gradients

    def offer_gradient(self, step: int, epoch: int, numbers: Tensor) -> None:
        """Offer this island's gradient of a step, as the units hold it now.

        Args:
            numbers: fp64 [numbers], the same on all ranks of the island.
        """
        slot, tag = step % _OWN_STEPS, Tag(GRAD, step, epoch)
        if self._own_tags[slot] == tag:
            return
        self._withdraw(self._own_tags[slot])
        for name, unit in self._units.items():
            self._own[slot][name].copy_(unit.grad)
        self._own[slot][NUMBERS].view(torch.float64)[: len(numbers)] = numbers.cpu()
        self._offer(tag, self._own[slot])
        self._own_tags[slot] = tag

    def add_offered_gradient(self, step: int) -> None:
        """Add the gradient of a step that was offered before to the gradient that the units hold now."""
        for name, unit in self._units.items():
            unit.grad.add_(self._own[step % _OWN_STEPS][name].to(unit.grad.device))

    def read_gradients(self, step: int, epoch: int, sharers: Sequence[str], me: str) -> None:
        """Read the gradients of all sharers, and add them up.

        Raises:
            Gone: one of them cannot be read.
        """
        tags = {name: Tag(GRAD, step, epoch) for name in sharers if name != me}
        own = self._own[step % _OWN_STEPS]
        self._reading = GRAD
        alone = ((unit, {}) for unit in self._order)
        for i, (unit, arrived) in enumerate(self.reader.read_each(tags, self._order) if tags else alone):
            if i == 0:
                self._withdraw(self._sum_tag)  # all islands offer this step, so nobody has missed the last one
            parts = [own[unit] if name == me else arrived[name]["grad"] for name in sharers]
            self._add_up(unit, parts)

    def _add_up(self, unit: str, parts: Sequence[Tensor]) -> None:
        total = self._sum[unit]
        if unit == NUMBERS:
            total.view(torch.float64).copy_(torch.stack([x.view(torch.float64) for x in parts]).sum(0))
            return
        total.copy_(parts[0])
        for x in parts[1:]:
            total.add_(x)

    def read_sum(self, step: int, source: str) -> None:
        """Read the summed gradient of a step from an island that has finished the step.

        Raises:
            Gone: it cannot be read.
        """
        self._reading = SUM
        self._withdraw(self._sum_tag)
        for unit, arrived in self.reader.read_each({source: Tag(SUM, step, 0)}, self._order):
            self._sum[unit].copy_(arrived[source]["grad"])

    def use_sum(self, step: int) -> Tensor:
        """Make the sum the gradient of the units, and offer it to islands that miss it. Return the summed numbers."""
        for name, unit in self._units.items():
            unit.grad.copy_(self._sum[name])
        self._sum_tag = Tag(SUM, step, 0)
        self._offer(self._sum_tag, self._sum)
        return self._sum[NUMBERS].view(torch.float64).clone()

    # ------------------------------------------------------------------------------------------------------------ state

    def offer_state(self, step: int, numbers: Tensor) -> None:
        """Offer weights and optimizer state after a step. They must not change until `withdraw_state`."""
        self._state_tag = Tag(STATE, step, 0)
        for name, unit in self._units.items():
            self.shelf.offer(self._state_tag, name, self._state_of(unit))
        if self._rank == 0:
            named = self.shelf.table.buffers[STATE]
            buffers = {name: torch.zeros(self._numbers.numel, dtype=dtype) for name, dtype in named.items()}
            buffers["master"].view(torch.float64)[: len(numbers)] = numbers.cpu()
            self.shelf.offer(self._state_tag, NUMBERS, buffers)

    def _state_of(self, unit: Unit) -> dict[str, Tensor]:
        return {name: unit.buffer(name).detach().cpu() for name in self.shelf.table.buffers[STATE]}

    def withdraw_state(self) -> None:
        """Stop offering the state. It may change afterwards."""
        self._withdraw(self._state_tag)
        self._state_tag = None

    def read_state(self, step: int, source: str) -> Tensor:
        """Read weights and optimizer state after a step. Return the numbers that the source has offered with them.

        Raises:
            Gone: they cannot be read.
        """
        self._reading = STATE
        numbers = torch.zeros(self._count, dtype=torch.float64)
        for name, arrived in self.reader.read_each({source: Tag(STATE, step, 0)}, self._order):
            if name == NUMBERS:
                numbers.copy_(arrived[source]["master"].view(torch.float64))
                continue
            for buffer, data in arrived[source].items():
                self._units[name].buffer(buffer).copy_(data)
        self.stages.units.weights_changed()
        return numbers

    def _offer(self, tag: Tag, bits: Bits) -> None:
        for name in self.shelf.table.units:
            self.shelf.offer(tag, name, {"grad": bits[name]})

    def _withdraw(self, tag: Tag | None) -> None:
        if tag is not None:
            self.shelf.withdraw(tag)
