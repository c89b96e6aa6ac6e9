"""FLOPs of an operator call, from the shapes of its arguments. A multiply-add is two FLOPs."""

from typing import Any

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
_ATTENTION = "_scaled_dot_product_"
_FORWARD, _BACKWARD = 2, 5  # products of the size of the scores: in a backward the scores are computed again


def flops_of(func: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> tuple[str, int]:
    """("matmul" or "attention", FLOPs) of a call; ("", 0) where it multiplies no matrices. Of causal attention only the
    visible pairs count."""
    name = _name(func)
    if name in _PRODUCTS:
        a, b = args[_PRODUCTS[name]], args[_PRODUCTS[name] + 1]
        return "matmul", 2 * a.numel() * b.shape[-1]
    if name.startswith(_ATTENTION):
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        q, k, causal = given["query"], given["key"], given.get("is_causal", False)
        products = _BACKWARD if name.endswith("_backward") else _FORWARD
        return "attention", 2 * products * q.shape[:2].numel() * _pairs(q, k, causal) * q.shape[-1]
    return "", 0


def multiplies(func: torch._ops.OpOverload) -> bool:
    """Whether an operator multiplies matrices."""
    return _name(func) in _PRODUCTS or _name(func).startswith(_ATTENTION)


def _name(func: torch._ops.OpOverload) -> str:
    return func._schema.name.partition("::")[2]


def _pairs(q: torch.Tensor, k: torch.Tensor, causal: bool) -> int:
    """Visible pairs of a query and a key. Query i sees the keys up to i."""
    queries, keys = q.shape[-2], k.shape[-2]
    if not causal:
        return queries * keys
    first = min(queries, keys)
    return first * (first + 1) // 2 + (queries - first) * keys
