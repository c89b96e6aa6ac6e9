"""Calls of the flash kernel over segments of different lengths: packed documents, and sliding windows, on a GPU.

The kernel takes the tokens of all rows one behind the other, and offsets (`cu_seqlens`) that cut queries and keys into
as many segments. The queries of a segment see only its keys. A window (left, right) is one for all segments: of m
queries and n keys, query i sees key j if i + n - m - left <= j <= i + n - m + right, where -1 means no bound. So the
mask is aligned at the last query and the last key, unlike that of a tile.

Shape legend: B batch, T time, S time of the keys, N query heads, K key/value heads, D head_dim, L tokens of a call.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ndtrain.model.attention.scores import Scores
from ndtrain.model.attention.tiles import Documents, Slices, Tile, bands, halves
from ndtrain.model.attention.uploads import upload_array

aten = torch.ops.aten


@dataclass(frozen=True)
class Segments:
    """What the queries or the keys of a call are.

    Attributes:
        cu: first token of each segment, and the end of the last one, int32 [segments + 1].
        most: the most tokens of a segment.
        index: which tokens of all B * T the call takes, int64 [L]; None: all in order.
    """

    cu: Tensor
    most: int
    index: Tensor | None

    def taken(self, x: Tensor) -> Tensor:
        """[B, H, T, *] -> its tokens, [L, H, *]."""
        tokens = x.transpose(1, 2).flatten(0, 1)
        return tokens if self.index is None else tokens.index_select(0, self.index)

    def put_back(self, x_LHD: Tensor, like: Tensor, empty: float = 0.0) -> Tensor:
        """The inverse: tokens [L, H, *] -> [B, H, T, *], with B and T of `like` [B, H, T, D]. A token of no segment
        gets `empty`."""
        B, H, T, _ = like.shape
        if self.index is not None:
            full = x_LHD.new_full((B * T, *x_LHD.shape[1:]), empty)
            x_LHD = full.index_copy_(0, self.index, x_LHD)
        return x_LHD.view(B, T, H, *x_LHD.shape[2:]).transpose(1, 2)


@dataclass(frozen=True)
class VarlenCall:
    """One call of the kernel, over keys of one shard of a sequence.

    Attributes:
        queries, keys: their segments.
        left, right: the window.
        rows, q, k: the part of the shard that it takes and returns, as in `Tile`: all of it.
        first: as in `Tile`.
    """

    queries: Segments
    keys: Segments
    left: int
    right: int
    first: bool
    rows = q = k = slice(None)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """As `forward_piece`. Queries of no segment have output 0 and log-sum-exp -inf."""
        taken = self.queries.taken(q), self.keys.taken(k), self.keys.taken(v)
        out, lse_NL, *_ = aten._flash_attention_forward(*taken, *self._lengths(), False, **self._window())
        return self.queries.put_back(out, q), self.queries.put_back(lse_NL.mT, q, -torch.inf)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `backward_piece`."""
        none = torch.zeros(2, dtype=torch.uint64, device=q.device)  # random state of dropout, which is off
        of_q, of_k = self.queries.taken, self.keys.taken
        dq, dk, dv = aten._flash_attention_backward(
            of_q(grad), of_q(q), of_k(k), of_k(v), of_q(out), of_q(lse).mT.contiguous(), *self._lengths(), none, none,
            **self._window(),
        )  # fmt: skip
        return self.queries.put_back(dq, q), self.keys.put_back(dk, k), self.keys.put_back(dv, v)

    def _lengths(self) -> tuple[Tensor, Tensor, int, int, float, bool]:
        """The arguments about segments, the dropout, and whether the mask is causal."""
        causal = (self.left, self.right) == (-1, 0)
        return self.queries.cu, self.keys.cu, self.queries.most, self.keys.most, 0.0, causal

    def _window(self) -> dict[str, int]:
        return {"window_size_left": self.left, "window_size_right": self.right}


@lru_cache(maxsize=256)  # every block of a model makes the same calls
def varlen_calls(
    queries: Slices,
    keys: Slices,
    length: int,
    documents: Documents,
    window: int | None,
    rows: int,
    device: torch.device,
    parts: int = 1,
) -> tuple[tuple[VarlenCall, ...], ...]:
    """The calls that together compute what `tiles` computes, for `rows` rows, in one list or in two of about equal
    work (`parts`)."""
    all_bands = bands(queries, keys, length, documents, window)
    tokens = tuple(sum(p.count for p in pieces) for pieces in (queries, keys))
    lists = (all_bands,) if parts == 1 else halves(all_bands)
    return tuple(
        tuple(d.call(rows, tokens, device, first=i == 0) for i, d in enumerate(_deal(one, rows, tokens)))
        for one in lists
    )


class _Deal:
    """The bands of one call: no query and no key twice, and one window suits all.

    Args:
        tokens: queries and keys of a row of the shard.
    """

    def __init__(self, window: tuple[int, int], rows: int, tokens: tuple[int, int]):
        self.window, self.members = window, list[Tile]()
        self._queries, self._keys = (np.zeros((rows, n), bool) for n in tokens)

    def take(self, t: Tile) -> bool:
        """Takes a band of one row, if it suits the call."""
        queries, keys = self._queries[t.rows, t.q], self._keys[t.rows, t.k]
        if not _suits(t, self.window) or queries.any() or keys.any():
            return False
        queries[:] = keys[:] = True
        self.members.append(t)
        return True

    def call(self, rows: int, tokens: tuple[int, int], device: torch.device, first: bool) -> VarlenCall:
        members = sorted(self.members, key=lambda t: (t.rows.start, t.q.start))
        queries = _segments([(t.rows.start, t.q) for t in members], tokens[0], rows, device)
        keys = _segments([(t.rows.start, t.k) for t in members], tokens[1], rows, device)
        return VarlenCall(queries, keys, *self.window, first)


def _deal(all_bands: Sequence[Tile], rows: int, tokens: tuple[int, int]) -> list[_Deal]:
    """The bands of each row in as few calls as suit them."""
    single = [t._replace(rows=slice(r, r + 1)) for t in all_bands for r in range(rows)[t.rows]]
    deals: list[_Deal] = []
    # those without a bound last: they may suit a call with one
    for t in sorted(single, key=lambda t: _window_of(t).count(-1)):
        if not any(deal.take(t) for deal in deals):
            deals.append(_Deal(_window_of(t), rows, tokens))
            deals[-1].take(t)
    return deals


def _window_of(t: Tile) -> tuple[int, int]:
    """The window with which the kernel computes the band; -1 where nothing lies beyond a bound."""
    queries, keys = t.shape
    left, right = keys - queries - t.low, t.high - (keys - queries)
    return -1 if left >= keys - 1 else left, -1 if right >= queries - 1 else right


def _suits(t: Tile, window: tuple[int, int]) -> bool:
    """Whether the kernel computes the band with this window."""
    queries, keys = t.shape
    beyond = (keys - 1, queries - 1)  # bounds from these on hide nothing
    return all(
        given == needed or (needed == -1 and given >= most)
        for given, needed, most in zip(window, _window_of(t), beyond, strict=True)
    )


def _segments(pieces: Sequence[tuple[int, slice]], tokens: int, rows: int, device: torch.device) -> Segments:
    """The segments of (row, local tokens) in a shard of `rows` rows of `tokens`."""
    lengths = [piece.stop - piece.start for _, piece in pieces]
    index = np.concatenate([np.arange(row * tokens + p.start, row * tokens + p.stop) for row, p in pieces])
    whole = np.array_equal(index, np.arange(rows * tokens))
    cu = np.cumsum([0, *lengths], dtype=np.int32)
    # the cost of a call depends on these numbers, and the meta device has none
    at = torch.device("cpu") if device.type == "meta" else device
    return Segments(upload_array(cu, at), max(lengths), None if whole else upload_array(index, device))
