"""Calls of the flash kernel over segments of different lengths, on a GPU: packed documents and sliding windows.

The kernel takes the tokens of all rows concatenated. Offsets (`cu_seqlens`) cut queries and keys into the same number
of segments, and the queries of a segment see only its keys. All segments share one window (left, right), where -1 means
no bound. In a segment of m queries and n keys, query i sees key j if `i + n - m - left <= j <= i + n - m + right`. The
mask is therefore aligned at the last query and the last key. A tile's mask is aligned at the first ones.

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
    """The segments of the queries, or of the keys, of a call.

    Attributes:
        cu: first token of each segment, followed by the end of the last segment, int32 [segments + 1].
        most: number of tokens of the longest segment.
        index: the tokens that the call takes, as indices into all B * T, int64 [L]. None: all tokens, in order.
    """

    cu: Tensor
    most: int
    index: Tensor | None

    def taken(self, x: Tensor) -> Tensor:
        """Select the tokens of the call: [B, H, T, *] -> [L, H, *]."""
        tokens = x.transpose(1, 2).flatten(0, 1)
        return tokens if self.index is None else tokens.index_select(0, self.index)

    def put_back(self, x_LHD: Tensor, like: Tensor, empty: float = 0.0) -> Tensor:
        """Invert `taken`: [L, H, *] -> [B, H, T, *], with B and T of `like` [B, H, T, D]. Tokens that are in no segment
        get the value `empty`."""
        B, H, T, _ = like.shape
        if self.index is not None:
            full = x_LHD.new_full((B * T, *x_LHD.shape[1:]), empty)
            x_LHD = full.index_copy_(0, self.index, x_LHD)
        return x_LHD.view(B, T, H, *x_LHD.shape[2:]).transpose(1, 2)


@dataclass(frozen=True)
class VarlenCall:
    """One call of the kernel, over the keys of one shard of a sequence.

    Attributes:
        queries, keys: their segments.
        left, right: the window.
        rows, q, k: the part of the shard that it reads and returns, as in `Tile`. It is the whole shard.
        first: as in `Tile`.
    """

    queries: Segments
    keys: Segments
    left: int
    right: int
    first: bool
    rows = q = k = slice(None)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """Compute `forward_piece` for this call. Queries in no segment have output 0 and log-sum-exp -inf."""
        taken = self.queries.taken(q), self.keys.taken(k), self.keys.taken(v)
        out, lse_NL, *_ = aten._flash_attention_forward(*taken, *self._lengths(), False, **self._window())
        return self.queries.put_back(out, q), self.queries.put_back(lse_NL.mT, q, -torch.inf)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute `backward_piece` for this call."""
        none = torch.zeros(2, dtype=torch.uint64, device=q.device)  # random state of dropout, which is off
        of_q, of_k = self.queries.taken, self.keys.taken
        dq, dk, dv = aten._flash_attention_backward(
            of_q(grad), of_q(q), of_k(k), of_k(v), of_q(out), of_q(lse).mT.contiguous(), *self._lengths(), none, none,
            **self._window(),
        )  # fmt: skip
        return self.queries.put_back(dq, q), self.keys.put_back(dk, k), self.keys.put_back(dv, v)

    def _lengths(self) -> tuple[Tensor, Tensor, int, int, float, bool]:
        """Return the arguments for the segments, the dropout, and whether the mask is causal."""
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
    """Return calls that together compute the same scores as `tiles`, for `rows` rows. They are in one list, or with
    `parts=2` in two lists of about equal work."""
    all_bands = bands(queries, keys, length, documents, window)
    tokens = tuple(sum(p.count for p in pieces) for pieces in (queries, keys))
    lists = (all_bands,) if parts == 1 else halves(all_bands)
    return tuple(
        tuple(d.call(rows, tokens, device, first=i == 0) for i, d in enumerate(_deal(one, rows, tokens)))
        for one in lists
    )


class _Deal:
    """The bands of one call. No query and no key occurs twice, and one window suits all bands.

    Args:
        tokens: number of queries, and of keys, in a row of the shard.
    """

    def __init__(self, window: tuple[int, int], rows: int, tokens: tuple[int, int]):
        self.window, self.members = window, list[Tile]()
        self._queries, self._keys = (np.zeros((rows, n), bool) for n in tokens)

    def take(self, t: Tile) -> bool:
        """Add a band of one row if it suits the call. Return True if it does."""
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
    """Distribute the bands of each row over few calls, each with bands that suit it."""
    single = [t._replace(rows=slice(r, r + 1)) for t in all_bands for r in range(rows)[t.rows]]
    deals: list[_Deal] = []
    # bands without a bound come last, because they may suit a call that has one
    for t in sorted(single, key=lambda t: _window_of(t).count(-1)):
        if not any(deal.take(t) for deal in deals):
            deals.append(_Deal(_window_of(t), rows, tokens))
            deals[-1].take(t)
    return deals


def _window_of(t: Tile) -> tuple[int, int]:
    """Return the window with which the kernel computes the band. A bound is -1 if nothing is beyond it."""
    queries, keys = t.shape
    left, right = keys - queries - t.low, t.high - (keys - queries)
    return -1 if left >= keys - 1 else left, -1 if right >= queries - 1 else right


def _suits(t: Tile, window: tuple[int, int]) -> bool:
    """Return True if the kernel computes the band with this window."""
    queries, keys = t.shape
    beyond = (keys - 1, queries - 1)  # bounds of this size or more hide nothing
    return all(
        given == needed or (needed == -1 and given >= most)
        for given, needed, most in zip(window, _window_of(t), beyond, strict=True)
    )


def _segments(pieces: Sequence[tuple[int, slice]], tokens: int, rows: int, device: torch.device) -> Segments:
    """Return the segments for pairs (row, local tokens), in a shard of `rows` rows with `tokens` tokens each."""
    lengths = [piece.stop - piece.start for _, piece in pieces]
    index = np.concatenate([np.arange(row * tokens + p.start, row * tokens + p.stop) for row, p in pieces])
    whole = np.array_equal(index, np.arange(rows * tokens))
    cu = np.cumsum([0, *lengths], dtype=np.int32)
    # the planner needs the values of `cu`, because a call's cost depends on them. Meta tensors have no values
    at = torch.device("cpu") if device.type == "meta" else device
    return Segments(upload_array(cu, at), max(lengths), None if whole else upload_array(index, device))
