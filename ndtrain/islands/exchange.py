"""The tensors that a rank exchanges with other islands: gradients, their sums, and the state that a new member reads.

A rank reads its own elements from the ranks that hold them, whatever mesh the other island has. Gradients are added in
the order of the members, so all islands get the same bits. Units are offered, sent and added one after another, so with
`islands.sync=gradients` most of it happens during the backward pass.

A rank keeps three copies of its shard's gradient in host memory. Two of them are this island's gradients of the last
two steps: an island that is a step behind may still read the older one. The third is the last sum, for an island that
has missed it.

With `islands.sync=diloco` a step here is one exchange, and its gradient is the outer gradient of some of the units.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ndtrain.islands.encoding import Encoding, Part
from ndtrain.islands.orders import Cancel
from ndtrain.islands.own import OwnGradients
from ndtrain.islands.reading import Gone, Reader
from ndtrain.islands.shelf import GRAD, STATE, SUM, Shelf, Tag
from ndtrain.islands.table import NIBBLES, Table, UnitTable, element_bytes, pack_nibbles, unpack_nibbles
from ndtrain.islands.wire import Listener, Place, WireError
from ndtrain.mesh.row_map import Held, Rows
from ndtrain.parallel.stages import Stages
from ndtrain.parallel.unit import Unit

NUMBERS = "numbers"  # a unit of its own: sums that belong to no tensor, in fp64
SCALES = "scales"  # a unit of its own: the scales of the encoding, in fp32
_NO_SCALES = torch.zeros(0)
_NO_NUMBERS = torch.zeros(0, dtype=torch.float64)

Bits = dict[str, Tensor]  # unit -> flat tensor
Values = Mapping[str, Tensor]


class Exchange:
    """The tensors that a rank offers to other islands and reads from them.

    Args:
        rank: the rank in its island. Rank 0 serves the numbers.
        numbers: how many numbers the islands add up besides the gradients.
        place: where to listen.
        encoding: of the gradients.

    Attributes:
        address: where the other islands' ranks connect to.
    """

    def __init__(self, stages: Stages, rank: int, numbers: int, place: Place, encoding: Encoding):
        self.stages, self.encoding, self._rank, self._count = stages, encoding, rank, numbers
        self._units = stages.units.units
        plan = stages.units.plan
        state = {"master": plan.master} | {s.name: s.dtype or plan.master for s in plan.sharded}
        copies = [*["ema"] * plan.ema, *["outer", "outer_momentum"] * plan.outer]
        buffers = {
            GRAD: {"grad": encoding.dtype},
            SUM: {"grad": plan.master},
            STATE: state | dict.fromkeys(copies, plan.master),
        }
        dtypes = {dtype for named in buffers.values() for dtype in named.values()}
        self._extra = {NUMBERS: _raw_unit(NUMBERS, 8 * numbers, dtypes)}
        if encoding.scales:
            self._extra[SCALES] = _raw_unit(SCALES, 4 * encoding.scales, {encoding.dtype})
        served, wanted = (self._with_extra(Table.of(stages, owned, buffers), owned) for owned in (True, False))
        self.reader = Reader(wanted, place.token)
        self.shelf = Shelf(served, self._cancel)
        self._listener = Listener(place.host, place.token, self.shelf.handlers(), reserved=place.doors)
        self.address = self._listener.address
        numel = {name: unit.grad.numel() for name, unit in self._units.items()}
        extra = {name: unit.numel for name, unit in self._extra.items()}
        self._own = OwnGradients(self.shelf, numel | extra, encoding.dtype)
        sizes = numel | {NUMBERS: extra[NUMBERS]}
        self._sum, self._sum_tag = {n: torch.zeros(k, dtype=plan.master) for n, k in sizes.items()}, Tag(SUM, -1, 0)
        self._state_tag: Tag | None = None
        self._lives: dict[str, str] = {}
        self._reading = ""

    def _with_extra(self, table: Table, owned: bool) -> Table:
        return Table(table.units | (self._extra if self._rank == 0 or not owned else {}), table.buffers)

    def _cancel(self, given_up: Cancel) -> None:
        self.reader.cancel(given_up)
        if self._reading != GRAD:  # the source may be lost, and another one is chosen
            self.reader.cancel()

    def close(self) -> None:
        """Stop serving and reading."""
        self._own.close()
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

    def offer_gradient(self, step: int, epoch: int, values: Values, numbers: Tensor, scales: Tensor | None = None):
        """Offer this island's gradient of a step. If it has been offered for this epoch before, do nothing.

        Args:
            values: unit -> this rank's shard of the gradient, for the units that are exchanged in this step.
            numbers: fp64 [numbers], the same on all ranks of the island.
            scales: of the encoding, the same on all ranks of the island.
        """
        if self._own.has_begun(Tag(GRAD, step, epoch)):
            return
        self.begin_gradient(step, epoch)
        self.offer_numbers(step, numbers)
        if scales is not None and SCALES in self._extra:
            self._own.put(step, SCALES, lambda out: _write_raw(scales, out))
        for name, x in values.items():
            self.offer_unit(step, name, x, scales)

    def begin_gradient(self, step: int, epoch: int) -> None:
        """Begin to offer this island's gradient of a step, unit by unit."""
        self._own.begin(Tag(GRAD, step, epoch))

    def offer_unit(self, step: int, unit: str, x: Tensor, scales: Tensor | None = None) -> None:
        """Offer this rank's shard of a unit's gradient. It is copied."""
        scales = _NO_SCALES if scales is None else scales
        self._own.put(step, unit, lambda out: self.encoding.write(unit, x, scales, out))

    def offer_numbers(self, step: int, numbers: Tensor) -> None:
        """Offer the numbers that the islands add up besides the gradients: fp64, the same on all ranks."""
        self._own.put(step, NUMBERS, lambda out: _write_raw(numbers, out))

    def offer_again(self, step: int, epoch: int, units: Iterable[str]) -> None:
        """Offer the same gradient again, in another epoch."""
        self._own.offer_again(Tag(GRAD, step, epoch), [*self._extra, *units])

    def offered(self, step: int) -> Bits:
        """Return this island's gradient of a step, as it was offered."""
        return self._own.of_step(step)

    def check_offered(self, step: int) -> None:
        """Check that a step has offered all units. Otherwise the read of its gradients would wait for ever."""
        missing = self._own.missing(step, self._units)
        assert not missing, f"the program of the step has not offered {missing}"

    def read_gradients(
        self,
        step: int,
        epoch: int,
        units: Iterable[str],
        sharers: Sequence[str],
        me: str,
        numbers_last: bool = False,
    ) -> None:
        """Read the gradients of all sharers, and add them up. Wait until they offer them, and until this island does.

        Args:
            units: in the order in which they are read.
            numbers_last: True if the numbers are offered after the units, and adding the gradients needs none.

        Raises:
            Gone: one of them cannot be read.
        """
        self._reading, mine = GRAD, Tag(GRAD, step, epoch)
        tags = {name: mine for name in sharers if name != me}
        order = [*units, *self._extra] if numbers_last else [*self._extra, *units]
        alone = ((unit, {}) for unit in order)
        numbers = dict.fromkeys(sharers, _NO_NUMBERS)
        scales = dict.fromkeys(sharers, _NO_SCALES)
        for unit, arrived in self.reader.read_each(tags, order) if tags else alone:
            parts = {x: self._own.wait(mine, unit) if x == me else arrived[x]["grad"] for x in sharers}
            if unit == order[0]:
                self._withdraw(self._sum_tag)  # all islands offer this step, so nobody has missed the last one
                self.encoding.begin_sum(len(sharers))
            if unit == NUMBERS:
                numbers = {x: _read_raw(part, self._count, torch.float64) for x, part in parts.items()}
                _write_raw(torch.stack(list(numbers.values())).sum(0), self._sum[NUMBERS])
            elif unit == SCALES:
                scales = {x: _read_raw(part, self.encoding.scales, torch.float32) for x, part in parts.items()}
            else:
                each = [Part(parts[x], numbers[x], scales[x]) for x in sharers]
                self.encoding.add(unit, each, self._sum[unit])

    def read_sum(self, step: int, units: Iterable[str], source: str) -> None:
        """Read the summed gradient of a step from an island that has finished the step.

        Raises:
            Gone: it cannot be read.
        """
        self._reading = SUM
        self._withdraw(self._sum_tag)
        for unit, arrived in self.reader.read_each({source: Tag(SUM, step, 0)}, [NUMBERS, *units]):
            self._sum[unit].copy_(arrived[source]["grad"])

    def take_sum(self, step: int, units: Iterable[str]) -> tuple[Bits, Tensor]:
        """Return the sum of a step, and offer it to islands that miss it.

        Returns:
            Unit -> this rank's shard of the gradient; and the summed numbers. They are valid until the next step.
        """
        self._sum_tag = Tag(SUM, step, 0)
        self._offer(self._sum_tag, [NUMBERS, *units], self._sum)
        return self._sum, _read_raw(self._sum[NUMBERS], self._count, torch.float64)

    # ------------------------------------------------------------------------------------------------------------ state

    def offer_state(self, step: int, numbers: Tensor, copied: bool = False) -> None:
        """Offer weights and optimizer state after a step, until `withdraw_state`.

        Args:
            copied: True if they may change meanwhile. Otherwise they must not.
        """
        self._state_tag = Tag(STATE, step, 0)
        named = self.shelf.table.buffers[STATE]
        for name, unit in self._units.items():
            buffers = {buffer: _on_host(unit, buffer, copied) for buffer in named}
            self.shelf.offer(self._state_tag, name, buffers)
        if self._rank == 0:
            buffers = {name: torch.zeros(self._extra[NUMBERS].numel, dtype=dtype) for name, dtype in named.items()}
            _write_raw(numbers, buffers["master"])
            self.shelf.offer(self._state_tag, NUMBERS, buffers)

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
        for name, arrived in self.reader.read_each({source: Tag(STATE, step, 0)}, [NUMBERS, *self._units]):
            if name == NUMBERS:
                numbers.copy_(_read_raw(arrived[source]["master"], self._count, torch.float64))
                continue
            for buffer, data in arrived[source].items():
                unit = self._units[name]
                unit.buffer(buffer).copy_(data[unit.held.get(buffer, slice(None))])
        self.stages.units.weights_changed()
        return numbers

    def _offer(self, tag: Tag, units: Iterable[str], bits: Bits) -> None:
        for name in units:
            if name in self.shelf.table.units:
                self.shelf.offer(tag, name, {"grad": bits[name]})

    def _withdraw(self, tag: Tag | None) -> None:
        if tag is not None:
            self.shelf.withdraw(tag)


def _on_host(unit: Unit, buffer: str, copied: bool) -> Tensor:
    """Return a buffer in the length of the shard, with zeros for elements that it does not have."""
    x, held = unit.buffer(buffer).detach(), unit.held.get(buffer, slice(None))
    if x.numel() < unit.master.numel():
        padded = torch.zeros(unit.master.numel(), dtype=x.dtype)
        padded[held] = x
        return padded
    return x.cpu() if x.device.type != "cpu" or not copied else x.clone()


# ------------------------------------------------------------------------------------------------- numbers as elements


def _raw_unit(name: str, nbytes: int, dtypes: Iterable[torch.dtype]) -> UnitTable:
    """Return the table of a unit that has room for some bytes, whichever of the dtypes its buffers have."""
    numel = max(int(nbytes / element_bytes(dtype)) for dtype in dtypes)
    return UnitTable(numel, {name: (Held(0, Rows(0, numel)),)})


def _write_raw(x: Tensor, out: Tensor) -> None:
    """Write the bytes of a tensor to the first elements of another one."""
    data = x.cpu().contiguous().view(torch.uint8)
    if out.dtype == NIBBLES:
        data = torch.from_numpy(unpack_nibbles(data.numpy()))
    out.view(torch.uint8)[: len(data)] = data


def _read_raw(x: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return the numbers that `_write_raw` has written."""
    nbytes = count * dtype.itemsize
    if x.dtype == NIBBLES:
        return torch.from_numpy(pack_nibbles(x[: 2 * nbytes].numpy())).view(dtype)
    return x.view(torch.uint8)[:nbytes].clone().view(dtype)
