"""Sends the rows of tokens to their experts, and the experts' outputs back to the tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class ExpertRows(NamedTuple):
    """The rows of each expert, if rows are sorted by expert.

    Attributes:
        sizes: the number of rows of each expert, on the host.
        ends: [X], int32, on the device: one past the last row of each expert.
    """

    sizes: list[int]
    ends: Tensor

    @classmethod
    def of(cls, counts_X: Tensor, rows: int) -> "ExpertRows":
        """Copy the number of rows of each expert to the host, which waits for them. A meta tensor has no values:
        all experts then get an equal share of `rows`."""
        sizes = even_sizes(rows, len(counts_X)) if counts_X.is_meta else counts_X.tolist()
        return cls.of_sizes(sizes, counts_X)

    @classmethod
    def of_sizes(cls, sizes: list[int], counts_X: Tensor) -> "ExpertRows":
        """Build it from the same numbers on the host and on the device."""
        return cls(sizes, counts_X.cumsum(0, dtype=torch.int32))


def even_sizes(rows: int, number: int) -> list[int]:
    """Split `rows` into `number` sizes that differ by at most 1."""
    return [rows * (i + 1) // number - rows * i // number for i in range(number)]


@dataclass(eq=False)
class Part:
    """Some of the experts on this device. Their rows are sent and received together.

    Attributes:
        experts: their range among the experts on this device.
        expert_rows: the rows of each expert, in the result of `receive`.
    """

    experts: slice
    expert_rows: ExpertRows


class Exchange:
    """Moves the rows of one microbatch to the experts and back. In this class all experts are on this device, so rows
    do not move.

    Args:
        counts_X: the number of rows of each expert.
        rows: the total number of rows.

    Attributes:
        parts: the parts of the experts on this device, in order.
    """

    parts: Sequence[Part]

    def __init__(self, counts_X: Tensor, rows: int):
        self.parts = [Part(slice(None), ExpertRows.of(counts_X, rows))]

    def send(self, x_ME: Tensor) -> Sequence[Tensor]:
        """Start to send the rows of this device's tokens to the experts. Return each part's argument of `receive`."""
        return [x_ME]

    def receive(self, part: Part, sent: Tensor) -> Tensor:
        """Return the rows of the part's experts, sorted by expert: [R, E]."""
        return sent

    def send_back(self, part: Part, y_RE: Tensor) -> Tensor:
        """Start to send the experts' outputs back to the tokens. Return an entry of the argument of `to_tokens`."""
        return y_RE

    def to_tokens(self, returned: Sequence[Tensor]) -> Tensor:
        """Wait for the outputs of all parts, and return them in the order of the rows that were sent: [M, E]."""
        return returned[0]
