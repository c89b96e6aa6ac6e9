"""Runs of tokens of several files as one flat array."""

from collections.abc import Sequence

import numpy as np


class TokenArray:
    """Runs of tokens, one after the other, as one flat read-only array. A slice is read from the files when asked for.

    Args:
        files: arrays of ids, [n] each.
        runs: int64 [3, R]: the file that each run lies in, where it starts there, and its length, at least 1.
    """

    def __init__(self, files: Sequence[np.ndarray], runs: np.ndarray):
        self._files = [np.asarray(file) for file in files]  # indexing a memmap is slow
        self._file, self._start = runs[0], runs[1]
        self._offsets = np.concatenate([[0], np.cumsum(runs[2])])  # where each run starts here
        self.dtype = np.result_type(*self._files) if self._files else np.dtype(np.uint16)

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def __getitem__(self, key: slice) -> np.ndarray:
        """Returns the tokens of a slice without a step: a view where they lie in one run, else a copy."""
        start, stop, step = key.indices(len(self))
        if step != 1:
            raise ValueError(f"a slice with step {step}: tokens are read in order")
        if stop <= start:
            return np.empty(0, self.dtype)
        first = int(np.searchsorted(self._offsets, start, side="right")) - 1
        last = int(np.searchsorted(self._offsets, stop, side="left"))
        pieces = [self._piece(run, start, stop) for run in range(first, last)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _piece(self, run: int, start: int, stop: int) -> np.ndarray:
        """Returns those tokens of one run that lie in [start, stop) of the whole."""
        offset, end = int(self._offsets[run]), int(self._offsets[run + 1])
        shift = int(self._start[run]) - offset
        return self._files[int(self._file[run])][max(start, offset) + shift : min(stop, end) + shift]


Tokens = np.ndarray | TokenArray  # a flat array of token ids
