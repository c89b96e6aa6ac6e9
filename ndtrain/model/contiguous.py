"""Concatenation without a copy, for tensors that are adjacent in one storage."""

from collections.abc import Sequence

import torch
from torch import Tensor


def cat_if_contiguous(parts: Sequence[Tensor], dim: int) -> Tensor | None:
    """The concatenation of `parts` along `dim` as a view. None if they are not adjacent in one storage."""
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
    """The concatenation of `parts` along `dim`: a view if they are adjacent in one storage, else a copy."""
    whole = cat_if_contiguous(parts, dim)
    return torch.cat(list(parts), dim) if whole is None else whole


def cat_groups(parts: Sequence[Tensor], sizes: Sequence[int], dim: int) -> list[Tensor]:
    """The concatenation of each group of consecutive `parts`.

    Args:
        sizes: of the groups.
    """
    rest = iter(parts)
    groups = [[next(rest) for _ in range(size)] for size in sizes]
    return [group[0] if len(group) == 1 else cat(group, dim) for group in groups]
