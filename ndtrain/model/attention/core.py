"""The attention core: the computation between the q/k/v projections and the output projection.

Plain causal attention over a whole sequence uses PyTorch's `scaled_dot_product_attention`. All other cases are computed
tile by tile (`tiles.py`): packed documents, windows, score biases, and sequences that are sharded over devices.
Partial results over different keys are merged by their log-sum-exp (Milakov and Gimelshein, 2018, arXiv:1805.02867).
The backward of a tile needs only the merged output and log-sum-exp (Dao et al., 2022, arXiv:2205.14135).

Shape legend: B batch, T time, S time of the keys, N query heads, K key/value heads, D head_dim.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel

from ndtrain.model.attention.custom_op import AttentionOp, as_custom_op
from ndtrain.model.attention.kernels import (
    GPU_KERNELS,
    Piece,
    Pieces,
    backward_piece,
    for_each_query_head,
    forward_piece,
    pieces_for,
    widened,
)
from ndtrain.model.attention.scores import Scores
from ndtrain.model.attention.tiles import SequenceSlice

# A function that gets (output, log-sum-exp) from a function that computes them: it calls that, or returns saved values.
Recall = Callable[[Callable[[], tuple[Tensor, Tensor]]], tuple[Tensor, Tensor]]


def local_core(q_BTND: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, ctx, largest_N: Tensor | None = None) -> Tensor:
    """Compute softmax attention over the whole sequence on this device -> [B, T, N, D].

    `ctx.scores` specifies windows, biases and documents. Query head n uses the key/value head `n * K // N`
    (Ainslie et al., 2023, arXiv:2305.13245).

    Args:
        largest_N: raised to the largest log-sum-exp of each head; see `raise_to`. Not in a graph that is compiled.
    """
    if torch.compiler.is_compiling() and not _by_sdpa(ctx.scores, q_BTND):
        return as_custom_op(TILED, q_BTND, k_BTKD, v_BTKD, ctx.scores, ctx.handle)
    return attend(q_BTND, k_BTKD, v_BTKD, ctx.scores, largest_N=largest_N)


def attend(
    q_BTND: Tensor,
    k_BTKD: Tensor,
    v_BTKD: Tensor,
    scores: Scores,
    recall: Recall | None = None,
    largest_N: Tensor | None = None,
) -> Tensor:
    """Compute `local_core` with explicit scores. If `recall` is given, the kernels run through it."""
    if recall is None and largest_N is None and _by_sdpa(scores, q_BTND):
        return _plain(*(x.transpose(1, 2) for x in (q_BTND, k_BTKD, v_BTKD)), scores.kernel).transpose(1, 2)
    return _Tiled.apply(q_BTND, k_BTKD, v_BTKD, scores, recall, largest_N)


def raise_to(largest_N: Tensor | None, lse_BNT: Tensor) -> None:
    """Raise each number to the largest log-sum-exp of its head's scores, if this is larger. None: do nothing.

    The log-sum-exp of n scores is at least the largest score, and at most ln(n) larger. Every kernel returns it."""
    if largest_N is not None:
        torch.maximum(largest_N, lse_BNT.amax((0, 2)).to(largest_N.dtype), out=largest_N)


def _by_sdpa(scores: Scores, q: Tensor) -> bool:
    """Return True if PyTorch's `scaled_dot_product_attention` is used. It cannot choose a kernel for meta tensors."""
    chooses = not q.is_meta and (scores.kernel is None or GPU_KERNELS[scores.kernel].backend is not None)
    return scores.plain and chooses


def _plain(q: Tensor, k: Tensor, v: Tensor, kernel: str | None) -> Tensor:
    """Compute PyTorch's causal attention [B, N, T, D] with the given kernel. None: PyTorch chooses it."""
    sdpa = lambda k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    if kernel is None:
        return sdpa(k, v)
    with sdpa_kernel(GPU_KERNELS[kernel].backend):
        return sdpa(k, v) if GPU_KERNELS[kernel].shares_heads else sdpa(*for_each_query_head(q, k, v))


class TiledAttention(AttentionOp):
    """Attention over a whole sequence, tile by tile."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        pieces = _pieces_of(q, scores)
        if len(pieces) == 1:  # the piece covers all queries and keys
            out, lse = forward_piece(q, k, v, pieces[0], scores)
            return out.to(q.dtype), lse
        merged = Merged(q)
        merged.attend(k, v, pieces, scores)
        return merged.result()

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores):
        pieces = _pieces_of(q, scores)
        if len(pieces) == 1:
            return backward_piece(in_rows(grad), q, k, v, out, lse, pieces[0], scores)
        dq, dk, dv = total_like(q), total_like(k), total_like(v)
        add_gradients(grad, (q, k, v, out, lse), pieces, scores, dq, dk, dv)
        return dq, dk, dv


TILED = TiledAttention()


def _pieces_of(q: Tensor, scores: Scores) -> Pieces:
    """Return the pieces of the whole sequence of q [B, N, T, D]."""
    length = q.shape[2]
    pieces = (SequenceSlice(0, length, 0, 1),)
    return pieces_for(scores, pieces, pieces, length, q)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        q_BTND: Tensor,
        k_BTKD: Tensor,
        v_BTKD: Tensor,
        scores: Scores,
        recall: Recall | None,
        largest_N: Tensor | None,
    ):
        q, k, v = q_BTND.transpose(1, 2), k_BTKD.transpose(1, 2), v_BTKD.transpose(1, 2)
        make = partial(TILED.forward, q, k, v, scores)
        out, lse = recall(make) if recall else make()
        raise_to(largest_N, lse)
        ctx.scores = scores
        ctx.save_for_backward(q, k, v, out, lse)
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx, grad_BTND: Tensor):
        q, *saved = ctx.saved_tensors
        dq, dk, dv = TILED.backward(grad_BTND.transpose(1, 2), q, *saved, ctx.scores)
        to_input_layout = lambda x: x.transpose(1, 2).to(q.dtype)
        return to_input_layout(dq), to_input_layout(dk), to_input_layout(dv), *(None,) * 3


# ------------------------------------------------------------------------------------------------- over several tiles


class Merged:
    """Attention of the queries q [B, N, T, D] over all keys that were passed to `attend` so far."""

    def __init__(self, q: Tensor):
        self._q = q
        self._out: Tensor | None = None  # [B, N, T, D] in fp32 or wider
        self._lse: Tensor | None = None  # [B, N, T] in fp32 or wider

    def attend(self, k: Tensor, v: Tensor, pieces: Pieces, scores: Scores) -> None:
        """Add the attention over the keys k and values v [B, K, S, D], as far as the pieces make them visible."""
        fresh = self._out is None
        for t in pieces:
            out, lse = forward_piece(_at(self._q, t.rows, t.q), _at(k, t.rows, t.k), _at(v, t.rows, t.k), t, scores)
            self._merge(t, out, lse, fresh and t.first)

    def result(self) -> tuple[Tensor, Tensor]:
        """Return (output [B, N, T, D] in the queries' precision, log-sum-exp [B, N, T])."""
        return self._out.to(self._q.dtype), self._lse

    def _merge(self, t: Piece, out: Tensor, lse: Tensor, first: bool) -> None:
        """Merge the results of a piece. `first`: its queries have no results yet."""
        out = out.to(widened(out.dtype))
        if self._out is None:
            if out.shape == self._q.shape:
                self._out, self._lse = out, lse
                return
            self._out = total_like(self._q)
            self._lse = self._out.new_full(self._q.shape[:-1], -torch.inf)
        total_out, total_lse = _at(self._out, t.rows, t.q), self._lse[t.rows, :, t.q]
        if first:
            total_out.copy_(out)
            total_lse.copy_(lse)
        else:
            weight = torch.sigmoid(lse - total_lse).masked_fill_(lse == -torch.inf, 0)  # -inf: the query sees no key
            total_out.lerp_(out, weight[..., None])
            torch.logaddexp(total_lse, lse, out=total_lse)


def add_gradients(
    grad: Tensor,
    saved: tuple[Tensor, ...],
    pieces: Pieces,
    scores: Scores,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Add the gradients of the pieces to dq [B, N, T, D], dk and dv [B, K, S, D].

    Args:
        grad: gradient of the output, [B, N, T, D].
        saved: q, k, v, output, log-sum-exp. The last two are over all keys of each query, not just those in the pieces.
    """
    q, k, v, out, lse = saved
    grad = in_rows(grad)
    for t in pieces:
        query = lambda x, t=t: _at(x, t.rows, t.q)
        key = lambda x, t=t: _at(x, t.rows, t.k)
        parts = backward_piece(query(grad), query(q), key(k), key(v), query(out), lse[t.rows, :, t.q], t, scores)
        for total, part in zip((query(dq), key(dk), key(dv)), parts, strict=True):
            total.add_(part)


def in_rows(grad: Tensor) -> Tensor:
    """Return the gradient with contiguous rows, as kernels require. (The gradient of a sum is an expanded scalar.)"""
    return grad if grad.stride(-1) == 1 else grad.contiguous()


def total_like(x: Tensor) -> Tensor:
    """Return zeros for sums in fp32 or wider: a view [B, N, T, D] of a tensor that is contiguous as [B, T, N, D]."""
    B, N, T, D = x.shape
    return x.new_zeros(B, T, N, D, dtype=widened(x.dtype)).transpose(1, 2)


def _at(x: Tensor, rows: slice, tokens: slice) -> Tensor:
    """Return a view of the given rows and tokens of x [B, N, T, D]."""
    return x[rows, :, tokens]
