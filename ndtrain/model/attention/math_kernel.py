"""An attention kernel for tiles, written in plain PyTorch operations.

It supports every operation on scores, and is the reference for the other kernels. It materialises the scores of a tile.

Shape legend: B batch, T time, S time of the keys, N query heads, K key/value heads, D head_dim.
"""

from functools import lru_cache

import torch
from torch import Tensor

from ndtrain.model.attention.mods import Places, apply_score, score_gradient
from ndtrain.model.attention.scores import Scores
from ndtrain.model.attention.tiles import Kind, Tile

Gradients = tuple[Tensor, Tensor, Tensor]  # of q, k, v


def math_forward(q: Tensor, k: Tensor, v: Tensor, t: Tile, scores: Scores) -> tuple[Tensor, Tensor]:
    """Return (output [B, N, T, D], log-sum-exp [B, N, T]). A query that sees no key has output 0, log-sum-exp -inf."""
    s, _, _ = _changed_scores(q, k, t, scores)
    lse = s.logsumexp(-1)
    return (_by_kv_head(_probabilities(s, lse), k) @ v.to(s.dtype)).view_as(q), lse


def math_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, t: Tile, scores: Scores
) -> Gradients:
    """Return (dq, dk, dv) of the tile. `out` and `lse` are over all keys."""
    s, tanh, before_mod = _changed_scores(q, k, t, scores)
    p = _probabilities(s, lse)
    wide, scale = p.dtype, q.shape[-1] ** -0.5
    grad, k_wide, q_wide = grad.to(wide), k.to(wide), q.to(wide)
    delta = (grad * out.to(wide)).sum(-1, keepdim=True)
    dv = _by_kv_head(p, k).mT @ _by_kv_head(grad, k)
    ds = (_by_kv_head(grad, k) @ v.to(wide).mT).view_as(p).sub_(delta).mul_(p)
    if before_mod is not None:
        ds = score_gradient(scores.mod.score, before_mod, _places(q, t, scores), ds)
    if tanh is not None:
        ds.mul_(tanh.square_().neg_().add_(1))
    ds = _by_kv_head(ds.mul_(scale), k)
    return (ds @ k_wide).view_as(q), ds.mT @ _by_kv_head(q_wide, k), dv


def _changed_scores(q: Tensor, k: Tensor, t: Tile, scores: Scores) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return (scores [B, N, T, S] in fp32 or wider, the softcap's tanh or None, the scores before the mod or None)."""
    wide = widened(q.dtype)
    s = _by_kv_head(q.to(wide), k) @ k.to(wide).mT
    s = s.view(*q.shape[:-1], -1).mul_(q.shape[-1] ** -0.5)
    tanh = before_mod = None
    if scores.softcap is not None:
        tanh = s.div_(scores.softcap).tanh_()
        s = tanh * scores.softcap
    if scores.slopes is not None:
        s.add_(_alibi(q, t, scores))
    mod = scores.mod
    if mod is not None and mod.score is not None:
        before_mod, s = s, apply_score(mod.score, s, _places(q, t, scores))
        s = s.clone() if s.data_ptr() == before_mod.data_ptr() else s
    if mod is not None and mod.mask is not None:
        s.masked_fill_(~mod.mask(*_places(q, t, scores)), -torch.inf)
    if t.kind is not Kind.FULL:
        s.masked_fill_(_hidden(q, t), -torch.inf)
    return s, tanh, before_mod


def _probabilities(s: Tensor, lse: Tensor) -> Tensor:
    """Return exp(s - lse), written to the memory of s. It is 0 where a query sees no key."""
    return s.sub_(lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp_()


def _by_kv_head(x: Tensor, k: Tensor) -> Tensor:
    """Reshape [B, N, T, *] to [B, K, N/K * T, *]: the queries of a key/value head become the rows of one matrix."""
    B, N, T, _ = x.shape
    return x.reshape(B, k.shape[1], N // k.shape[1] * T, x.shape[-1])


def _places(q: Tensor, t: Tile, scores: Scores) -> Places:
    """Return the batch row, head, query and key of each score of the queries q in a tile."""
    count = lambda first, n, step=1: first + step * torch.arange(n, device=q.device)
    (B, N), (m, n) = q.shape[:2], t.shape
    query, key = count(t.start, m, t.stride), count(t.start - t.distance, n, t.stride)
    return Places.of(count(t.rows.start or 0, B), count(scores.first_head, N), query, key)


# ------------------------------------------------------------------------------------------------- masks and biases


def mask_of(q: Tensor, t: Tile, scores: Scores) -> tuple[Tensor | None, bool]:
    """Return (additive mask or None, True if PyTorch's kernel should mask causally)."""
    if t.kind is not Kind.BAND and scores.slopes is None:
        return None, t.kind is Kind.CAUSAL
    bias = q.new_zeros(1, *t.shape, dtype=widened(q.dtype)) if scores.slopes is None else _alibi(q, t, scores)
    if t.kind is not Kind.FULL:
        bias.masked_fill_(_hidden(q, t), -torch.inf)
    return bias.expand(1, *bias.shape), False


def _alibi(q: Tensor, t: Tile, scores: Scores) -> Tensor:
    """Return the ALiBi term of the scores, [N, T, S]."""
    slopes = on_device(scores.local_slopes(q.shape[1]), widened(q.dtype), q.device)
    return -slopes[:, None, None] * (t.distance + t.stride * _back(q, t))


def _hidden(q: Tensor, t: Tile) -> Tensor:
    """Return True for each pair outside the band of a tile, [T, S]."""
    back_TS = _back(q, t)
    return (back_TS < -t.high) | (back_TS > -t.low)


def _back(q: Tensor, t: Tile) -> Tensor:
    """Return the index of the query minus the index of the key, both counted within the tile, [T, S]."""
    m, n = t.shape
    return torch.arange(m, device=q.device)[:, None] - torch.arange(n, device=q.device)


@lru_cache(maxsize=64)  # a copy from host memory makes the host wait for the device
def on_device(slopes: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the slopes as a tensor on the device."""
    return torch.tensor(slopes, dtype=dtype, device=device)


def widened(dtype: torch.dtype) -> torch.dtype:
    """Return the precision for sums: fp32 or wider."""
    return torch.promote_types(dtype, torch.float32)
