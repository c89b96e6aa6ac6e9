"""FLOPs of an operator call, from the shapes of its arguments. A multiply-add is two FLOPs."""

from typing import Any

import numpy as np
import torch

_PRODUCTS = {
    "mm": 0,
    "bmm": 0,
    "_scaled_mm": 0,
    "_grouped_mm": 0,  # rows by group; the matrices are [groups, in, out]
    "addmm": 1,
    "addmm_": 1,
    "baddbmm": 1,
    "baddbmm_": 1,
}  # name -> position of the first factor
_ATTENTION = "_scaled_dot_product_"
_VARLEN_ATTENTION = "_flash_attention_"  # segments of different lengths (`model/attention/varlen.py`)
_FORWARD, _BACKWARD = 2, 5  # matmuls with the scores; the backward computes the scores again


def flops_of(func: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> tuple[str, int]:
    """Return ("matmul" or "attention", FLOPs) of a call, or ("", 0) if it multiplies no matrices. Causal attention
    counts only visible pairs."""
    name = _name(func)
    if name in _PRODUCTS:
        a, b = args[_PRODUCTS[name]], args[_PRODUCTS[name] + 1]
        return "matmul", 2 * a.numel() * b.shape[-1]
    if not multiplies(func):
        return "", 0
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    q, products = given["query"], _BACKWARD if name.endswith("_backward") else _FORWARD
    if name.startswith(_ATTENTION):
        pairs = q.shape[:2].numel() * _pairs(q, given["key"], given.get("is_causal", False))
    else:
        pairs = q.shape[1] * _varlen_pairs(given)
    return "attention", 2 * products * pairs * q.shape[-1]


def multiplies(func: torch._ops.OpOverload) -> bool:
    """Return True if an operator multiplies matrices."""
    return _name(func) in _PRODUCTS or _name(func).startswith((_ATTENTION, _VARLEN_ATTENTION))


def _name(func: torch._ops.OpOverload) -> str:
    return func._schema.name.partition("::")[2]


def _pairs(q: torch.Tensor, k: torch.Tensor, causal: bool) -> int:
    """Count the visible pairs of a query and a key. With causal attention, query i sees the keys up to i."""
    queries, keys = q.shape[-2], k.shape[-2]
    if not causal:
        return queries * keys
    first = min(queries, keys)
    return first * (first + 1) // 2 + (queries - first) * keys


def _varlen_pairs(given: dict[str, Any]) -> int:
    """Count the visible pairs of one head in a call over segments. The indices of their first tokens are on the host.

    In a segment of m queries and n keys, query i sees key j if `i + n - m - left <= j <= i + n - m + right`.
    """
    left, right = (given.get(f"window_size_{side}") for side in ("left", "right"))
    right = 0 if given["is_causal"] else right
    total, bounds = 0, (np.diff(given[f"cum_seq_{side}"].numpy()) for side in "qk")
    for queries, keys in zip(*bounds, strict=True):
        last = np.arange(queries) + keys - queries
        first_key = np.maximum(0, last - left) if left is not None and left >= 0 else 0
        last_key = np.minimum(keys - 1, last + right) if right is not None and right >= 0 else keys - 1
        total += int(np.maximum(0, last_key - first_key + np.ones_like(last)).sum())
    return total
