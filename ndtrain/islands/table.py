"""Tables of the elements that a rank holds, and selections of elements that are sent between two ranks."""

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ndtrain.checkpoint.elements import shard_rows
from ndtrain.islands.wire import Connection
from ndtrain.mesh.row_map import Held, Rows
from ndtrain.parallel.stages import Stages

MOST_NUMEL = 1 << 48  # elements of a tensor
MOST_PIECES = 1 << 24  # of one record of a table, and bytes of the arrays that are made of it
MOST_TEXT = 1000  # characters of a name
MOST_TABLE = 64 << 20  # bytes of a table or a selection as JSON
STAGING = 1 << 20  # bytes that are packed at one time: they stay in the cache between two copies
DIRECT = 1 << 16  # bytes of a contiguous run that is sent or received without a copy
NIBBLES = torch.uint8  # the dtype of integers of 4 bits, of which two are sent in one byte
_DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8, NIBBLES)
}


def element_bytes(dtype: torch.dtype) -> float:
    """Return the bytes of an element on the wire."""
    return 0.5 if dtype == NIBBLES else float(dtype.itemsize)


Buffers = Mapping[str, torch.dtype]  # the name of a buffer -> its dtype


class UnitTable(NamedTuple):
    """The elements of one unit on a rank.

    Attributes:
        numel: the number of elements of the rank's shard, padding included.
        tensors: tensor -> its elements; `Held.at` is a position in the shard.
    """

    numel: int
    tensors: dict[str, tuple[Held, ...]]


@dataclass(frozen=True)
class Table:
    """The elements that a rank holds or serves, and the buffers that it has of them.

    Attributes:
        units: unit name -> its elements.
        buffers: "grad", "sum" or "state" -> the buffers that are read together.
    """

    units: dict[str, UnitTable]
    buffers: dict[str, dict[str, torch.dtype]]

    @classmethod
    def of(cls, stages: Stages, owned_only: bool, buffers: Mapping[str, Buffers]) -> "Table":
        """Return the table of this rank's shards.

        Args:
            owned_only: as in `shard_rows`: True for what a rank serves, False for what it needs.
        """
        found: dict[str, dict[str, list[Held]]] = {name: {} for name in stages.units.units}
        for unit, tensor, at, rows in shard_rows(stages, owned_only):
            found[unit.name].setdefault(tensor, []).append(Held(at, rows))
        units = {}
        for name, unit in stages.units.units.items():
            start, stop = unit.layout.own
            units[name] = UnitTable(stop - start, {tensor: tuple(held) for tensor, held in found[name].items()})
        return cls(units, {what: dict(named) for what, named in buffers.items()})

    def to_json(self) -> dict[str, Any]:
        """Return the table as JSON."""
        listed = lambda tensors: {name: [[at, *rows] for at, rows in held] for name, held in tensors.items()}
        units = {name: {"numel": unit.numel, "tensors": listed(unit.tensors)} for name, unit in self.units.items()}
        named = lambda buffers: {name: str(dtype).removeprefix("torch.") for name, dtype in buffers.items()}
        return {"units": units, "buffers": {what: named(buffers) for what, buffers in self.buffers.items()}}

    @classmethod
    def from_json(cls, data: Any) -> "Table":
        """Return the table that `to_json` has described.

        Raises:
            ValueError: the data has another form, or a number in it is out of bounds.
        """
        match data:
            case {"units": dict(units), "buffers": dict(buffers), **rest} if not rest:
                made = {text_of(name): _unit_of(unit) for name, unit in units.items()}
                return cls(made, {text_of(what): _buffers_of(named) for what, named in buffers.items()})
        raise ValueError("not a table of a rank's elements")


def _unit_of(data: Any) -> UnitTable:
    match data:
        case {"numel": numel, "tensors": dict(tensors), **rest} if not rest:
            numel = count_of(numel)
            made = {text_of(name): tuple(map(_held_of, _list_of(held))) for name, held in tensors.items()}
            spans = sorted((h.at, h.at + h.rows.numel) for held in made.values() for h in held)
            if any(a[1] > b[0] for a, b in pairwise(spans)) or (spans and spans[-1][1] > numel):
                raise ValueError("elements of a unit overlap, or are outside of its shard")
            return UnitTable(numel, made)
    raise ValueError("not a unit of a table")


def _held_of(data: Any) -> Held:
    match data:
        case [at, *rows]:
            return Held(count_of(at), rows_of(rows, MOST_NUMEL))
    raise ValueError("not a record of a table")


def _buffers_of(data: Any) -> dict[str, torch.dtype]:
    if isinstance(data, dict) and all(isinstance(dtype, str) and dtype in _DTYPES for dtype in data.values()):
        return {text_of(name): _DTYPES[dtype] for name, dtype in data.items()}
    raise ValueError("not the buffers of a table")


def rows_of(data: Any, size: int) -> Rows:
    """Return the rows in a list [start, length, number, stride]. They do not overlap.

    Args:
        size: the number of elements of the tensor or the shard that they are in.

    Raises:
        ValueError: the data has another form, or an element is not in [0, size).
    """
    match data:
        case [start, length, number, stride]:
            rows = Rows(*map(count_of, (start, length, number, stride)))
            regular = rows.length > 0 and 0 < rows.number <= MOST_PIECES
            if regular and (rows.number == 1 or rows.stride >= rows.length) and rows.start + rows.span <= size:
                return rows
    raise ValueError("not rows of a tensor")


def count_of(data: Any) -> int:
    """Return a number that is a count of elements, steps or epochs.

    Raises:
        ValueError: it is none.
    """
    if isinstance(data, int) and not isinstance(data, bool) and 0 <= data <= MOST_NUMEL:
        return data
    raise ValueError("not a count")


def text_of(data: Any) -> str:
    """Return a short text.

    Raises:
        ValueError: it is none.
    """
    if isinstance(data, str) and len(data) <= MOST_TEXT:
        return data
    raise ValueError("not a short text")


def _list_of(data: Any) -> list[Any]:
    if isinstance(data, list):
        return data
    raise ValueError("not a list")


# ----------------------------------------------------------------------------------------------------- selections


class _Piece(NamedTuple):
    """Elements that are sent with one call: a contiguous run, or some rows that are packed first."""

    rows: tuple[Rows, ...]
    numel: int
    direct: bool


_Copy = tuple[np.ndarray, np.ndarray]  # rows in a buffer, and the same rows in the packed memory


class Staging:
    """The memory in which one connection packs elements."""

    def __init__(self) -> None:
        self._bytes = np.empty(STAGING, dtype=np.uint8)

    def like(self, array: np.ndarray, numel: int) -> np.ndarray:
        """Return the memory of `numel` elements of an array's dtype."""
        return self._bytes[: numel * array.itemsize].view(array.dtype)


class Selection:
    """Elements of a flat buffer, in the order in which they are sent. Both sides of a connection have one.

    Args:
        rows: their positions in the buffer.
        itemsize: the most bytes of an element.
    """

    def __init__(self, rows: Iterable[Rows], itemsize: int = 8):
        self.rows = joined(rows)
        self.numel = sum(r.numel for r in self.rows)
        self._pieces = list(_pieces(self.rows, itemsize))

    def nbytes(self, dtype: torch.dtype) -> int:
        """Return the bytes in which the elements of a buffer are sent."""
        return math.ceil(self.numel * element_bytes(dtype))

    def send(self, connection: Connection, buffer: Tensor, staging: Staging) -> None:
        """Send the elements. NumPy copies them with this thread alone: PyTorch would start threads for each thread."""
        if buffer.dtype == NIBBLES:
            for integers, copies in self._blocks(buffer, staging):
                for view, part in copies:
                    part[:] = view
                connection.send_bytes(pack_nibbles(integers).data)
            return
        for memory, copies in self._parts(buffer, staging):
            for view, part in copies:
                part[:] = view
            connection.send_bytes(memory)

    def receive(self, connection: Connection, buffer: Tensor, staging: Staging) -> None:
        """Receive the elements into a buffer."""
        if buffer.dtype == NIBBLES:
            for integers, copies in self._blocks(buffer, staging):
                packed = np.empty(-(-integers.size // 2), dtype=np.uint8)
                connection.receive_into(packed.data)
                integers[:] = unpack_nibbles(packed)[: integers.size]
                for view, part in copies:
                    view[:] = part
            return
        for memory, copies in self._parts(buffer, staging):
            connection.receive_into(memory)
            for view, part in copies:
                view[:] = part

    def _blocks(self, buffer: Tensor, staging: Staging) -> Iterator[tuple[np.ndarray, Iterator[_Copy]]]:
        """Yield the memory of equal numbers of elements, and the copies between it and the buffer.

        Two elements of 4 bits share a byte, so both sides have to cut the elements at the same places.
        """
        array = _array(buffer)
        for rows in _equal_blocks(self.rows, STAGING):
            piece = _Piece(tuple(rows), sum(r.numel for r in rows), False)
            packed = staging.like(array, piece.numel)
            yield packed, _views(array, piece, packed)

    def _parts(self, buffer: Tensor, staging: Staging) -> Iterator[tuple[memoryview, Iterator[_Copy]]]:
        """Yield the memory that is sent with each call, and the copies between it and the buffer.

        There are no copies if it is the memory of the buffer itself.
        """
        array = _array(buffer)
        for piece in self._pieces:
            if piece.direct:
                (run,) = piece.rows
                yield array[run.start : run.start + run.length].data, iter(())
            else:
                packed = staging.like(array, piece.numel)
                yield packed.data, _views(array, piece, packed)


def joined(found: Iterable[Rows]) -> list[Rows]:
    """Return the same elements in the same order. Contiguous neighbours become one run."""
    out: list[Rows] = []
    for rows in found:
        run = Rows(rows.start, rows.numel) if rows.number == 1 or rows.stride == rows.length else rows
        last = out[-1] if out else None
        if last and last.number == run.number == 1 and last.start + last.length == run.start:
            out[-1] = Rows(last.start, last.length + run.length)
        else:
            out.append(run)
    return out


def _pieces(found: Collection[Rows], itemsize: int) -> Iterator[_Piece]:
    most, direct = STAGING // itemsize, DIRECT // itemsize
    rows: list[Rows] = []
    numel = 0
    for whole in found:
        is_direct = whole.number == 1 and (whole.length >= direct or len(found) == 1)
        for part in (whole,) if is_direct else whole.chunks(most):
            if rows and (is_direct or numel + part.numel > most):
                yield _Piece(tuple(rows), numel, False)
                rows, numel = [], 0
            if is_direct:
                yield _Piece((part,), part.numel, True)
            else:
                rows.append(part)
                numel += part.numel
    if rows:
        yield _Piece(tuple(rows), numel, False)


def _equal_blocks(found: Iterable[Rows], size: int) -> Iterator[list[Rows]]:
    """Yield the same elements in the same order, `size` elements at a time."""
    block, room, left = list[Rows](), size, deque(found)
    while left:
        rows = left.popleft()
        if rows.numel > room:
            rows, *rest = _cut(rows, room)
            left.extendleft(reversed(rest))
        block.append(rows)
        room -= rows.numel
        if not room:
            yield block
            block, room = [], size
    if block:
        yield block


def _cut(rows: Rows, most: int) -> Iterator[Rows]:
    """Yield the same elements in the same order: first at most `most` of them, then the others."""
    start, length, number, stride = rows
    whole = most // length
    if whole:
        yield Rows(start, length, whole, stride)
        yield Rows(start + whole * stride, length, number - whole, stride)
    else:
        yield Rows(start, most)
        yield Rows(start + most, length - most)
        if number > 1:
            yield Rows(start + stride, length, number - 1, stride)


def _array(buffer: Tensor) -> np.ndarray:
    """Return the memory of a flat tensor as unsigned integers of the same size: NumPy has no bf16."""
    return buffer.view(torch.uint8).numpy().view(f"u{buffer.element_size()}")


def _views(array: np.ndarray, piece: _Piece, packed: np.ndarray) -> Iterator[_Copy]:
    """Yield each of a piece's rows in the buffer and in the packed memory, both [number, length]."""
    at, size = 0, array.itemsize
    for rows in piece.rows:
        shape, strides = (rows.number, rows.length), (rows.stride * size, size)
        yield (
            np.ndarray(shape, array.dtype, array, rows.start * size, strides),
            packed[at : at + rows.numel].reshape(shape),
        )
        at += rows.numel


def pack_nibbles(integers: np.ndarray) -> np.ndarray:
    """Return integers of 4 bits with two in each byte: the first in its lower half."""
    flat = integers.reshape(-1)
    packed = flat[0::2].copy()
    packed[: flat.size // 2] |= flat[1::2] << 4
    return packed


def unpack_nibbles(packed: np.ndarray) -> np.ndarray:
    """Return the integers of `pack_nibbles`, and one more if their number is odd."""
    return np.stack([packed & 15, packed >> 4], axis=1).reshape(-1)
