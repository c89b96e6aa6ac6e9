"""The held-out split as a set of sequences, each of its tokens predicted once."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ndtrain.data.batches import Batch
from ndtrain.model.loss import IGNORE


class ValidationSet:
    """Flat token arrays cut into sequences, in order. The last sequence of each, and the last rows of the last pass,
    are filled up with `IGNORE`, which is no token to predict; `readable` makes it one that can be looked up.

    Attributes:
        count: sequences.
        passes: of `global_batch` sequences.
    """

    def __init__(self, arrays: Sequence[np.ndarray], seq_len: int, global_batch: int):
        self._arrays, self._seq_len, self._global_batch = arrays, seq_len, global_batch
        self._places = [(a, start) for a in arrays for start in range(0, max(0, len(a) - 1), seq_len)]
        self.count = len(self._places)
        self.passes = -(-self.count // global_batch)

    def tokens(self, step: int, rows: Sequence[int]) -> np.ndarray:
        """int64 [len(rows), T + 1]: the tokens of those rows of a pass."""
        out = np.full((len(rows), self._seq_len + 1), IGNORE, np.int64)
        for target, row in zip(out, rows, strict=True):
            number = step * self._global_batch + row
            if number < self.count:
                array, start = self._places[number]
                found = array[start : start + self._seq_len + 1]
                target[: len(found)] = found
        return out

    @staticmethod
    def readable(batch: Batch) -> Batch:
        return replace(batch, tokens=batch.tokens.clamp(min=0))

    def labels(self, eos: int | None) -> int:
        """How many tokens are predicted: all but the first of each array and, where `eos` tells documents apart, those
        that follow one."""
        crossing = 0 if eos is None else sum(int((a[:-1] == eos).sum()) for a in self._arrays)
        return sum(max(0, len(a) - 1) for a in self._arrays) - crossing
