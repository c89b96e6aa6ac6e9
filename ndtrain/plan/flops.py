"""FLOPs of an operator call, from the shapes of its arguments. A multiply-add is two FLOPs."""

from typing import Any

import numpy as np
import torch

_PRODUCTS = {
    "mm": 0,
    "bmm": 0,
    "_scaled_mm": 0,
    "addmm": 1,
    "addmm_": 1,
    "baddbmm": 1,
    "baddbmm_": 1,
}  # -> first factor
_ATTENTION = ("_scaled_dot_product_", "_flash_attention_")
_FORWARD, _BACKWARD = 2, 5  # products of the size of the scores: in a backward the scores are computed again


def flops_of(func: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> tuple[str, int]:
    """("matmul" or "attention", FLOPs) of a call; ("", 0) where it multiplies no matrices. Of causal attention only the
    visible pairs count."""
    name = _name(func)
    if name in _PRODUCTS:
        a, b = args[_PRODUCTS[name]], args[_PRODUCTS[name] + 1]
        return "matmul", 2 * a.numel() * b.shape[-1]
    if not name.startswith(_ATTENTION):
        return "", 0
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    products = _BACKWARD if name.endswith("_backward") else _FORWARD
    return "attention", 2 * products * _scores(given) * given["query"].shape[-1]


def _scores(given: dict[str, Any]) -> int:
    """Visible scores of a call of an attention operator: of all rows and heads."""
    q, k, causal = given["query"], given["key"], given.get("is_causal", False)
    if given.get("cum_seq_q") is None:
        return q.shape[:2].numel() * _pairs(q.shape[-2], k.shape[-2], causal)
    segments = given["cum_seq_q"].numel() - 1  # of unknown lengths on the meta device: taken to be equal
    left, right = (-1 if (w := given.get(f"window_size_{side}")) is None else w for side in ("left", "right"))
    return segments * q.shape[1] * _band(q.shape[0] // segments, k.shape[0] // segments, left, 0 if causal else right)


def multiplies(func: torch._ops.OpOverload) -> bool:
    """Whether an operator multiplies matrices."""
    return _name(func) in _PRODUCTS or _name(func).startswith(_ATTENTION)


def _name(func: torch._ops.OpOverload) -> str:
    return func._schema.name.partition("::")[2]


def _pairs(queries: int, keys: int, causal: bool) -> int:
    """Visible pairs of a query and a key. Query i sees the keys up to i."""
    if not causal:
        return queries * keys
    first = min(queries, keys)
    return first * (first + 1) // 2 + (queries - first) * keys


def _band(queries: int, keys: int, left: int, right: int) -> int:
    """Visible pairs of a window as in `attention/varlen.py`, aligned at the last query and the last key."""
    at = np.arange(queries) + keys - queries
    first = np.maximum(at - left, 0) if left >= 0 else np.zeros_like(at)
    last = np.minimum(at + right, keys - 1) if right >= 0 else np.full_like(at, keys - 1)
    return int(np.maximum(last - first + 1, 0).sum())
