"""Runs of tokens of several files as one flat array, and the starts of documents in a packed sequence."""

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

_MOST_OPEN = 1024  # of the files of a `LazyFiles`: a process may have 65,530 mappings


class StoredFile:
    """A token file in an object store, little-endian. Slicing it is one request.

    Args:
        path: has `read_range(begin, end)`, in bytes.
        size: the number of tokens.
        largest: the largest id that may occur.
    """

    def __init__(self, path: Any, size: int, dtype: np.dtype, largest: int):
        self._path, self._size, self.dtype, self._largest = path, size, dtype, largest

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, key: slice) -> np.ndarray:
        """Return the tokens of a slice without a step.

        Raises:
            OSError: the file cannot be read, is too short, or holds other ids.
        """
        start, stop, _ = key.indices(self._size)
        item = self.dtype.itemsize
        content = self._path.read_range(start * item, stop * item)
        if len(content) != (stop - start) * item:
            raise OSError(errno.EIO, f"has only {start * item + len(content)} bytes", str(self._path))
        tokens = np.frombuffer(content, self.dtype)
        if len(tokens) and int(tokens.max()) > self._largest:
            raise OSError(errno.EIO, f"holds an id above {self._largest}", str(self._path))
        return tokens


class LazyFiles(Sequence[np.ndarray | StoredFile]):
    """Token files that are opened when they are first read. A limited number is open at a time.

    Args:
        sizes: the number of tokens in each file.
        open_file: returns the file with this number, [size].
        dtype: of all files.
    """

    def __init__(self, sizes: Sequence[int], open_file: Callable[[int], np.ndarray | StoredFile], dtype: np.dtype):
        self.sizes, self.dtype = sizes, dtype
        self._open_file = lru_cache(_MOST_OPEN)(open_file)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, number):
        return self._open_file(number)

    def array(self) -> "TokenArray":
        """Return the tokens of all files, one after the other."""
        starts = np.zeros(len(self), np.int64)
        return TokenArray(self, np.stack([np.arange(len(self)), starts, np.asarray(self.sizes, np.int64)]))


class TokenArray:
    """A flat read-only array of tokens, made of runs of several files. Slicing it reads from the files.

    Args:
        files: arrays of ids, [n] each, at least one; or a `LazyFiles`.
        runs: int64 [3, R]: the file of each run, its start in this file, and its length, at least 1.
        document_starts: int64 [documents], ascending: the starts of documents in this array, from the index of their
            file; None: no index is used, since a token ends each document.
    """

    def __init__(self, files: Sequence[np.ndarray], runs: np.ndarray, document_starts: np.ndarray | None = None):
        self.document_starts = document_starts
        lazy = isinstance(files, LazyFiles)
        self._files = files if lazy else [np.asarray(file) for file in files]  # indexing a memmap is slow
        self._file, self._start = runs[0], runs[1]
        self._offsets = np.concatenate([[0], np.cumsum(runs[2])])  # where each run starts in this array
        self.dtype = files.dtype if lazy else np.result_type(*self._files) if self._files else np.dtype(np.uint16)

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def __getitem__(self, key: slice) -> np.ndarray:
        """Return the tokens of a slice without a step: a view if they are in one run, else a copy."""
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
        """Return the tokens of one run that are in [start, stop) of the whole array."""
        offset, end = int(self._offsets[run]), int(self._offsets[run + 1])
        shift = int(self._start[run]) - offset
        return self._files[int(self._file[run])][max(start, offset) + shift : min(stop, end) + shift]


Tokens = np.ndarray | TokenArray  # a flat array of token ids


@dataclass(frozen=True)
class Packing:
    """Finds the documents of a packed sequence: by the array's index if it has one, else by the token that ends a
    document.

    Attributes:
        eos_id: the token that ends a document; None: every array has an index.
    """

    eos_id: int | None

    def starts(self, array: Tokens, first: int, row: np.ndarray) -> np.ndarray:
        """Return the positions in `row` at which documents start, int64 [n], without position 0.

        Args:
            row: the tokens of `array` from offset `first` on.
        """
        index = indexed_starts(array)
        if index is None:
            return self.starts_in(row)
        bounds = np.searchsorted(index, [first + 1, first + len(row)])
        return index[slice(*bounds)] - first

    def starts_in(self, row: np.ndarray) -> np.ndarray:
        """Return the result of `starts` for an array without an index: a document starts after each `eos_id`."""
        return np.flatnonzero(row[:-1] == self.eos_id) + 1


def indexed_starts(array: Tokens) -> np.ndarray | None:
    """Return `TokenArray.document_starts`; None for a plain array."""
    return array.document_starts if isinstance(array, TokenArray) else None
