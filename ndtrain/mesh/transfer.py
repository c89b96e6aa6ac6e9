"""Transfers of tensor elements from one placement to another.

A placement describes for each rank which elements of each tensor it holds, and at which positions of its memory. Both
follow from the row maps of the layouts, so any two placements can be connected: shards and one owner of the whole
tensor, or the shards of two meshes. A transfer is one exchange, with at most one message from a rank to another.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ndtrain.mesh.collectives import Pending, all_to_all_rows
from ndtrain.mesh.row_map import Held

Placement = Sequence[
    Mapping[str, Sequence[Held]]
]  # for each rank of a group: tensor -> the elements that the rank holds


class Copy(NamedTuple):
    """`number` pieces of `length` elements, at regular distances in the memory of the source and of the target."""

    source: int
    target: int
    length: int
    number: int = 1
    source_stride: int = 0
    target_stride: int = 0

    @property
    def numel(self) -> int:
        return self.number * self.length


def copies_between(source: Sequence[Held], target: Sequence[Held]) -> list[Copy]:
    """Return the copies that move the elements of a tensor that both ranks hold, in the order of the whole tensor.

    Raises:
        ValueError: an element is twice in the source, or in the target.
    """
    if len(source) == len(target) == 1 and source[0].rows.number == target[0].rows.number == 1:
        return _contiguous(source[0], target[0])  # the usual case, which needs no arrays
    from_start, from_stop, from_at = _pieces(source)
    to_start, to_stop, to_at = _pieces(target)
    if not len(from_start) or not len(to_start):
        return []
    first = np.searchsorted(from_stop, to_start, side="right")
    count = np.maximum(np.searchsorted(from_start, to_stop, side="left") - first, 0)
    t = np.repeat(np.arange(len(to_start)), count)
    s = np.arange(count.sum()) + np.repeat(first - np.cumsum(count) + count, count)
    start, stop = np.maximum(from_start[s], to_start[t]), np.minimum(from_stop[s], to_stop[t])
    return list(_regular(from_at[s] + start - from_start[s], to_at[t] + start - to_start[t], stop - start))


def _contiguous(source: Held, target: Held) -> list[Copy]:
    start = max(source.rows.start, target.rows.start)
    length = min(source.rows.start + source.rows.length, target.rows.start + target.rows.length) - start
    at = (source.at + start - source.rows.start, target.at + start - target.rows.start)
    return [Copy(*at, length)] if length > 0 else []


def _pieces(held: Sequence[Held]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the contiguous pieces of a holding in the order of the whole tensor: their starts and stops in it, and
    their positions in memory, int64 [n] each."""
    found = [np.empty((3, 0), np.int64)]
    for at, rows in held:
        index = np.arange(rows.number)
        start = rows.start + rows.stride * index
        found.append(np.stack([start, start + rows.length, at + rows.length * index]))
    pieces = np.concatenate(found, axis=1)
    start, stop, at = pieces[:, np.argsort(pieces[0], kind="stable")]
    if (start[1:] < stop[:-1]).any():
        raise ValueError("an element occurs twice")
    return start, stop, at


def _regular(source: np.ndarray, target: np.ndarray, length: np.ndarray) -> Iterator[Copy]:
    """Yield the pieces as copies. Neighbours at regular distances become one copy."""
    steps = np.stack([np.diff(source), np.diff(target), np.diff(length)], axis=1)
    breaks = np.flatnonzero((steps[1:] != steps[:-1]).any(axis=1))  # k: the steps k and k + 1 differ
    at, count = 0, len(source)
    while at < count:
        last = at
        if at + 1 < count and not steps[at, 2] and (steps[at] >= 0).all():
            next_break = int(np.searchsorted(breaks, at))
            last = int(breaks[next_break]) + 1 if next_break < len(breaks) else count - 1
        number = last - at + 1
        strides = (int(steps[at, 0]), int(steps[at, 1])) if number > 1 else (0, 0)
        yield Copy(int(source[at]), int(target[at]), int(length[at]), number, *strides)
        at = last + 1


class _Message(NamedTuple):
    """The elements that one rank sends to another: for each tensor its copies, in order."""

    parts: tuple[tuple[str, tuple[Copy, ...]], ...]

    @property
    def numel(self) -> int:
        return sum(copy.numel for _, copies in self.parts for copy in copies)


class Transfer:
    """A transfer of tensors over a process group, from one placement to another. Every rank of the group creates it
    with the same placements, and starts it at the same point of its program.

    Args:
        group: the ranks; None: there is one rank.
        position: this rank's position in the group.
        source: a placement that holds each element of a tensor once.
        target: a placement in which any number of ranks may hold an element.
        memory: the dtype and device of the memory.
        width: the number of tensors that are moved for each name. They have the same placement.

    Raises:
        ValueError: an element of the target is not in the source, or is there twice.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        position: int,
        source: Placement,
        target: Placement,
        memory: tuple[torch.dtype, torch.device],
        width: int = 1,
    ):
        self._group, self._memory, self._width = group, memory, width
        self._sends = [_message(source[position], there) for there in target]
        self._receives = [_message(there, target[position]) for there in source]
        self._total = sum(held.rows.numel for of_rank in target for pieces in of_rank.values() for held in pieces)
        _check_complete(self._receives, target[position])

    def start(self, given: Mapping[str, Sequence[Tensor]], taken: Mapping[str, Sequence[Tensor]]) -> "Arriving":
        """Start to send. `Arriving.wait` fills the tensors in `taken`.

        Args:
            given: tensor -> this rank's memory as the source describes it, [width] flat tensors.
            taken: tensor -> this rank's memory as the target describes it, [width] flat tensors.
        """
        sends = [self._pack(message, given) for message in self._sends]
        if self._group is None:
            return Arriving(Pending(()), self._receives, sends, taken)
        receives = [self._empty(message) for message in self._receives]
        nbytes = self._total * self._width * self._memory[0].itemsize
        return Arriving(all_to_all_rows(sends, receives, self._group, nbytes), self._receives, receives, taken)

    def _empty(self, message: _Message) -> Tensor:
        dtype, device = self._memory
        return torch.empty(self._width * message.numel, dtype=dtype, device=device)

    def _pack(self, message: _Message, given: Mapping[str, Sequence[Tensor]]) -> Tensor:
        data, at = self._empty(message), 0
        for name, copies in message.parts:
            for buffer in given[name]:
                for copy in copies:
                    piece = data[at : at + copy.numel].view(copy.number, copy.length)
                    piece.copy_(strided_view(buffer, copy.source, copy.source_stride, copy))
                    at += copy.numel
        return data


class Arriving:
    """The messages of a transfer that is in progress."""

    def __init__(
        self,
        work: Pending,
        messages: Sequence[_Message],
        data: Sequence[Tensor],
        taken: Mapping[str, Sequence[Tensor]],
    ):
        self._work, self._messages, self._data, self._taken = work, messages, data, taken

    def wait(self) -> None:
        """Wait for the messages and copy them into the tensors in `taken`."""
        self._work.wait()
        for message, data in zip(self._messages, self._data, strict=True):
            at = 0
            for name, copies in message.parts:
                for buffer in self._taken[name]:
                    for copy in copies:
                        piece = data[at : at + copy.numel].view(copy.number, copy.length)
                        strided_view(buffer, copy.target, copy.target_stride, copy).copy_(piece)
                        at += copy.numel


def _message(source: Mapping[str, Sequence[Held]], target: Mapping[str, Sequence[Held]]) -> _Message:
    parts = ((name, tuple(copies_between(held, target[name]))) for name, held in source.items() if name in target)
    return _Message(tuple((name, copies) for name, copies in parts if copies))


def _check_complete(receives: Sequence[_Message], target: Mapping[str, Sequence[Held]]) -> None:
    coming: dict[str, int] = dict.fromkeys(target, 0)
    for message in receives:
        for name, copies in message.parts:
            coming[name] += sum(copy.numel for copy in copies)
    for name, held in target.items():
        wanted = sum(h.rows.numel for h in held)
        if coming[name] != wanted:
            raise ValueError(f"{name}: {wanted} elements are needed, but the source has {coming[name]}")


def strided_view(buffer: Tensor, start: int, stride: int, copy: Copy) -> Tensor:
    """Return the pieces of a copy in a flat buffer as a view [number, length]."""
    size, strides = (copy.number, copy.length), (stride, 1)
    return buffer.as_strided(size, strides, buffer.storage_offset() + start)
