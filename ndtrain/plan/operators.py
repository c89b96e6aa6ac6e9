"""The work of one operator call: its FLOPs, and the memory that it reads and writes."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ndtrain.parallel.allocations import storage_id
from ndtrain.plan.events import Kernel

Func = torch._ops.OpOverload

DTYPE_NAMES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "bf16",
    torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8",
}  # fmt: skip
_NO_KERNELS = ("c10d", "_c10d_functional", "profiler")  # namespaces of calls that launch no kernel here
# These compute nothing, although PyTorch does not classify them as views.
_FREE = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "detach", "alias",
    "lift_fresh", "resize_", "set_", "_local_scalar_dense", "promote_types",
}  # fmt: skip
_NO_READS = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}  # use only a tensor's shape
_OVERWRITES = {"copy_", "fill_", "zero_"}  # write their first argument without reading it
# These access only the rows or elements of their first argument that an index selects.
_READS_SOME = {"embedding", "gather", "index_select", "index"}
_WRITES_SOME = {"index_put_", "_index_put_impl_", "index_add_", "scatter_add_", "index_copy_"}
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


class Part(NamedTuple):
    """A part of a storage that an operator reads or writes.

    Attributes:
        start: offset in the storage, in elements.
        bytes: size; an expanded dim counts once.
    """

    storage: int
    start: int
    bytes: int

    @classmethod
    def of(cls, x: Tensor) -> "Part":
        numel = math.prod(int(n) for n, stride in zip(x.shape, x.stride(), strict=True) if stride)
        return cls(storage_id(x), int(x.storage_offset()), numel * x.element_size())


class Access(NamedTuple):
    """The memory that one call reads and writes."""

    reads: tuple[Part, ...]
    writes: tuple[Part, ...]

    @property
    def bytes(self) -> int:
        return sum(p.bytes for p in {*self.reads}) + sum(p.bytes for p in {*self.writes})


# -------------------------------------------------------------------------------------------------------------- FLOPs


def flops_of(func: Func, args: tuple, kwargs: dict[str, Any]) -> tuple[str, int]:
    """Return ("matmul" or "attention", FLOPs) of a call, or ("", 0) if it multiplies no matrices. Causal attention
    counts only visible pairs."""
    name = _name(func)
    if name in _PRODUCTS:
        a, b = _factors(func, args)
        return "matmul", 2 * a.numel() * b.shape[-1]
    if not multiplies(func):
        return "", 0
    given = _given(func, args, kwargs)
    q, products = given["query"], _BACKWARD if name.endswith("_backward") else _FORWARD
    if name.startswith(_ATTENTION):
        pairs = q.shape[:2].numel() * _pairs(q, given["key"], given.get("is_causal", False))
    else:
        pairs = q.shape[1] * _varlen_pairs(given)
    return "attention", 2 * products * pairs * q.shape[-1]


def multiplies(func: Func) -> bool:
    """Return True if an operator multiplies matrices."""
    return _name(func) in _PRODUCTS or _name(func).startswith((_ATTENTION, _VARLEN_ATTENTION))


def _factors(func: Func, args: tuple) -> tuple[Tensor, Tensor]:
    """Return the two factors of a matmul."""
    first = _PRODUCTS[_name(func)]
    return args[first], args[first + 1]


def _pairs(q: Tensor, k: Tensor, causal: bool) -> int:
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


# ------------------------------------------------------------------------------------------------------------ kernels


def is_free(func: Func) -> bool:
    """Return True if a call launches no kernel: views, allocations, annotations, and calls recorded as `Collective`."""
    return func.is_view or func.namespace in _NO_KERNELS or _name(func) in _FREE


def copies(func: Func) -> bool:
    """Return True if a call copies a tensor (`copy_` or `clone`)."""
    return _name(func) in ("copy_", "clone")


def kernel_of(func: Func, args: tuple, kwargs: dict[str, Any], access: Access) -> Kernel:
    """Return the kernel of a call that is not free."""
    kind, flops = flops_of(func, args, kwargs)
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if kind == "matmul":
        a, b = _factors(func, args)
        return Kernel(kind, flops, access.bytes, DTYPE_NAMES[a.dtype], _matmul_shape(a, b), _name(func))
    if kind == "attention":
        q, k = (_given(func, args, kwargs)[name] for name in ("query", "key"))
        if q.ndim == 3:  # segments: tokens, heads, head_dim
            shape = (1, q.shape[1], q.shape[0], k.shape[0], q.shape[2])
        else:
            shape = (*q.shape[:3], k.shape[2], q.shape[3])
        return Kernel(kind, flops, access.bytes, DTYPE_NAMES[q.dtype], shape, _name(func))
    floats = [DTYPE_NAMES[x.dtype] for x in tensors if x.dtype in DTYPE_NAMES]
    return Kernel("memory", 0, access.bytes, floats[0] if floats else "fp32", (), _name(func))


def access_of(func: Func, args: tuple, kwargs: dict[str, Any], out: Any) -> Access:
    """Return the memory that a call reads and writes."""
    name = _name(func)
    made = [Part.of(x) for x in tree_leaves(out) if isinstance(x, Tensor)]
    given = [(arg, Part.of(x)) for arg, x in _tensors(func, args, kwargs)]
    if name in _NO_READS:
        return Access((), tuple(made))
    if name in _READS_SOME | _WRITES_SOME:
        return _of_some(name, [part for _, part in given], made)
    written = [part for arg, part in given if arg.alias_info is not None and arg.alias_info.is_write]
    unread = {arg.name for arg, _ in given if arg.is_out}
    if name in _OVERWRITES or kwargs.get("beta", 1) == 0:
        unread.add(func._schema.arguments[0].name)
    reads = tuple(part for arg, part in given if arg.name not in unread)
    return Access(reads, tuple(dict.fromkeys([*written, *made])))


def _of_some(name: str, given: list[Part], made: list[Part]) -> Access:
    """Return the access of a call that touches only some rows of its first argument.

    The bytes that it touches are the size of the result for a read, and the size of the given values for a write.
    """
    whole, *others = given
    if name in _READS_SOME:
        return Access((whole._replace(bytes=made[0].bytes), *others), tuple(made))
    touched = whole._replace(bytes=others[-1].bytes)
    return Access((touched, *others), (touched,))


def _tensors(func: Func, args: tuple, kwargs: dict[str, Any]) -> Iterator[tuple[Any, Tensor]]:
    """Yield (argument of the schema, tensor) for each given tensor. Lists of tensors are flattened."""
    arguments = {a.name: a for a in func._schema.arguments}
    for name, value in _given(func, args, kwargs).items():
        for x in tree_leaves(value):
            if isinstance(x, Tensor):
                yield arguments[name], x


def _given(func: Func, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs


def _matmul_shape(a: Tensor, b: Tensor) -> tuple[int, int, int, int]:
    """Return (batch, M, N, K). For a grouped matmul, M is the mean over the groups, rounded up."""
    if a.ndim < b.ndim:
        return b.shape[0], -(-a.shape[0] // b.shape[0]), b.shape[2], b.shape[1]
    return math.prod(a.shape[:-2]), a.shape[-2], b.shape[-1], a.shape[-1]


def _name(func: Func) -> str:
    return func._schema.name.partition("::")[2]
