"""Stochastic rounding to bf16. The random bits depend only on (tensor, element, step), so every mesh rounds alike.

A bf16 number has 8 significant bits. Rounded to nearest, an average that moves by less than 1/512 of itself a step
would never change (Gupta et al., 2015, arXiv:1502.02551). A second moment with beta2 = 0.999 moves this slowly.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ndtrain.optim.optimizer import TensorSlice

_LOW = 0xFFFF  # the low bits of an fp32 number, which bf16 does not have


class Place(NamedTuple):
    """The map from the elements of one slice to the elements of its whole tensor.

    Element p of an update is counted from the first element of the first slice. Modulo 2^32, its index in the tensor
    is `shift + p + (column + p) // length * jump`.

    Attributes:
        begin: the slice's first p.
        column, length, jump: for a tensor whose local rows of `length` elements have gaps of `jump` elements between
            them; (0, 1, 0): the slice is within one row.
    """

    begin: int
    shift: int
    column: int = 0
    length: int = 1
    jump: int = 0

    @classmethod
    def of(cls, piece: TensorSlice, origin: int) -> "Place":
        """Return the place of a slice.

        Args:
            origin: the position in the shard at which the update begins.
        """
        first, length, stride = piece.tensor.row_map
        begin, jump = piece.at.start - origin, stride - length
        row, column = divmod(piece.start, length)
        shift = _wrapped(first + piece.start + row * jump - begin)
        if column + piece.at.stop - piece.at.start <= length or not jump:
            return cls(begin, shift)
        return cls(begin, shift, column - begin, length, _wrapped(jump))


def _wrapped(x: int) -> int:
    """Return x modulo 2^32, as an int32."""
    return (x + (1 << 31)) % (1 << 32) - (1 << 31)


def keys(name: str, step: int) -> tuple[int, int]:
    """Return two int32 that identify a tensor at a step."""
    digest = hashlib.blake2b(f"{name}\0{step}".encode(), digest_size=8).digest()
    first, second = (int.from_bytes(digest[i : i + 4], "little", signed=True) for i in (0, 4))
    return first, second


def select(position: Tensor, rows: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return for each position the values of the last row that begins at or before it.

    Args:
        position: int32 [n], ascending.
        rows: each (begin, *values), scalars; begins ascend.
    """
    (_, *values), *others = rows
    for begin, *later in others:
        inside = position >= begin
        values = [torch.where(inside, a, b) for a, b in zip(later, values, strict=True)]
    return values


def element_index(position: Tensor, shift: Tensor, rows: Sequence[Tensor] = ()) -> Tensor:
    """Return the offsets of elements in their whole tensors, modulo 2^32, int32 [n]; see `Place`.

    Args:
        position: int32 [n].
        rows: (column, length, jump); empty: each slice is within one row.
    """
    index = position + shift
    if rows:
        column, length, jump = rows
        index.add_(torch.div(position + column, length, rounding_mode="trunc").mul_(jump))
    return index


def draw(index: Tensor, first: Tensor | int, second: Tensor | int) -> Tensor:
    """Return 32 random bits for each element, int32: Wellons' hash `lowbias32` of its index.

    The key is mixed in before the hash and half-way through.

    Args:
        index: int32 [n]; products wrap.
        first, second: the key, one for all elements or one for each.
    """
    x = index.bitwise_xor(first)
    x.bitwise_xor_(_shifted(x, 16)).mul_(0x21F0AAAD).bitwise_xor_(second)
    x.bitwise_xor_(_shifted(x, 15)).mul_(0x735A2D97)
    return x.bitwise_xor_(_shifted(x, 15))


def halves(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the upper and the lower 16 bits, each an int32 in [0, 2^16)."""
    return _shifted(bits, 16), bits & _LOW


def round_to_bf16(x: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 up or down to a bf16 number, stored as fp32, with probabilities that make the expected value x.

    Args:
        bits: int32 in [0, 2^16), uniform.
    """
    return x.view(torch.int32).add(bits).bitwise_and_(~_LOW).view(torch.float32)


def rounded(x: Tensor, piece: TensorSlice, step: int) -> Tensor:
    """Round the elements of a slice stochastically, fp32 [n] -> bf16 [n]."""
    place = Place.of(piece, piece.at.start)
    position = torch.arange(x.numel(), dtype=torch.int32, device=x.device)
    scalars = [torch.tensor(value, dtype=torch.int32, device=x.device) for value in place[1:]]
    index = element_index(position, scalars[0], scalars[1:] if place.jump else ())
    upper, _ = halves(draw(index, *keys(piece.tensor.name, step)))
    return round_to_bf16(x, upper).bfloat16()


def _shifted(x: Tensor, by: int) -> Tensor:
    """Return the logical shift x >> by, with zeros shifted in."""
    return (x >> by).bitwise_and_((1 << (32 - by)) - 1)
