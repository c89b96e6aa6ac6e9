"""Runs of tokens of several files as one flat array, and where the documents of a packed sequence start."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


class TokenArray:
    """Runs of tokens, one after the other, as one flat read-only array. A slice is read from the files when asked for.

    Args:
        files: arrays of ids, [n] each.
        runs: int64 [3, R]: the file that each run lies in, where it starts there, and its length, at least 1.
        document_starts: int64 [documents], ascending: where in this array documents start, as the index of their file
            says; None: no index is needed, since a token ends each document.
    """

    def __init__(self, files: Sequence[np.ndarray], runs: np.ndarray, document_starts: np.ndarray | None = None):
        self.document_starts = document_starts
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


@dataclass(frozen=True)
class Packing:
    """How the documents of a packed sequence are told apart, in token arrays that have no index of their documents.

    Attributes:
        eos_id: the token that ends a document; None: every array has an index.
    """

    eos_id: int | None

    def starts(self, array: Tokens, first: int, row: np.ndarray) -> np.ndarray:
        """Returns int64 [n]: where documents start among the tokens `row` of the array from `first` on, but for the
        first of them."""
        index = indexed_starts(array)
        if index is None:
            return self.starts_in(row)
        bounds = np.searchsorted(index, [first + 1, first + len(row)])
        return index[slice(*bounds)] - first

    def starts_in(self, row: np.ndarray) -> np.ndarray:
        """As `starts`, for tokens of an array without an index: a document starts after each `eos_id`."""
        return np.flatnonzero(row[:-1] == self.eos_id) + 1


def indexed_starts(array: Tokens) -> np.ndarray | None:
    """Returns `TokenArray.document_starts`; None for another array."""
    return array.document_starts if isinstance(array, TokenArray) else None
