"""Where the local elements of a sharded tensor stand in the whole one, which is stored row-major."""

from collections.abc import Iterator
from typing import NamedTuple


class Run(NamedTuple):
    """`length` elements that are contiguous both in the global row-major tensor and in the local shard."""

    global_start: int
    local_start: int
    length: int


class Rows(NamedTuple):
    """`number` pieces of `length` elements of a row-major tensor, each beginning `stride` elements behind the last."""

    start: int
    length: int
    number: int = 1
    stride: int = 0

    @property
    def numel(self) -> int:
        return self.number * self.length

    @property
    def span(self) -> int:
        """Elements from the first to the last, those between the pieces included."""
        return (self.number - 1) * self.stride + self.length

    def chunks(self, most: int) -> Iterator["Rows"]:
        """The same elements in the same order, at most `most` at a time."""
        if self.length <= most:
            each = most // self.length
            for i in range(0, self.number, each):
                yield self._replace(start=self.start + i * self.stride, number=min(each, self.number - i))
            return
        for begin in (self.start + i * self.stride for i in range(self.number)):
            for i in range(0, self.length, most):
                yield Rows(begin + i, min(most, self.length - i))


class Held(NamedTuple):
    """Elements of a tensor that lie one behind the other in a rank's memory.

    Attributes:
        at: where the first one lies.
        rows: their positions in the whole tensor.
    """

    at: int
    rows: Rows


class RowMap(NamedTuple):
    """The map from local to whole row-major offsets of a tensor of which one dim is sharded: local rows of `length`
    elements stand `stride` elements apart, the first one at `first`."""

    first: int
    length: int
    stride: int

    def rows(self, start: int, stop: int) -> Iterator[Rows]:
        """The local elements [start, stop) in the whole tensor: the end of a row, whole rows, the beginning of one."""
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
