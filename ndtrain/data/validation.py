"""The validation split as a set of sequences. Each of its tokens is predicted once."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ndtrain.data.batches import Batch
from ndtrain.data.token_array import Packing, Tokens
from ndtrain.model.vocabulary import IGNORE


class ValidationSet:
    """Flat token arrays divided into sequences, in order.

    `IGNORE` pads the last sequence of each array and the last rows of the last pass: these labels are not predicted.
    An embedding cannot look `IGNORE` up, so `readable` replaces it among the input tokens.

    Attributes:
        count: the number of sequences.
        passes: the number of passes of `global_batch` sequences.
    """

    def __init__(self, arrays: Sequence[Tokens], seq_len: int, global_batch: int):
        self._seq_len, self._global_batch = seq_len, global_batch
        self._starts = [(a, start) for a in arrays for start in range(0, max(0, len(a) - 1), seq_len)]
        self.count = len(self._starts)
        self.passes = -(-self.count // global_batch)

    def tokens(self, step: int, rows: Sequence[int]) -> np.ndarray:
        """Return the tokens of rows `rows` of pass `step`, padded with `IGNORE`, int64 [len(rows), T + 1]."""
        out = np.full((len(rows), self._seq_len + 1), IGNORE, np.int64)
        for target, row in zip(out, rows, strict=True):
            number = step * self._global_batch + row
            if number < self.count:
                array, start = self._starts[number]
                sequence = array[start : start + self._seq_len + 1]
                target[: len(sequence)] = sequence
        return out

    def document_starts(self, step: int, rows: Sequence[int], tokens: np.ndarray, packing: Packing) -> list[np.ndarray]:
        """Return for each row the positions in its `tokens` at which documents start, without position 0."""
        numbers = [step * self._global_batch + row for row in rows]
        return [self._row_starts(n, row, packing) for n, row in zip(numbers, tokens, strict=True)]

    def columns(self, step: int, rows: Sequence[int]) -> Mapping[str, np.ndarray]:
        """Return no columns: every token except the padding is predicted."""
        return {}

    def _row_starts(self, number: int, row: np.ndarray, packing: Packing) -> np.ndarray:
        return packing.starts(*self._starts[number], row) if number < self.count else np.empty(0, np.int64)

    @staticmethod
    def readable(batch: Batch) -> Batch:
        """Return the batch with the padding of its input tokens replaced by 0."""
        return replace(batch, tokens=batch.tokens.clamp(min=0))
