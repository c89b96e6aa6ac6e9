"""The attention core: what lies between the q/k/v and the output projection.

Plain causal attention over a whole sequence is PyTorch's own. Everything else is computed tile by tile (`tiles.py`):
packed documents, windows, score biases, and attention over a sequence of which only a share is here. Partial results
over different keys are merged by their log-sum-exp (Milakov and Gimelshein, 2018, arXiv:1805.02867), and the backward
of a tile needs only the merged output and log-sum-exp (Dao et al., 2022, arXiv:2205.14135).

Shape legend: B batch, T time, S time of the keys, N query heads, K key/value heads, D head_dim.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ndtrain.model.tiles import BLOCK, Documents, Kind, Pieces, Tile, tiles
from ndtrain.sequence import Piece

aten = torch.ops.aten

# gives (output, log-sum-exp) of an attention: calls what it is given, which computes them, or has them already
Recall = Callable[[Callable[[], tuple[Tensor, Tensor]]], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Scores:
    """What is done to the scores q_i . k_j / sqrt(D) before the softmax, in this order, and which pairs are seen.

    Attributes:
        window: tokens a query sees, itself included (Beltagy et al., 2020, arXiv:2004.05150); None: all before it.
        softcap: c in c * tanh(score / c) (Gemma 2, arXiv:2408.00118).
        slopes: of each query head here; slope * (i - j) is subtracted (ALiBi: Press et al., 2022, arXiv:2108.12409).
        documents: for each row of the batch where its documents start in the whole sequence, 0 first. A token sees
            only its own document. None: each row is one document.
    """

    window: int | None = None
    softcap: float | None = None
    slopes: tuple[float, ...] | None = None
    documents: Documents = None

    @property
    def plain(self) -> bool:
        """Whether it is causal attention and nothing more."""
        return self.window is None and self.softcap is None and self.slopes is None and self.documents is None

    def tiles(self, queries: Pieces, keys: Pieces, length: int, like: Tensor) -> tuple[Tile, ...]:
        """The tiles for these scores on the device and in the precision of `like`, a query tensor."""
        held = self.softcap is not None or self.slopes is not None or not _flash_runs(like)
        return tiles(queries, keys, length, self.documents, self.window, BLOCK if held else None)


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """The slope of each of `heads` heads: 2^(-8/n), 2^(-16/n), ... for n heads where n is a power of two; otherwise
    those of the power of two below, then every other one of the power above (Press et al., 2022, arXiv:2108.12409)."""
    n = 2 ** math.floor(math.log2(heads))
    geometric = lambda n: [2 ** (-8 * i / n) for i in range(1, n + 1)]
    return tuple(geometric(n) + geometric(2 * n)[::2][: heads - n])


def local_core(q_BTND: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, ctx) -> Tensor:
    """Softmax attention over the whole sequence on this device, as `ctx.scores` says; [B, T, N, D].

    Grouped query heads share the key/value head `n * K // N` (Ainslie et al., 2023, arXiv:2305.13245).
    """
    return attend(q_BTND, k_BTKD, v_BTKD, ctx.scores)


def attend(q_BTND: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, scores: Scores, recall: Recall | None = None) -> Tensor:
    """`local_core` with the scores named. With `recall`, the kernels' results go through it."""
    if recall or not scores.plain:
        return _attend_in_tiles(q_BTND, k_BTKD, v_BTKD, scores, recall or (lambda make: make()))
    q, k, v = (x.transpose(1, 2) for x in (q_BTND, k_BTKD, v_BTKD))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


@torch.compiler.disable
def _attend_in_tiles(q_BTND: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, scores: Scores, recall: Recall) -> Tensor:
    length = q_BTND.shape[1]
    whole = (Piece(0, length, 0, 1),)
    return _Tiled.apply(q_BTND, k_BTKD, v_BTKD, scores, scores.tiles(whole, whole, length, q_BTND), recall)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_BTND: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, scores: Scores, found: tuple[Tile, ...], recall):
        q, k, v = (x.transpose(1, 2) for x in (q_BTND, k_BTKD, v_BTKD))

        def make() -> tuple[Tensor, Tensor]:
            merged = Merged(q)
            merged.attend(k, v, found, scores)
            return merged.result()

        out, lse = recall(make)
        ctx.scores, ctx.found = scores, found
        ctx.save_for_backward(q, k, v, out, lse)
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx, grad_BTND: Tensor):
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = total_like(q), total_like(k), total_like(v)
        add_gradients(grad_BTND.transpose(1, 2), (q, k, v, out, lse), ctx.found, ctx.scores, dq, dk, dv)
        return *(x.transpose(1, 2).to(q.dtype) for x in (dq, dk, dv)), None, None, None


# ------------------------------------------------------------------------------------------------- over several tiles


class Merged:
    """Attention of the queries q [B, N, T, D] over all the keys given so far."""

    def __init__(self, q: Tensor):
        self._q = q
        self._out: Tensor | None = None  # [B, N, T, D] in fp32 or wider
        self._lse: Tensor | None = None  # [B, N, T] likewise

    def attend(self, k: Tensor, v: Tensor, found: Sequence[Tile], scores: Scores) -> None:
        """Over the keys k and values v [B, K, S, D] too, where the tiles say that they are seen."""
        fresh = self._out is None
        for t in found:
            out, lse = forward_tile(_at(self._q, t.rows, t.q), _at(k, t.rows, t.k), _at(v, t.rows, t.k), t, scores)
            self._merge(t, out, lse, fresh and t.first)

    def result(self) -> tuple[Tensor, Tensor]:
        """(output [B, N, T, D] in the queries' precision, log-sum-exp [B, N, T])."""
        return self._out.to(self._q.dtype), self._lse

    def _merge(self, t: Tile, out: Tensor, lse: Tensor, first: bool) -> None:
        out = out.to(_wide(out.dtype))
        if self._out is None:
            if out.shape == self._q.shape:
                self._out, self._lse = out, lse
                return
            self._out = total_like(self._q)
            self._lse = self._out.new_full(self._q.shape[:-1], -torch.inf)
        mine, seen = _at(self._out, t.rows, t.q), self._lse[t.rows, :, t.q]
        if first:
            mine.copy_(out)
            seen.copy_(lse)
        else:
            mine.lerp_(out, torch.sigmoid(lse - seen)[..., None])
            torch.logaddexp(seen, lse, out=seen)


def add_gradients(
    grad: Tensor,
    saved: tuple[Tensor, ...],
    found: Sequence[Tile],
    scores: Scores,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Adds to dq, dk and dv what the tiles contribute.

    Args:
        grad: [B, N, T, D], of the output.
        saved: q, k, v, output, log-sum-exp; the last two over all keys of each query, not only those of the tiles.
    """
    q, k, v, out, lse = saved
    if grad.stride(-1) != 1:  # that of a sum is one number expanded; kernels want rows
        grad = grad.contiguous()
    for t in found:
        query = lambda x, t=t: _at(x, t.rows, t.q)
        key = lambda x, t=t: _at(x, t.rows, t.k)
        parts = backward_tile(query(grad), query(q), key(k), key(v), query(out), lse[t.rows, :, t.q], t, scores)
        for total, part in zip((query(dq), key(dk), key(dv)), parts, strict=True):
            total.add_(part)


def total_like(x: Tensor) -> Tensor:
    """Zeros to sum in, fp32 or wider, for a view [B, N, T, D] of a tensor that is contiguous as [B, T, N, D]."""
    B, N, T, D = x.shape
    return x.new_zeros(B, T, N, D, dtype=_wide(x.dtype)).transpose(1, 2)


def _at(x: Tensor, rows: slice, tokens: slice) -> Tensor:
    return x[rows, :, tokens]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


# ----------------------------------------------------------------------------------------------------------- one tile


def forward_tile(q: Tensor, k: Tensor, v: Tensor, t: Tile, scores: Scores) -> tuple[Tensor, Tensor]:
    """Attention of q [B, N, T, D] over k, v [B, K, S, D]: (output [B, N, T, D], log-sum-exp [B, N, T])."""
    if not _flash_takes(q, t, scores):
        return _math_forward(q, k, v, t, scores)
    if q.is_cuda:
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, t.kind is Kind.CAUSAL)[:2]
    mask, causal = _mask_of(q, t, scores)
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask)


def backward_tile(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, t: Tile, scores: Scores
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of the tile; `out` and `lse` are those over all keys."""
    if not _flash_takes(q, t, scores):
        return _math_backward(grad, q, k, v, out, lse, t, scores)
    if q.is_cuda:
        none = torch.zeros(2, dtype=torch.uint64, device=q.device)  # state of the dropout that there is not
        return aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, t.kind is Kind.CAUSAL,
            none, none,
        )  # fmt: skip
    mask, causal = _mask_of(q, t, scores)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask
    )


def _flash_runs(q: Tensor) -> bool:
    return not q.is_cuda or (q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0)


def _flash_takes(q: Tensor, t: Tile, scores: Scores) -> bool:
    """Whether a flash kernel does it; CUDA's takes no mask."""
    if scores.softcap is not None or not _flash_runs(q):
        return False
    return not q.is_cuda or (t.kind is not Kind.BAND and scores.slopes is None)


def _mask_of(q: Tensor, t: Tile, scores: Scores) -> tuple[Tensor | None, bool]:
    """(mask, whether causal besides)"""
    if t.kind is not Kind.BAND and scores.slopes is None:
        return None, t.kind is Kind.CAUSAL
    bias = _bias(q, t, scores)
    return bias.expand(1, *bias.shape[-3:]), False


def _bias(q: Tensor, t: Tile, scores: Scores) -> Tensor:
    """What is added to the scores [.., N or 1, T, S]: the ALiBi term, and -inf where nothing is seen."""
    m, n = t.shape
    wide = _wide(q.dtype)
    back_TS = torch.arange(m, device=q.device)[:, None] - torch.arange(n, device=q.device)
    if scores.slopes is None:
        bias = q.new_zeros(1, m, n, dtype=wide)
    else:
        slopes_N = torch.tensor(scores.slopes, dtype=wide, device=q.device)
        bias = -slopes_N[:, None, None] * (t.distance + t.stride * back_TS)
    if t.kind is not Kind.FULL:
        bias.masked_fill_((back_TS < -t.high) | (back_TS > -t.low), -torch.inf)
    return bias


def _math_scores(q: Tensor, k: Tensor, t: Tile, scores: Scores) -> tuple[Tensor, Tensor | None]:
    """(scores [B, N, T, S] in fp32 or wider, tanh of the capped ones or None)"""
    wide = _wide(q.dtype)
    s = _by_kv_head(q.to(wide), k) @ k.to(wide).mT
    s = s.view(*q.shape[:-1], -1).mul_(q.shape[-1] ** -0.5)
    tanh = None
    if scores.softcap is not None:
        tanh = s.div_(scores.softcap).tanh_()
        s = tanh * scores.softcap
    if t.kind is not Kind.FULL or scores.slopes is not None:
        s.add_(_bias(q, t, scores))
    return s, tanh


def _math_forward(q: Tensor, k: Tensor, v: Tensor, t: Tile, scores: Scores) -> tuple[Tensor, Tensor]:
    s, _ = _math_scores(q, k, t, scores)
    lse = s.logsumexp(-1)
    p = s.sub_(lse[..., None]).exp_()
    return (_by_kv_head(p, k) @ v.to(p.dtype)).view_as(q), lse


def _math_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, t: Tile, scores: Scores
) -> tuple[Tensor, Tensor, Tensor]:
    s, tanh = _math_scores(q, k, t, scores)
    p = s.sub_(lse[..., None]).exp_()
    wide, scale = p.dtype, q.shape[-1] ** -0.5
    grad, k_wide, q_wide = grad.to(wide), k.to(wide), q.to(wide)
    delta = (grad * out.to(wide)).sum(-1, keepdim=True)
    dv = _by_kv_head(p, k).mT @ _by_kv_head(grad, k)
    ds = (_by_kv_head(grad, k) @ v.to(wide).mT).view_as(p).sub_(delta).mul_(p)
    if tanh is not None:
        ds.mul_(tanh.square_().neg_().add_(1))
    ds = _by_kv_head(ds.mul_(scale), k)
    return (ds @ k_wide).view_as(q), ds.mT @ _by_kv_head(q_wide, k), dv


def _by_kv_head(x: Tensor, k: Tensor) -> Tensor:
    """[B, N, T, *] -> [B, K, N/K * T, *]: the queries of a key/value head as rows of one matrix."""
    B, N, T, _ = x.shape
    return x.reshape(B, k.shape[1], N // k.shape[1] * T, x.shape[-1])
