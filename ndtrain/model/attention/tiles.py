"""Tiles: the rectangles of the score matrix that contain visible pairs of a query and a key. Only these are computed.

A query sees a key of its own document unless the key comes after it. With a window, the key must also be less than
`window` tokens before the query. Queries and keys are given as slices of the sequence. The same function therefore
serves a whole sequence on one device and any two shards of it. For two slices with the same stride, query i sees the
band of keys j with `low <= j - i <= high`. Both i and j count from the start of the rectangle.
"""

from collections.abc import Iterator, Sequence
from enum import Enum
from functools import lru_cache
from itertools import combinations, pairwise
from typing import NamedTuple

import numpy as np


class SequenceSlice(NamedTuple):
    """A strided range of a sequence. Local token start + i is the global token first + i * stride, for i < count."""

    start: int
    count: int
    first: int
    stride: int


Documents = tuple[tuple[int, ...], ...] | None
Slices = tuple[SequenceSlice, ...]
Rectangle = tuple[int, int, int, int]  # first query, end, first key, end

BLOCK = (512, 1024)  # largest (queries, keys) of a tile whose mask or scores are materialised


class Kind(Enum):
    FULL = "every query sees every key"
    CAUSAL = "square; query i sees keys 0 to i"
    BAND = "every query sees some keys, a mask says which"


class Tile(NamedTuple):
    """A rectangle of scores. Every query in it sees at least one key.

    Attributes:
        rows: rows of the batch.
        q, k: local tokens of the queries and the keys.
        low, high: query i sees key j if and only if low <= j - i <= high. Both count from 0 in the tile.
        distance: position of the first query in the sequence minus position of the first key.
        stride: stride of the queries and the keys.
        start: position of the first query. Like `distance` and `stride` it is valid only for tiles made with `block`.
        first: whether no earlier tile of the list has any of its queries.
    """

    rows: slice
    q: slice
    k: slice
    kind: Kind
    low: int
    high: int
    distance: int
    stride: int
    start: int
    first: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.q.stop - self.q.start, self.k.stop - self.k.start


@lru_cache(maxsize=1024)
def tiles(
    queries: Slices,
    keys: Slices,
    length: int,
    documents: Documents = None,
    window: int | None = None,
    block: tuple[int, int] | None = None,
) -> tuple[Tile, ...]:
    """Return tiles that together contain each visible pair of a query and a key exactly once.

    Args:
        queries, keys: slices of a sequence of `length` tokens, all with the same stride.
        documents: for each row of the batch, the starts of its documents, beginning with 0. None: each row is one
            document.
        window: number of keys that a query sees, including its own. None: no limit.
        block: largest number of queries and of keys in a tile. None: no limit.
    """
    all_tiles: list[Tile] = []
    for pairs in _pairs(queries, keys, length, documents, merge=window is None and block is None):
        of_document = [t for rows, q, k in pairs for t in _tiles_of_pair(rows, q, k, window, block)]
        all_tiles += of_document if block or window is not None else _merged(of_document)
    return _with_first(all_tiles, queries)


@lru_cache(maxsize=1024)
def bands(
    queries: Slices, keys: Slices, length: int, documents: Documents = None, window: int | None = None
) -> tuple[Tile, ...]:
    """Return `tiles` with a single tile for each document and pair of slices. Windows and diagonals do not split it."""
    all_bands: list[Tile] = []
    for pairs in _pairs(queries, keys, length, documents, merge=window is None):
        of_document = [t for rows, q, k in pairs for t in _band_of_pair(rows, q, k, window)]
        all_bands += _merged(of_document) if window is None else of_document
    return _with_first(all_bands, queries)


def work(tiles: Sequence[Tile]) -> int:
    """Return the number of visible pairs in the tiles. A tile for all rows of the batch counts once."""
    return sum(_visible(t) for t in tiles)


def halves(tiles: Sequence[Tile]) -> tuple[tuple[Tile, ...], tuple[Tile, ...]]:
    """Divide the tiles into two lists with about equal work. A single causal tile is split."""
    if len(tiles) == 1 and tiles[0].kind is Kind.CAUSAL and tiles[0].shape[0] > 1:
        return _split(tiles[0])
    total, done = work(tiles), 0
    for i, t in enumerate(tiles):
        if 2 * done >= total:
            return tuple(tiles[:i]), tuple(tiles[i:])
        done += _visible(t)
    return tuple(tiles), ()


def _visible(t: Tile) -> int:
    """Return the number of visible pairs in a tile."""
    queries, keys = t.shape
    i = np.arange(queries)
    return int((np.minimum(keys - 1, i + t.high) - np.maximum(0, i + t.low) + 1).sum())


def _split(t: Tile) -> tuple[tuple[Tile, ...], tuple[Tile, ...]]:
    """Split a causal tile into the rectangle below its diagonal and the two causal tiles on the diagonal."""
    n, middle = t.shape[0], t.shape[0] // 2
    part = lambda i0, i1, j0, j1: _tile(
        t.rows,
        SequenceSlice(t.q.start, n, t.start, t.stride),
        SequenceSlice(t.k.start, n, t.start - t.distance, t.stride),
        1 - n,
        0,
        (i0, i1, j0, j1),
    )
    return (part(middle, n, 0, middle),), (part(0, middle, 0, middle), part(middle, n, middle, n))


def _pairs(
    queries: Slices, keys: Slices, length: int, documents: Documents, merge: bool
) -> Iterator[list[tuple[slice, SequenceSlice, SequenceSlice]]]:
    """Yield, for each document, the pairs of a slice of its queries and a slice of its keys, with their rows.

    Args:
        merge: whether the slices of one shard may be merged into one slice, whose positions are not valid.
    """
    own = merge and queries == keys
    for rows, first, end in _intervals(documents, length):
        seen, held = _within(queries, first, end), _within(keys, first, end)
        if own:  # local order is the order in the sequence, so causal masking of the local tokens is correct
            seen = held = _concatenated(seen)
        yield [(rows, q, k) for q in seen for k in held]


def _intervals(documents: Documents, length: int) -> Iterator[tuple[slice, int, int]]:
    """Yield (rows of the batch, first token, end) of each document."""
    if documents is None:
        yield slice(None), 0, length
        return
    for row, starts in enumerate(documents):
        for first, end in zip(starts, (*starts[1:], length), strict=True):
            yield slice(row, row + 1), first, end


def _within(pieces: Slices, first: int, end: int) -> list[SequenceSlice]:
    """Return the part of each slice in the interval [first, end) of the sequence, without empty parts."""
    parts = []
    for p in pieces:
        start = max(0, _ceil_div(first - p.first, p.stride))
        stop = min(p.count, _ceil_div(end - p.first, p.stride))
        if start < stop:
            parts.append(SequenceSlice(p.start + start, stop - start, p.first + start * p.stride, p.stride))
    return parts


def _concatenated(pieces: list[SequenceSlice]) -> list[SequenceSlice]:
    """Return the slices as one slice of the same local tokens. Its positions in the sequence are not valid."""
    return [pieces[0]._replace(count=sum(p.count for p in pieces))] if pieces else []


def _tiles_of_pair(
    rows: slice, q: SequenceSlice, k: SequenceSlice, window: int | None, block: tuple[int, int] | None
) -> list[Tile]:
    """Return the tiles between the queries of one slice and the keys of another."""
    low, high = _bounds(q, k, window)
    if low > high:  # no key is in the window, which can happen with a stride
        return []
    if block is None and low == 1 - q.count:
        rectangles = _causal_rectangles(q.count, k.count, high)
    else:
        rectangles = _band_rectangles(q.count, k.count, low, high, block or (BLOCK[0], k.count))
    return [_tile(rows, q, k, low, high, r) for r in rectangles]


def _band_of_pair(rows: slice, q: SequenceSlice, k: SequenceSlice, window: int | None) -> list[Tile]:
    """Return one tile with all visible pairs, cropped to the queries and keys that see any. Empty if there are none."""
    low, high = _bounds(q, k, window)
    top, bottom = max(0, -high), min(q.count, k.count - low)
    left, right = max(0, top + low), min(k.count, bottom + high)
    return (
        [_tile(rows, q, k, low, high, (top, bottom, left, right))]
        if low <= high and top < bottom and left < right
        else []
    )


def _bounds(q: SequenceSlice, k: SequenceSlice, window: int | None) -> tuple[int, int]:
    """Return (low, high) of the band that the queries of one slice see in the keys of another."""
    distance = q.first - k.first
    low = 1 - q.count  # the smallest j - i
    if window is not None:
        low = max(low, 1 - _ceil_div(window - distance, q.stride))
    return low, distance // q.stride


def _tile(rows: slice, q: SequenceSlice, k: SequenceSlice, low: int, high: int, rectangle: Rectangle) -> Tile:
    """Return the tile of a rectangle, whose indices count from the start of the slices."""
    i0, i1, j0, j1 = rectangle
    low, high = low + i0 - j0, high + i0 - j0
    unbounded = low <= i0 - i1 + 1
    if unbounded and high >= j1 - j0 - 1:
        kind = Kind.FULL
    else:
        kind = Kind.CAUSAL if unbounded and high == 0 and i1 - i0 == j1 - j0 else Kind.BAND
    distance = q.first - k.first + q.stride * (i0 - j0)
    queries, keys = slice(q.start + i0, q.start + i1), slice(k.start + j0, k.start + j1)
    return Tile(rows, queries, keys, kind, low, high, distance, q.stride, q.first + q.stride * i0)


def _causal_rectangles(m: int, n: int, high: int) -> Iterator[Rectangle]:
    """Yield rectangles for m queries and n keys whose visible pairs are j - i <= high. One rectangle is square and
    causal. The others, to the left of it and below it, are full."""
    top, left = max(0, -high), max(0, high)  # queries that see no key, and keys that all queries see
    if high >= n - 1:
        yield 0, m, 0, n
    elif top < m:
        side = min(m - top, n - left)
        if left:
            yield top, m, 0, left
        yield top, top + side, left, left + side
        if top + side < m:
            yield top + side, m, left, n


def _band_rectangles(m: int, n: int, low: int, high: int, block: tuple[int, int]) -> Iterator[Rectangle]:
    """Yield the band low <= j - i <= high in blocks.

    A row of blocks is split at the first and the last key that all its queries see. The last one of these keys belongs
    to the diagonal block, which is then square."""
    for i0 in range(max(0, -high), m, block[0]):
        i1 = min(m, i0 + block[0])
        start, end = max(0, i0 + low), min(n, i1 + high)
        all_from, all_to = max(start, i1 - 1 + low), min(end, i0 + high)
        ranges = [start, all_from, all_to, end] if all_from <= all_to else [start, end]
        for a, b in pairwise(ranges):
            for j0 in range(a, b, block[1]):
                j1 = min(b, j0 + block[1])
                top, bottom = max(i0, j0 - high), min(i1, j1 - low)  # the queries that see any of these keys
                if top < bottom:
                    yield top, bottom, j0, j1


def _merged(tiles: list[Tile]) -> list[Tile]:
    """Merge adjacent full tiles."""
    for a, b in combinations([t for t in tiles if t.kind is Kind.FULL], 2):
        if a.q == b.q and a.k.stop == b.k.start:
            whole = a._replace(k=slice(a.k.start, b.k.stop))
        elif a.k == b.k and a.q.stop == b.q.start:
            whole = a._replace(q=slice(a.q.start, b.q.stop))
        else:
            continue
        m, n = whole.shape
        return _merged([t for t in tiles if t not in (a, b)] + [whole._replace(low=1 - m, high=n - 1)])
    return tiles


def _with_first(tiles: list[Tile], queries: Slices) -> tuple[Tile, ...]:
    """Return the tiles with `first` set."""
    rows = 1 + max((t.rows.start or 0 for t in tiles), default=0)
    seen, marked = np.zeros((rows, sum(p.count for p in queries)), bool), []
    for t in tiles:
        row = seen[t.rows.start or 0, t.q]
        marked.append(t._replace(first=not row.any()))
        row[:] = True
    return tuple(marked)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
