"""Tensors that lie side by side in one memory, as one."""

from collections.abc import Sequence

import torch
from torch import Tensor


def joined(parts: Sequence[Tensor], dim: int) -> Tensor | None:
    """All `parts` as one tensor without a copy; None where they do not follow each other along `dim` in one memory."""
    first, memory = parts[0], parts[0].untyped_storage().data_ptr()
    start, strides = first.storage_offset(), first.stride()
    size, at = 0, start
    for x in parts:
        if x.storage_offset() != at or x.stride() != strides or x.untyped_storage().data_ptr() != memory:
            return None
        size += x.shape[dim]
        at = start + size * strides[dim]
    shape = list(first.shape)
    shape[dim] = size
    return first.as_strided(shape, strides, start)


def side_by_side(parts: Sequence[Tensor], dim: int) -> Tensor:
    """All `parts` as one tensor; a copy only where they are not `joined`."""
    whole = joined(parts, dim)
    return torch.cat(list(parts), dim) if whole is None else whole
