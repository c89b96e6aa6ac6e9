"""The forms in which gradients are sent between islands, and the rules by which they are added.

`Plain` is for the gradients of `islands.sync=gradients`. `Outer` is for outer gradients: it rounds them to fewer bits,
and adds the rounding error to the next outer gradient (error feedback: Seide et al., "1-bit stochastic gradient
descent", 2014). int8 and int4 have one scale for each row of a tensor. All ranks of an island use the same scales, so
the rounded numbers do not depend on the mesh.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ndtrain.islands.table import NIBBLES, Table

_CODECS = {"bf16": torch.bfloat16, "int8": torch.int8, "int4": NIBBLES}
_LEVELS = {torch.int8: 127, NIBBLES: 7}  # the largest integer; the smallest is its negative
_OFFSET = 8  # is added to 4-bit integers, which are sent without a sign


def sent_dtype(codec: str, master: torch.dtype) -> torch.dtype:
    """Return the type in which a codec sends outer gradients.

    Args:
        master: dtype of the weights, in which fp32 sends them.
    """
    return _CODECS.get(codec, master)


class Encoding(Protocol):
    """The form in which gradients are sent, and the rule by which they are added.

    Attributes:
        dtype: of the elements that are sent.
        scales: the number of fp32 scales that are sent with them.
    """

    dtype: torch.dtype
    scales: int

    def write(self, unit: str, values: Tensor, scales: Tensor, out: Tensor) -> None:
        """Write a unit's gradient to the host memory from which it is sent."""

    def begin_sum(self, islands: int) -> None:
        """Begin a sum over some islands."""

    def add(self, unit: str, parts: Sequence["Part"], out: Tensor) -> None:
        """Add what the islands have sent of a unit."""


class Part(NamedTuple):
    """One island's part of a sum.

    Attributes:
        data: its elements of this rank's shard, as they are sent.
        numbers: the numbers that it has sent along, fp64 [numbers].
        scales: fp32 [scales].
    """

    data: Tensor
    numbers: Tensor
    scales: Tensor


class Plain:
    """Gradients in their own precision. Their sum is the gradient of the whole batch."""

    scales = 0

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def write(self, unit: str, values: Tensor, scales: Tensor, out: Tensor) -> None:
        """Copy the gradient."""
        out.copy_(values)

    def begin_sum(self, islands: int) -> None:
        """Do nothing."""

    def add(self, unit: str, parts: Sequence[Part], out: Tensor) -> None:
        """Add the gradients in the order of the parts."""
        out.copy_(parts[0].data)
        for part in parts[1:]:
            out.add_(part.data)


class Outer:
    """Outer gradients, rounded to `codec`. Their sum is the mean, weighted by the first of an island's numbers.

    Args:
        codec: bf16, int8 or int4; fp32: not rounded.
        master: dtype of the weights.
        table: all elements that this rank holds.
        owned: unit -> the parts of its shard that this rank alone counts in sums over the island.
        shapes: tensor -> its shape. All ranks number the rows of all tensors in this order.

    Attributes:
        products: inner products over the elements that this rank owns, fp64 [2 x islands + 3]: the squared norms of the
            rounding error and of this island's outer gradient before rounding, in the last offer; the squared norm of
            the mean; and for each island its outer gradient's squared norm, and its product with the mean.
    """

    def __init__(
        self,
        codec: str,
        master: torch.dtype,
        table: Table,
        owned: Mapping[str, Sequence[slice]],
        shapes: Mapping[str, Sequence[int]],
    ):
        self.dtype = sent_dtype(codec, master)
        self._levels = _LEVELS.get(self.dtype)
        self._rows: dict[str, _RowMap] = {}
        self.scales = 0
        if self._levels:
            self._rows, self.scales = _row_maps(table, shapes)
        self._error: dict[str, Tensor] = {}
        self._owned = owned
        self.products = torch.zeros(3, dtype=torch.float64)

    def scales_here(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the scales as far as this rank's elements determine them, fp32 [scales]. The largest over all ranks
        of the island are to be used.

        Args:
            values: unit -> its outer gradient, on the CPU. The error of the last time is added to it here.
        """
        self.products = torch.zeros(3, dtype=torch.float64)
        largest = np.zeros(self.scales, dtype=np.float32)
        for unit, x in values.items():
            if unit in self._error:
                x.add_(self._error[unit])
            if self._levels and x.numel():
                self._rows[unit].largest(x.float().numpy(), largest)
        return torch.from_numpy(largest) / (self._levels or 1)

    def write(self, unit: str, values: Tensor, scales: Tensor, out: Tensor) -> None:
        """Round an outer gradient, and keep the error for the next one."""
        if self.dtype == values.dtype:
            out.copy_(values)
            return
        if self._levels is None:
            out.copy_(values)
        else:
            step = self._steps(unit, scales)
            rounded = (values.float() / step).round_().clamp_(-self._levels, self._levels)
            out.copy_(rounded + (_OFFSET if self.dtype == NIBBLES else 0))
        self._error[unit] = error = values - self.read(unit, out, scales).to(values.dtype)
        self.products[0] += self._dot(unit, error, error)
        self.products[1] += self._dot(unit, values, values)

    def read(self, unit: str, data: Tensor, scales: Tensor) -> Tensor:
        """Return a unit's outer gradient as all islands read it, [numel] in fp32, or as it is without rounding."""
        if self._levels is None:
            return data.float() if data.dtype == torch.bfloat16 else data
        integers = data.float() - (_OFFSET if self.dtype == NIBBLES else 0)
        return integers.mul_(self._steps(unit, scales))

    def begin_sum(self, islands: int) -> None:
        """Begin with the products of the last offer alone."""
        self.products = torch.cat([self.products[:2], torch.zeros(1 + 2 * islands, dtype=torch.float64)])

    def add(self, unit: str, parts: Sequence[Part], out: Tensor) -> None:
        """Write the weighted mean, added in the order of the parts. It is 0 if all weights are."""
        total = sum(float(part.numbers[0]) for part in parts)
        each = [self.read(unit, part.data, part.scales).to(out.dtype) for part in parts]
        out.zero_()
        for x, part in zip(each, parts, strict=True):
            out.add_(x, alpha=float(part.numbers[0]) / (total or 1.0))
        self.products[2] += self._dot(unit, out, out)
        for i, x in enumerate(each):
            self.products[3 + 2 * i : 5 + 2 * i] += torch.stack([self._dot(unit, x, x), self._dot(unit, x, out)])

    def _dot(self, unit: str, x: Tensor, y: Tensor) -> Tensor:
        each = [torch.dot(x[span], y[span]).double() for span in self._owned[unit]]
        return torch.stack(each).sum() if each else torch.zeros((), dtype=torch.float64)

    def forget(self) -> None:
        """Drop the rounding errors: they belong to weights that this island has no more."""
        self._error.clear()

    def _steps(self, unit: str, scales: Tensor) -> Tensor:
        """Return each element's distance between two integers. Rows without any gradient have 1."""
        scales = torch.where(scales > 0, scales, torch.ones_like(scales))
        return torch.from_numpy(self._rows[unit].spread(scales.numpy()))


class _RowMap:
    """The rows of tensors that the elements of a shard are in.

    Args:
        starts: positions in the shard at which another row begins, ascending.
        rows: the number of each of these rows.
        numel: of the shard. Padding counts as part of the row before it.
    """

    def __init__(self, starts: np.ndarray, rows: np.ndarray, numel: int):
        self._starts, self._rows = starts, rows
        self._lengths = np.diff(starts, append=numel)

    def largest(self, values: np.ndarray, into: np.ndarray) -> None:
        """Raise `into` to the largest absolute value of each row."""
        np.maximum.at(into, self._rows, np.maximum.reduceat(np.abs(values), self._starts))

    def spread(self, of_rows: np.ndarray) -> np.ndarray:
        """Return each element's number, given one number for each row."""
        return np.repeat(of_rows[self._rows], self._lengths)


def _row_maps(table: Table, shapes: Mapping[str, Sequence[int]]) -> tuple[dict[str, _RowMap], int]:
    """Return the row map of each unit, and the number of rows of all tensors."""
    first, rows = {}, 0
    for tensor, shape in shapes.items():
        first[tensor] = rows
        rows += int(np.prod(shape[:-1], dtype=np.int64))
    maps = {}
    for name, unit in table.units.items():
        found = [_cuts(h, shapes[t][-1], first[t]) for t, held in unit.tensors.items() for h in held]
        if not found:
            maps[name] = _RowMap(np.zeros(1, np.int64), np.zeros(1, np.int64), unit.numel)
            continue
        starts, of_rows = (np.concatenate(x) for x in zip(*found, strict=True))
        order = np.argsort(starts, kind="stable")
        starts, of_rows = starts[order], of_rows[order]
        starts[0] = 0  # padding before the first tensor
        maps[name] = _RowMap(starts, of_rows, unit.numel)
    return maps, rows


def _cuts(held, width: int, first: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions in the shard at which a row begins, and the numbers of the rows.

    Args:
        width: elements of a row.
        first: number of the tensor's first row.
    """
    begin = held.rows.start + np.arange(held.rows.number, dtype=np.int64) * held.rows.stride  # in the tensor
    at = held.at + np.arange(held.rows.number, dtype=np.int64) * held.rows.length  # in the shard
    top = begin // width
    count = (begin + held.rows.length - 1) // width - top + 1
    run = np.repeat(np.arange(len(begin)), count)
    nth = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    row = top[run] + nth
    inside = np.maximum(row * width, begin[run]) - begin[run]
    return at[run] + inside, first + row
