"""Rows of tokens on their way to the experts and back."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class ExpertRows(NamedTuple):
    """Which rows each expert has, where rows are sorted by expert.

    Attributes:
        sizes: the number of rows of each expert, on the host.
        ends: [X], int32: one past the last row of each expert, on the device.
    """

    sizes: list[int]
    ends: Tensor

    @classmethod
    def of(cls, counts_X: Tensor, rows: int) -> "ExpertRows":
        """From the number of rows of each expert, which the host waits for. A tensor without memory has no counts: all
        experts then have equally many rows."""
        number = len(counts_X)
        even = [rows * (i + 1) // number - rows * i // number for i in range(number)] if counts_X.is_meta else None
        return cls.of_sizes(even or counts_X.tolist(), counts_X)

    @classmethod
    def of_sizes(cls, sizes: list[int], counts_X: Tensor) -> "ExpertRows":
        """From the same numbers on the host and on the device."""
        return cls(sizes, counts_X.cumsum(0, dtype=torch.int32))


class Part:
    """Some of the experts that are here, whose rows come and go together.

    Args:
        experts: which of them, in order.
        expert_rows: of the rows that `receive` returns.
    """

    def __init__(self, experts: slice, expert_rows: ExpertRows):
        self.experts, self.expert_rows = experts, expert_rows

    def receive(self, sent: Tensor) -> Tensor:
        """The rows of these experts, sorted by expert."""
        return sent

    def send_back(self, y_RE: Tensor) -> Tensor:
        """Starts to send their outputs to the tokens. Returns one of what `to_tokens` takes."""
        return y_RE


class Exchange:
    """Where the rows of one microbatch go. All experts are here, and rows stay where they are.

    Args:
        counts_X: the number of rows of each expert.
        rows: the number of all rows.

    Attributes:
        parts: of the experts that are here, in order.
    """

    parts: Sequence[Part]

    def __init__(self, counts_X: Tensor, rows: int):
        self.parts = [Part(slice(None), ExpertRows.of(counts_X, rows))]

    def send(self, x_ME: Tensor) -> Sequence[Tensor]:
        """Starts to send the rows of the tokens that are here to the experts. Returns what each part receives."""
        return [x_ME]

    def to_tokens(self, returned: Sequence[Tensor]) -> Tensor:
        """The outputs of all parts, back as they were sent: [M, E]. They are waited for."""
        return returned[0]
