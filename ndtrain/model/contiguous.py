"""Concatenation without a copy, for tensors that are adjacent in one storage."""

from collections.abc import Sequence

import torch
from torch import Tensor


def cat_if_contiguous(parts: Sequence[Tensor], dim: int) -> Tensor | None:
    """Return the concatenation of `parts` along `dim` as a view, or None if they are not adjacent in one storage."""
    first, memory = parts[0], parts[0].untyped_storage()._cdata  # meta tensors have no address
    start, strides = first.storage_offset(), first.stride()
    size, at = 0, start
    for x in parts:
        if x.storage_offset() != at or x.stride() != strides or x.untyped_storage()._cdata != memory:
            return None
        size += x.shape[dim]
        at = start + size * strides[dim]
    shape = list(first.shape)
    shape[dim] = size
    return first.as_strided(shape, strides, start)


def cat(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate `parts` along `dim`: a view if they are adjacent in one storage, otherwise a copy."""
    whole = cat_if_contiguous(parts, dim)
    return torch.cat(list(parts), dim) if whole is None else whole
