"""The positions of local elements of a sharded tensor in the whole tensor, which is stored row-major."""

from collections.abc import Iterator
from typing import NamedTuple


class Run(NamedTuple):
    """`length` elements that are contiguous both in the global row-major tensor and in the local shard."""

    global_start: int
    local_start: int
    length: int


class Rows(NamedTuple):
    """`number` pieces of `length` elements of a row-major tensor. Each piece begins `stride` elements after the
    beginning of the previous one."""

    start: int
    length: int
    number: int = 1
    stride: int = 0

    @property
    def numel(self) -> int:
        return self.number * self.length

    @property
    def span(self) -> int:
        """The number of elements from the first to the last, including the elements between the pieces."""
        return (self.number - 1) * self.stride + self.length

    def chunks(self, most: int) -> Iterator["Rows"]:
        """Yield the same elements in the same order, at most `most` elements at a time."""
        if self.length <= most:
            each = most // self.length
            for i in range(0, self.number, each):
                yield self._replace(start=self.start + i * self.stride, number=min(each, self.number - i))
            return
        for begin in (self.start + i * self.stride for i in range(self.number)):
            for i in range(0, self.length, most):
                yield Rows(begin + i, min(most, self.length - i))


class Held(NamedTuple):
    """Elements of a tensor that are contiguous in a rank's memory.

    Attributes:
        at: the position of the first element in that memory.
        rows: the positions of the elements in the whole tensor.
    """

    at: int
    rows: Rows


class RowMap(NamedTuple):
    """The map from local to whole row-major offsets of a tensor with one sharded dim. In the whole tensor the local
    rows of `length` elements begin `stride` elements apart, the first one at `first`."""

    first: int
    length: int
    stride: int

    def rows(self, start: int, stop: int) -> Iterator[Rows]:
        """Yield the positions of the local elements [start, stop) in the whole tensor: the end of a row, whole rows,
        the beginning of a row."""
        if self.length == self.stride and start < stop:
            yield Rows(self.first + start, stop - start)
            return
        while start < stop:
            row, column = divmod(start, self.length)
            begin = self.first + row * self.stride + column
            if column == 0 and stop - start >= self.length:
                count = (stop - start) // self.length
                yield Rows(begin, self.length, count, self.stride)
                start += count * self.length
            else:
                n = min(self.length - column, stop - start)
                yield Rows(begin, n)
                start += n
