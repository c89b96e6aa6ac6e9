"""Inputs of a benchmarked collective, and the check of its result.

Every operation is described by one tensor, the **full** one, of S bytes on a rank, and by its n equal **pieces**.
Tensors hold integers, so sums are exact in any order. They repeat a pattern drawn from the rank's number, so each rank
can compute the expected result alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import add

import torch
import torch.distributed as dist
from torch import Tensor

PERIOD = 65537  # elements; a prime, so that no two pieces of a usual size begin with the same numbers


class Pattern:
    """A tensor of any length that repeats a block of numbers.

    Args:
        block: one period, fp32.
    """

    def __init__(self, block: Tensor):
        self.block = block

    @classmethod
    def of_rank(cls, rank: int) -> "Pattern":
        """Draw integers from -8 to 8, seeded by the rank."""
        generator = torch.Generator().manual_seed(rank)
        return cls(torch.randint(-8, 9, (PERIOD,), generator=generator).float())

    def __add__(self, other: "Pattern") -> "Pattern":
        return Pattern(self.block + other.block)

    def write(self, x: Tensor) -> None:
        """Fill x [k] from the beginning of the pattern."""
        for part, block in self._against(x, 0):
            part.copy_(block)

    def matches(self, x: Tensor, start: int = 0) -> bool:
        """Return True if x [k] equals the pattern from element `start` on, exactly."""
        return all(bool((part == block).all()) for part, block in self._against(x, start))

    def _against(self, x: Tensor, start: int) -> list[tuple[Tensor, Tensor]]:
        """Split x into two parts, whole periods and the rest, each with the block to compare it with."""
        block = self.block.to(x.device).roll(-start)
        whole = x.numel() // block.numel() * block.numel()
        rest = x[whole:]
        return [(x[:whole].view(-1, block.numel()), block), (rest, block[: rest.numel()])]


@dataclass(frozen=True)
class Setting:
    """The ranks, the size and the contents of an operation's tensors.

    Attributes:
        group: the ranks that take part.
        count: elements of the full tensor, a multiple of the group's size.
        device: the tensors' device.
        patterns: the input of each rank of the group.
    """

    group: dist.ProcessGroup
    count: int
    device: torch.device
    patterns: Sequence[Pattern]

    @property
    def n(self) -> int:
        return self.group.size()

    @property
    def me(self) -> int:
        return self.group.rank()

    @property
    def share(self) -> int:
        """Elements of a piece."""
        return self.count // self.n

    @property
    def mine(self) -> Pattern:
        return self.patterns[self.me]

    @cached_property
    def total(self) -> Pattern:
        return reduce(add, self.patterns)

    def full(self) -> Tensor:
        return torch.empty(self.count, device=self.device)

    def piece(self) -> Tensor:
        return torch.empty(self.share, device=self.device)

    def pieces(self, full: Tensor) -> list[Tensor]:
        return list(full.view(self.n, -1))


@dataclass
class Form:
    """One way to run an operation: the call, and the tensor that holds the result afterwards."""

    call: Callable[[], object]
    result: Tensor


@dataclass
class Case:
    """An operation on this rank, ready to run in each of its forms.

    Attributes:
        forms: "torch", PyTorch's plain call, and "ours" if `ndtrain.mesh.collectives` has its own.
        expected: the correct result in equal pieces: for each, a pattern and the element it begins at. Empty if this
            rank gets no result.
        given: input tensors and their contents before a call.
        blank: tensors that are only written.
    """

    forms: dict[str, Form]
    expected: list[tuple[Pattern, int]]
    given: list[tuple[Tensor, Pattern]] = field(default_factory=list)
    blank: list[Tensor] = field(default_factory=list)

    def reset(self) -> None:
        """Restore the inputs and fill the outputs with NaN, so that no old result can pass."""
        for x in self.blank:
            x.fill_(torch.nan)
        for x, pattern in self.given:
            pattern.write(x)

    def once(self, name: str) -> Tensor:
        """Reset, call a form once and return the result."""
        self.reset()
        self.forms[name].call()
        return self.forms[name].result

    def right(self, name: str) -> bool:
        """Return True if one call of a form gives the right result, to the last element."""
        result = self.once(name)
        if not self.expected:
            return True
        pieces = result.view(len(self.expected), -1)
        return all(p.matches(x, start) for x, (p, start) in zip(pieces, self.expected, strict=True))

    def silence(self) -> None:
        """Set the inputs to zero, so that repeated sums in place stay finite."""
        for x, _ in self.given:
            x.zero_()
