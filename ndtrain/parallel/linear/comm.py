"""The communication around a matmul. On one device it moves nothing; `parallel/tp.py` has the others.

Shape legend: N tokens, I in, O out.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Rows = slice


class Gathered:
    """Rows [N, I] that are gathered, or still being received. `rows` waits for the rows that it returns.

    Attributes:
        order: slices of the rows in the order they arrive.
    """

    def __init__(self, x_NI: Tensor):
        self._x_NI = x_NI
        self.order: list[Rows] = [slice(0, x_NI.shape[0])]

    def rows(self, wanted: Rows) -> Tensor:
        """Return the `wanted` rows. Wait until they are received."""
        return self._x_NI if wanted is self.order[0] else self._x_NI[wanted]  # a slice of a tensor costs microseconds

    def all(self) -> Tensor:
        return self._x_NI


class StreamComm:
    """The communication between the residual stream's tokens and a matmul's tokens. This class moves nothing: both are
    the same.

    Attributes:
        sums_in_place: True if `reduce` writes into the tensor that `produce` returns.
    """

    sums_in_place = False

    def gather(self, x: Tensor) -> Gathered:
        """Gather the matmul's tokens from the residual stream's tokens. In the backward it gathers their gradients."""
        return Gathered(x)

    def reduce(self, produce: Callable[[Rows], Tensor], order: Sequence[Rows]) -> Callable[[], Tensor]:
        """Sum the matmul's outputs over the ranks into the residual stream's tokens. `produce` computes this rank's
        share of the sum slice by slice, preferably in `order`. Return a function that waits for the tokens."""
        if len(order) == 1:
            y_NO = produce(order[0])
            return lambda: y_NO
        parts = sorted(((rows.start, produce(rows)) for rows in order), key=lambda part: part[0])
        y_NO = torch.cat([y for _, y in parts])
        return lambda: y_NO


NO_COMM = StreamComm()


class LinearComm(NamedTuple):
    """The communication of a weight's matmul, before it and after it."""

    gather_input: StreamComm = NO_COMM
    reduce_output: StreamComm = NO_COMM
