"""The kernels that compute one tile of attention, forward and backward.

Every kernel returns the log-sum-exp of the scores beside the output. Its backward takes the output and log-sum-exp over
*all* keys. A GPU has several kernels (`GPU_KERNELS`). A run uses one of them, and `math`, which is written here, for
tiles that the other does not support. No kernel makes the host wait for the device.

Shape legend: B batch, T time, S time of the keys, N query heads, K key/value heads, D head_dim.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from ndtrain.model.attention.scores import Scores
from ndtrain.model.attention.tiles import BLOCK, Kind, Slices, Tile, tiles
from ndtrain.model.device_kind import on_gpu

aten = torch.ops.aten
Gradients = tuple[Tensor, Tensor, Tensor]  # of q, k, v


# ----------------------------------------------------------------------------------------------------------- one tile


def tiles_for(scores: Scores, queries: Slices, keys: Slices, length: int, like: Tensor) -> tuple[Tile, ...]:
    """The tiles for these scores, for queries with the device, precision and head size of `like`."""
    materialised = scores.softcap is not None or scores.slopes is not None or not _configured(like, scores).runs(like)
    return tiles(queries, keys, length, scores.documents, scores.window, BLOCK if materialised else None)


def forward_tile(q: Tensor, k: Tensor, v: Tensor, t: Tile, scores: Scores) -> tuple[Tensor, Tensor]:
    """Attention of q [B, N, T, D] over k, v [B, K, S, D]: (output [B, N, T, D], log-sum-exp [B, N, T])."""
    return _kernel_for(q, t, scores).forward(q, k, v, t, scores)


def backward_tile(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, t: Tile, scores: Scores
) -> Gradients:
    """(dq, dk, dv) of the tile. `out` and `lse` are over all keys."""
    return _kernel_for(q, t, scores).backward(grad, q, k, v, out, lse, t, scores)


class Kernel(NamedTuple):
    """A kernel for tiles.

    Attributes:
        forward, backward: as `forward_tile` and `backward_tile`.
        dtypes: the precisions that it supports.
        masks: whether it supports tiles with a mask, and biases.
        shares_heads: whether it supports more query heads than key/value heads.
        backend: its name in `torch.nn.functional.scaled_dot_product_attention`; None: it has none.
    """

    forward: Callable
    backward: Callable
    dtypes: tuple[torch.dtype, ...]
    masks: bool
    shares_heads: bool = True
    backend: SDPBackend | None = None

    def runs(self, q: Tensor) -> bool:
        """Whether it supports the precision and head size of the queries."""
        return q.dtype in self.dtypes and (not on_gpu(q) or q.shape[-1] % 8 == 0)

    def takes(self, q: Tensor, t: Tile, scores: Scores) -> bool:
        """Whether it supports this tile with these scores."""
        bare = t.kind is not Kind.BAND and scores.slopes is None
        return self.runs(q) and scores.softcap is None and (self.masks or bare)


def _kernel_for(q: Tensor, t: Tile, scores: Scores) -> Kernel:
    configured = _configured(q, scores)
    return configured if configured.takes(q, t, scores) else _MATH


def _configured(q: Tensor, scores: Scores) -> Kernel:
    """The kernel of this run on the device of q."""
    return GPU_KERNELS[scores.kernel or "flash"] if on_gpu(q) else _CPU


# -------------------------------------------------------------------------------------------------- PyTorch's kernels


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, t: Tile, scores: Scores) -> tuple[Tensor, Tensor]:
    mask, causal = _mask_of(q, t, scores)
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask)


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, t: Tile, scores: Scores
) -> Gradients:
    mask, causal = _mask_of(q, t, scores)
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
    k, v = for_each_query_head(q, k, v)
    causal = t.kind is Kind.CAUSAL
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
    return out, lse.view(q.shape[:-1])  # cuDNN returns [B, N, T, 1]


def _cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, t: Tile, scores: Scores
) -> Gradients:
    wide_k, wide_v = for_each_query_head(q, k, v)
    none = torch.zeros((), dtype=torch.int64, device=q.device)
    dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, wide_k, wide_v, out, lse.contiguous()[..., None], none, none, None, None, None, q.shape[2],
        k.shape[2], 0.0, t.kind is Kind.CAUSAL,
    )  # fmt: skip
    return dq, *_over_query_heads(k, dk, dv)


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
    """Keys or values [B, K, S, D] -> [B, N, S, D], for kernels without shared heads."""
    each = q.shape[1] // kv[0].shape[1]
    return kv if each == 1 else tuple(x.repeat_interleave(each, 1) for x in kv)


def _over_query_heads(k: Tensor, *gradients: Tensor) -> tuple[Tensor, ...]:
    """The backward of `for_each_query_head`: gradients [B, N, S, D] -> [B, K, S, D], summed in fp32 or wider."""
    if gradients[0].shape[1] == k.shape[1]:
        return gradients
    return tuple(x.unflatten(1, (k.shape[1], -1)).sum(2, dtype=widened(x.dtype)) for x in gradients)


# ------------------------------------------------------------------------------------------------- masks and biases


def _mask_of(q: Tensor, t: Tile, scores: Scores) -> tuple[Tensor | None, bool]:
    """(additive mask or None, whether PyTorch's kernel masks causally)."""
    if t.kind is not Kind.BAND and scores.slopes is None:
        return None, t.kind is Kind.CAUSAL
    bias = _bias(q, t, scores)
    return bias.expand(1, *bias.shape[-3:]), False


def _bias(q: Tensor, t: Tile, scores: Scores) -> Tensor:
    """The additive bias of the scores [N or 1, T, S]: the ALiBi term, and -inf for masked pairs."""
    m, n = t.shape
    wide = widened(q.dtype)
    back_TS = torch.arange(m, device=q.device)[:, None] - torch.arange(n, device=q.device)
    if scores.slopes is None:
        bias = q.new_zeros(1, m, n, dtype=wide)
    else:
        bias = -_on_device(scores.slopes, wide, q.device)[:, None, None] * (t.distance + t.stride * back_TS)
    if t.kind is not Kind.FULL:
        bias.masked_fill_((back_TS < -t.high) | (back_TS > -t.low), -torch.inf)
    return bias


@lru_cache(maxsize=64)  # each copy from host memory makes the host wait for the device
def _on_device(slopes: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(slopes, dtype=dtype, device=device)


def widened(dtype: torch.dtype) -> torch.dtype:
    """The precision of sums: fp32 or wider."""
    return torch.promote_types(dtype, torch.float32)


# --------------------------------------------------------------------------------------------------- plain arithmetic


def _math_scores(q: Tensor, k: Tensor, t: Tile, scores: Scores) -> tuple[Tensor, Tensor | None]:
    """(scores [B, N, T, S] in fp32 or wider, the tanh of the softcap or None)."""
    wide = widened(q.dtype)
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
) -> Gradients:
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


# -------------------------------------------------------------------------------------------------------- the tables

_HALF = (torch.bfloat16, torch.float16)
_ANY = (*_HALF, torch.float32, torch.float64)
_CPU = Kernel(_cpu_forward, _cpu_backward, _ANY, masks=True)
# It supports every tile, but materialises its scores. Without dtypes, `tiles_for` makes the tiles small.
_MATH = Kernel(_math_forward, _math_backward, (), masks=True, backend=SDPBackend.MATH)
GPU_KERNELS = {
    "flash": Kernel(_flash_forward, _flash_backward, _HALF, masks=False, backend=SDPBackend.FLASH_ATTENTION),
    "cudnn": Kernel(_cudnn_forward, _cudnn_backward, _HALF, masks=False, backend=SDPBackend.CUDNN_ATTENTION),
    "efficient": Kernel(
        _efficient_forward,
        _efficient_backward,
        (*_HALF, torch.float32),
        masks=False,
        shares_heads=False,
        backend=SDPBackend.EFFICIENT_ATTENTION,
    ),
    "math": _MATH,
}
