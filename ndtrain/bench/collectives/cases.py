"""What a collective works on in a benchmark, and how its result is judged.

Every operation is described by one tensor, the **full** one, of S bytes on a rank, and its n equal **pieces**. Tensors
hold whole numbers, so that sums are exact in whatever order they are taken, and repeat a pattern that is drawn from the
rank's number: what an operation must give is then computed on every rank alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import add

import torch
import torch.distributed as dist
from torch import Tensor

PERIOD = 65537  # elements; a prime, so that no two pieces of a usual size begin alike


class Pattern:
    """Numbers [period] repeated without end, which stand for a tensor of any length.

    Args:
        block: one period, fp32.
    """

    def __init__(self, block: Tensor):
        self.block = block

    @classmethod
    def of_rank(cls, rank: int) -> "Pattern":
        """Whole numbers from -8 to 8, other ones for each rank."""
        generator = torch.Generator().manual_seed(rank)
        return cls(torch.randint(-8, 9, (PERIOD,), generator=generator).float())

    def __add__(self, other: "Pattern") -> "Pattern":
        return Pattern(self.block + other.block)

    def write(self, x: Tensor) -> None:
        """Fills x [k] from the pattern's beginning."""
        for part, block in self._against(x, 0):
            part.copy_(block)

    def matches(self, x: Tensor, start: int = 0) -> bool:
        """Whether x [k] is the pattern from element `start` on, exactly."""
        return all(bool((part == block).all()) for part, block in self._against(x, start))

    def _against(self, x: Tensor, start: int) -> list[tuple[Tensor, Tensor]]:
        """x in two parts, whole periods and the rest, with what each stands against."""
        block = self.block.to(x.device).roll(-start)
        whole = x.numel() // block.numel() * block.numel()
        rest = x[whole:]
        return [(x[:whole].view(-1, block.numel()), block), (rest, block[: rest.numel()])]


@dataclass(frozen=True)
class Setting:
    """What an operation works on.

    Attributes:
        group: the ranks that take part.
        count: elements of the full tensor, a multiple of the group's size.
        device: where the tensors are.
        patterns: what each rank of the group begins with.
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
    """One way to do an operation: the call, and the tensor where its result is afterwards."""

    call: Callable[[], object]
    result: Tensor


@dataclass
class Case:
    """An operation on this rank, ready to run in each of its forms.

    Attributes:
        forms: "torch", PyTorch's plain call, and "ours" where `ndtrain.distributed.collectives` has its own.
        expected: what the result must be, in equal pieces: a pattern and the element it begins at. Empty where this
            rank gets none.
        given: inputs, and what they begin with.
        blank: tensors that are written only.
    """

    forms: dict[str, Form]
    expected: list[tuple[Pattern, int]]
    given: list[tuple[Tensor, Pattern]] = field(default_factory=list)
    blank: list[Tensor] = field(default_factory=list)

    def reset(self) -> None:
        """As before the first call. What is to be written holds no numbers, so that nothing left over can pass."""
        for x in self.blank:
            x.fill_(torch.nan)
        for x, pattern in self.given:
            pattern.write(x)

    def once(self, name: str) -> Tensor:
        """The result of a form after one call from the beginning."""
        self.reset()
        self.forms[name].call()
        return self.forms[name].result

    def right(self, name: str) -> bool:
        """Whether one call of a form gives what it must, to the last element."""
        result = self.once(name)
        if not self.expected:
            return True
        pieces = result.view(len(self.expected), -1)
        return all(p.matches(x, start) for x, (p, start) in zip(pieces, self.expected, strict=True))

    def silence(self) -> None:
        """Zeros for inputs: sums in place stay finite however often they are taken."""
        for x, _ in self.given:
            x.zero_()
