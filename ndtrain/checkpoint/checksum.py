"""Checksums of tensors that many ranks hold in parts."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ndtrain.checkpoint.safetensors_io import bytes_of
from ndtrain.mesh.row_map import Rows

_WORD = 8  # bytes
_COLUMNS = 1024


def checksum(data: Tensor, rows: Rows) -> Tensor:
    """Compute the checksum of some of a tensor's elements: two sums modulo 2^64, int64 [2].

    Let w_i be the tensor's bytes as little-endian 64-bit words, where missing elements count as zeros. The sums are
    sum w_i and sum w_i * (i + 1). Sums of parts add up to the sum of the whole, so owners add their sums without
    reading the file again.

    The first sum reveals a changed word. The second one reveals swapped words, unless their difference times their
    distance is a multiple of 2^64.

    Args:
        data: [rows.numel], contiguous, on the CPU.
    """
    per = _WORD // data.element_size()
    if rows.number == 1:
        pairs = list(_of_piece(data, rows.start, per))
    elif any(x % per for x in (rows.start, rows.length, rows.stride)):  # pieces begin or end in the middle of a word
        pieces = enumerate(data.view(rows.number, rows.length))
        pairs = [sums for i, p in pieces for sums in _of_piece(p, rows.start + i * rows.stride, per)]
    else:
        words = bytes_of(data).view(np.uint64).reshape(rows.number, -1)
        pairs = [_of_matrix(words, rows.start // per, rows.stride // per)]
    total = [sum(column) % 2**64 for column in zip(*pairs, strict=True)]
    return torch.from_numpy(np.array(total, np.uint64).view(np.int64))


def as_words(total: Tensor) -> list[str]:
    """Return both sums as state.json holds them: 16 hexadecimal digits each."""
    return [f"{x & (2**64 - 1):016x}" for x in total.tolist()]


def _of_piece(data: Tensor, start: int, per: int) -> Iterator[tuple[int, int]]:
    """Yield both sums of consecutive elements, in parts. A word has `per` elements."""
    lead = start % per
    if lead or data.numel() % per:
        padded = data.new_zeros(-(-(lead + data.numel()) // per) * per)
        padded[lead : lead + data.numel()] = data
        data = padded
    words, first = bytes_of(data).view(np.uint64), start // per
    whole = words.size // _COLUMNS * _COLUMNS
    if whole:
        yield _of_matrix(words[:whole].reshape(-1, _COLUMNS), first, _COLUMNS)
    if whole < words.size:
        yield _of_matrix(words[whole:].reshape(1, -1), first + whole, 0)


def _of_matrix(words: np.ndarray, first: int, stride: int) -> tuple[int, int]:
    """Return both sums of a matrix, where row r and column c hold word first + r * stride + c of the tensor.

    The second sum is computed from the row sums and column sums: one multiplication per row and column, not per word.
    """
    by_row, by_column = words.sum(axis=1), words.sum(axis=0)
    of_row = np.arange(by_row.size, dtype=np.uint64) * np.uint64(stride)
    of_column = np.arange(first + 1, first + 1 + by_column.size, dtype=np.uint64)
    return int(by_row.sum()), int(by_row.dot(of_row)) + int(by_column.dot(of_column))
