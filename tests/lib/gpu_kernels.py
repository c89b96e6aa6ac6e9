"""GPU kernels of attention on a CPU: what they compute by their documentation, in plain operations.

`on_a_gpu` makes the attention core choose kernels as on a GPU. The flash kernel, which has no CPU implementation, is
replaced by functions with its signature. FlexAttention runs PyTorch's own reference of it.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as pytorch_flex

from ndtrain.model.attention import flex, kernels, varlen

ANY = (torch.bfloat16, torch.float32, torch.float64)
CALLS: list[dict] = []  # the arguments of the calls of the flash kernel's forward


@contextmanager
def on_a_gpu(name: str, compile_kernel: Callable | None = None) -> Iterator[list[dict]]:
    """Attention by the GPU kernel `flash` or `flex`, in any precision. Yields the calls of flash.

    Args:
        compile_kernel: compiles flex; None: as a graph of PyTorch's reference.
    """
    kernel = kernels.GPU_KERNELS[name]._replace(dtypes=ANY)
    flash = SimpleNamespace(
        _flash_attention_forward=flash_attention_forward, _flash_attention_backward=flash_attention_backward
    )
    CALLS.clear()
    with ExitStack() as stack:
        change = lambda *args: stack.enter_context(patch.object(*args))
        change(kernels, "_configured", lambda q, scores: kernel)
        change(varlen, "aten", flash)
        change(flex, "compile_kernel", compile_kernel or partial(torch.compile, backend="aot_eager", fullgraph=True))
        change(pytorch_flex, "_validate_device", lambda q, k, v: None)  # it refuses a backward on CPU
        for cache in (varlen.varlen_calls, flex._compiled, flex._flex_call):
            cache.cache_clear()
        yield CALLS


# ------------------------------------------------------------------------------------------------------ flash, varlen


def flash_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int,
    dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`aten._flash_attention_forward` with offsets: query [L, N, D], key and value [M, K, D]."""
    CALLS.append({"tokens": len(query), "left": window_size_left, "right": window_size_right})
    out, lse = torch.zeros_like(query), query.new_zeros(query.shape[1], len(query), dtype=wide(query))
    for q, k, seen in segments(
        query, key, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, window_size_left, window_size_right
    ):
        s = scored(query[q], key[k], seen, scale)
        out[q] = (s.softmax(-1) @ per_head(value[k], query)).transpose(0, 1).to(out.dtype)
        lse[:, q] = s.logsumexp(-1)
    assert dropout_p == 0 and not return_debug_mask
    return out, lse, torch.empty(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)


def flash_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, cum_seq_q: Tensor,
    cum_seq_k: Tensor, max_q: int, max_k: int, dropout_p: float, is_causal: bool, rng_state: Tensor, unused: Tensor, *,
    scale: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`aten._flash_attention_backward` with offsets. The kernel takes the log-sum-exp contiguous, [N, L]."""
    assert logsumexp.is_contiguous() and logsumexp.shape == (query.shape[1], len(query))
    dq, dk, dv = (torch.zeros_like(x) for x in (query, key, value))
    for q, k, seen in segments(
        query, key, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, window_size_left, window_size_right
    ):
        p = (scored(query[q], key[k], seen, scale) - logsumexp[:, q, None]).exp()
        grad, heads = grad_out[q].transpose(0, 1), key.shape[1]
        delta = (grad * out[q].transpose(0, 1)).sum(-1, keepdim=True)
        ds = p * (grad @ per_head(value[k], query).mT - delta) * (scale or query.shape[-1] ** -0.5)
        summed = lambda x, heads=heads: x.unflatten(0, (heads, -1)).sum(1).transpose(0, 1)
        dq[q] = (ds @ per_head(key[k], query)).transpose(0, 1)
        dk[k] = summed(ds.mT @ query[q].transpose(0, 1))
        dv[k] = summed(p.mT @ grad)
    return dq, dk, dv


def segments(query, key, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, left, right):
    """Checks the offsets. Yields for each segment its queries, its keys, and which pairs are visible."""
    for tokens, offsets, most in ((query, cum_seq_q, max_q), (key, cum_seq_k, max_k)):
        assert tokens.dim() == 3 and tokens.stride(-1) == 1
        assert offsets.dtype == torch.int32 and offsets.is_contiguous() and offsets[0] == 0
        assert offsets[-1] == len(tokens) and offsets.diff().max() == most and (offsets.diff() > 0).all()
    assert len(cum_seq_q) == len(cum_seq_k) and key.shape[1] <= query.shape[1]
    left, right = -1 if left is None else left, 0 if is_causal else -1 if right is None else right
    for (a, b), (c, d) in zip(cum_seq_q.unfold(0, 2, 1).tolist(), cum_seq_k.unfold(0, 2, 1).tolist(), strict=True):
        ahead = torch.arange(d - c) - torch.arange(b - a)[:, None] - ((d - c) - (b - a))  # 0: the aligned diagonal
        seen = ((left < 0) | (ahead >= -left)) & ((right < 0) | (ahead <= right))
        yield slice(a, b), slice(c, d), seen


def scored(q: Tensor, k: Tensor, seen: Tensor, scale: float | None) -> Tensor:
    """The masked scores of a segment [N, m, n]."""
    s = q.transpose(0, 1).to(wide(q)) @ per_head(k, q).to(wide(q)).mT * (scale or q.shape[-1] ** -0.5)
    return s.masked_fill(~seen, -torch.inf)


def per_head(kv: Tensor, q: Tensor) -> Tensor:
    """[n, K, D] -> [N, n, D] for the heads of q."""
    return kv.repeat_interleave(q.shape[1] // kv.shape[1], 1).transpose(0, 1)


def wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
