"""Stochastic rounding to bf16 whose draws are a pure function of (tensor, element, step): any mesh rounds alike.

A bf16 number has 8 significant bits: an average that moves by less than 1/512 of itself a step, as a second moment with
beta2 = 0.999 does, would stand still if it were rounded to the nearest (Gupta et al., 2015, arXiv:1502.02551).
"""

import hashlib

import torch
from torch import Tensor

from ndtrain.distributed.sharding import TensorLayout

_LOW = 0xFFFF  # the bits of an fp32 number that bf16 has no room for


def element_index(layout: TensorLayout, start: int, stop: int, device: torch.device) -> Tensor:
    """The offsets of the elements [start, stop) of a local tensor in the whole tensor, int64."""
    first, length, stride = layout.row_map
    local = torch.arange(start, stop, device=device)
    if length == stride:
        return local.add_(first)
    row = local.div(length, rounding_mode="floor")
    return local.add_(first).add_(row, alpha=stride - length)


def draw(name: str, step: int, index: Tensor) -> Tensor:
    """32 random bits for each element of a tensor at a step, int32: Wellons' hash `lowbias32` of its index. The key
    is mixed in before it and half-way through."""
    digest = hashlib.blake2b(f"{name}\0{step}".encode(), digest_size=8).digest()
    keys = [int.from_bytes(digest[i : i + 4], "little", signed=True) for i in (0, 4)]
    x = index.to(torch.int32).bitwise_xor_(keys[0])  # its low 32 bits; products wrap
    for shift, factor, key in ((16, 0x21F0AAAD, keys[1]), (15, 0x735A2D97, 0)):
        x.bitwise_xor_(_shifted(x, shift)).mul_(factor).bitwise_xor_(key)
    return x.bitwise_xor_(_shifted(x, 15))


def halves(bits: Tensor) -> tuple[Tensor, Tensor]:
    """The upper and the lower 16 bits, each an int32 in [0, 2^16)."""
    return _shifted(bits, 16), bits & _LOW


def round_to_bf16(x: Tensor, bits: Tensor) -> Tensor:
    """fp32 -> bf16, up or down with probabilities that make the expected value x.

    Args:
        bits: int32 in [0, 2^16), uniform.
    """
    return x.view(torch.int32).add(bits).bitwise_and_(~_LOW).view(torch.float32).to(torch.bfloat16)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Logical shift: x >> by with zeros shifted in."""
    return (x >> by).bitwise_and_((1 << (32 - by)) - 1)
