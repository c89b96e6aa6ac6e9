"""The kernels that compute a piece of attention, forward and backward.

A piece is a tile, or one call of a kernel that computes many tiles at once (`varlen.py`, `flex.py`). Every kernel
returns the output and the log-sum-exp of the scores. Its backward takes the output and log-sum-exp over *all* keys. A
GPU has several kernels (`GPU_KERNELS`). A run uses one of them, and `math` (`math_kernel.py`) for tiles that its kernel
does not support. No kernel makes the host wait for the device.

Shape legend: B batch, T time, S time of the keys, N query heads, K key/value heads, D head_dim.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from ndtrain.device.kind import on_gpu
from ndtrain.model.attention.flex import FlexCall, flex_call
from ndtrain.model.attention.math_kernel import Gradients, mask_of, math_backward, math_forward, widened
from ndtrain.model.attention.scores import Scores
from ndtrain.model.attention.tiles import BLOCK, Kind, Slices, Tile, halves, tiles
from ndtrain.model.attention.varlen import VarlenCall, varlen_calls

aten = torch.ops.aten
Piece = Tile | VarlenCall | FlexCall
Pieces = tuple[Piece, ...]


# ---------------------------------------------------------------------------------------------------------- one piece


def pieces_for(scores: Scores, queries: Slices, keys: Slices, length: int, like: Tensor) -> Pieces:
    """Return the pieces for these scores. `like` [B, N, T, D] has the rows, device, precision and head size."""
    return _piece_lists(scores, queries, keys, length, like, 1)[0]


def half_pieces(scores: Scores, queries: Slices, keys: Slices, length: int, like: Tensor) -> tuple[Pieces, Pieces]:
    """Return the pieces in two lists. They have about equal work if the kernel can be called for parts."""
    return _piece_lists(scores, queries, keys, length, like, 2)


def _piece_lists(scores: Scores, queries: Slices, keys: Slices, length: int, like: Tensor, parts: int):
    kernel, packed = _configured(like, scores), scores.documents is not None or scores.window is not None
    runs = kernel.runs(like)
    if runs and kernel.whole:
        return ((flex_call(scores, queries, keys, length, like),), ())
    if runs and kernel.varlen and packed and not scores.changed:
        return varlen_calls(
            queries, keys, length, scores.documents, scores.window, like.shape[0], like.device, parts
        )  # fmt: skip
    block = BLOCK if scores.changed or not runs else None
    all_tiles = tiles(queries, keys, length, scores.documents, scores.window, block)
    return (all_tiles,) if parts == 1 else halves(all_tiles)


def forward_piece(q: Tensor, k: Tensor, v: Tensor, piece: Piece, scores: Scores) -> tuple[Tensor, Tensor]:
    """Return (output [B, N, T, D], log-sum-exp [B, N, T]) of q [B, N, T, D] over k, v [B, K, S, D]."""
    if isinstance(piece, Tile):
        return _kernel_for(q, piece, scores).forward(q, k, v, piece, scores)
    return piece.forward(q, k, v, scores)


def backward_piece(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, piece: Piece, scores: Scores
) -> Gradients:
    """Return (dq, dk, dv) of the piece. `out` and `lse` are over all keys."""
    if isinstance(piece, Tile):
        return _kernel_for(q, piece, scores).backward(grad, q, k, v, out, lse, piece, scores)
    return piece.backward(grad, q, k, v, out, lse, scores)


class Kernel(NamedTuple):
    """A kernel for tiles.

    Attributes:
        forward, backward: as `forward_piece` and `backward_piece`, for tiles.
        dtypes: the precisions that it supports.
        masks: whether it supports tiles with a mask, and biases.
        shares_heads: whether it supports more query heads than key/value heads.
        varlen: whether one call computes documents and windows (`varlen.py`).
        whole: whether one call computes all scores between two shards (`flex.py`), instead of tiles.
        backend: its name in `torch.nn.functional.scaled_dot_product_attention`. None: it has none.
    """

    forward: Callable
    backward: Callable
    dtypes: tuple[torch.dtype, ...]
    masks: bool
    shares_heads: bool = True
    varlen: bool = False
    whole: bool = False
    backend: SDPBackend | None = None

    def runs(self, q: Tensor) -> bool:
        """Return True if it supports the precision and head size of the queries."""
        return q.dtype in self.dtypes and (not on_gpu(q) or q.shape[-1] % 8 == 0)

    def takes(self, q: Tensor, t: Tile, scores: Scores) -> bool:
        """Return True if it supports this tile with these scores."""
        bare = t.kind is not Kind.BAND and scores.slopes is None
        return self.runs(q) and scores.softcap is None and scores.mod is None and (self.masks or bare)


def _kernel_for(q: Tensor, t: Tile, scores: Scores) -> Kernel:
    configured = _configured(q, scores)
    return configured if configured.takes(q, t, scores) else _MATH


def _configured(q: Tensor, scores: Scores) -> Kernel:
    """Return the kernel of this run on the device of q."""
    return GPU_KERNELS[scores.kernel or "flash"] if on_gpu(q) else _CPU


# -------------------------------------------------------------------------------------------------- PyTorch's kernels


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, t: Tile, scores: Scores) -> tuple[Tensor, Tensor]:
    mask, causal = mask_of(q, t, scores)
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask)


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, t: Tile, scores: Scores
) -> Gradients:
    mask, causal = mask_of(q, t, scores)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask
    )


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, t: Tile, scores: Scores) -> tuple[Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, t.kind is Kind.CAUSAL)[:2]


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, t: Tile, scores: Scores
) -> Gradients:
    none = torch.zeros(2, dtype=torch.uint64, device=q.device)  # random state of dropout, which is off
    return aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, t.kind is Kind.CAUSAL, none, none
    )


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, t: Tile, scores: Scores) -> tuple[Tensor, Tensor]:
    causal = t.kind is Kind.CAUSAL
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
    return out, lse.view(q.shape[:-1])  # cuDNN returns [B, N, T, 1]


def _cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, t: Tile, scores: Scores
) -> Gradients:
    none = torch.zeros((), dtype=torch.int64, device=q.device)
    return aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse.contiguous()[..., None], none, none, None, None, None, q.shape[2], k.shape[2], 0.0,
        t.kind is Kind.CAUSAL,
    )  # fmt: skip


_LSE_ROWS = 32  # the efficient kernels pad the log-sum-exp to a multiple of this number of queries


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, t: Tile, scores: Scores) -> tuple[Tensor, Tensor]:
    k, v = for_each_query_head(q, k, v)
    causal = t.kind is Kind.CAUSAL
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)
    return out, lse[..., : q.shape[2]]


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, t: Tile, scores: Scores
) -> Gradients:
    wide_k, wide_v = for_each_query_head(q, k, v)
    none = torch.zeros((), dtype=torch.int64, device=q.device)
    lse = torch.nn.functional.pad(lse, (0, -q.shape[2] % _LSE_ROWS), value=torch.inf)
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad, q, wide_k, wide_v, None, out, lse.contiguous(), none, none, 0.0, [True, True, True, False],
        t.kind is Kind.CAUSAL,
    )  # fmt: skip
    return dq, *_over_query_heads(k, dk, dv)


def for_each_query_head(q: Tensor, *kv: Tensor) -> tuple[Tensor, ...]:
    """Repeat keys or values [B, K, S, D] to [B, N, S, D], for kernels without shared heads."""
    each = q.shape[1] // kv[0].shape[1]
    return kv if each == 1 else tuple(x.repeat_interleave(each, 1) for x in kv)


def _over_query_heads(k: Tensor, *gradients: Tensor) -> tuple[Tensor, ...]:
    """Sum gradients [B, N, S, D] to [B, K, S, D] in fp32 or wider: the backward of `for_each_query_head`."""
    if gradients[0].shape[1] == k.shape[1]:
        return gradients
    return tuple(x.unflatten(1, (k.shape[1], -1)).sum(2, dtype=widened(x.dtype)) for x in gradients)


# -------------------------------------------------------------------------------------------------------- the tables

_HALF = (torch.bfloat16, torch.float16)
_ANY = (*_HALF, torch.float32, torch.float64)
_CPU = Kernel(_cpu_forward, _cpu_backward, _ANY, masks=True)
# It supports every tile, but materialises its scores. It has no dtypes, so `_piece_lists` makes its tiles small.
_MATH = Kernel(math_forward, math_backward, (), masks=True, backend=SDPBackend.MATH)
GPU_KERNELS = {
    "flash": Kernel(
        _flash_forward, _flash_backward, _HALF, masks=False, varlen=True, backend=SDPBackend.FLASH_ATTENTION
    ),
    "cudnn": Kernel(_cudnn_forward, _cudnn_backward, _HALF, masks=False, backend=SDPBackend.CUDNN_ATTENTION),
    "efficient": Kernel(
        _efficient_forward,
        _efficient_backward,
        (*_HALF, torch.float32),
        masks=False,
        shares_heads=False,
        backend=SDPBackend.EFFICIENT_ATTENTION,
    ),
    "flex": Kernel(math_forward, math_backward, (*_HALF, torch.float32), masks=True, whole=True),
    "math": _MATH,
}
