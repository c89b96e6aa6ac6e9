"""The effect of a compiler on a program's memory traffic. It fuses neighbouring operators into one kernel, and
recomputes cheap results in the backward instead of keeping them."""

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import NamedTuple

from ndtrain.plan.events import Kernel
from ndtrain.plan.operators import Access, Func, Part, copies

Sizes = Mapping[int, int]  # live storage -> its bytes


class FusedKernel:
    """A kernel of one operator, or of neighbouring operators that are bound by memory. It reads its inputs once, and
    writes only the results that outlive it.

    Attributes:
        allocated: the live storages that the kernel has allocated.
    """

    def __init__(self) -> None:
        self.allocated: set[int] = set()
        self._before: int | None = None
        self._first: Kernel | None = None
        self._read: dict[int, set[Part]] = {}
        self._written: dict[int, set[Part]] = {}
        self._bytes = 0  # read from storages that have been freed

    def begin(self, now: int) -> None:
        """Note that an operator is called next. `now` bytes are alive."""
        if self._before is None:
            self._before = now
            self.allocated.clear()

    def add(self, kernel: Kernel, access: Access) -> None:
        self._first = self._first._replace(op="") if self._first else kernel
        for part in access.reads:
            if part.storage not in self._written:
                self._read.setdefault(part.storage, set()).add(part)
        for part in access.writes:
            self._written.setdefault(part.storage, set()).add(part)

    def freed(self, storage: int) -> None:
        """Count the reads of a freed storage, but not the writes, which nothing reads. Its id may be reused."""
        self._bytes += sum(p.bytes for p in self._read.pop(storage, ()))
        self._written.pop(storage, None)
        self.allocated.discard(storage)

    def made(self, sizes: Sizes) -> Kernel | None:
        """Return the kernel, or None if no operator was called."""
        if self._first is None:
            return None
        size = self._bytes
        for touched in (self._read, self._written):
            for at, parts in touched.items():
                total = sum(p.bytes for p in parts)
                size += min(total, sizes.get(at, total))
        return self._first._replace(bytes=size)

    def most(self, sizes: Sizes) -> int:
        """Return the bytes alive while the kernel runs: with its operands and results, without intermediate results."""
        return (self._before or 0) + sum(sizes[at] for at in self.allocated)


class _Origin(NamedTuple):
    """The call that allocated a storage. It identifies the storage in all pieces of the same name."""

    piece: Hashable
    func: Func | None
    number: int  # counts the calls of this operator in the piece


class Recomputed:
    """Finds the results that a compiled program recomputes in its backward instead of keeping them. It observes one run
    of the pieces, and applies what it finds to later runs of pieces with the same names.

    It follows PyTorch's partitioner of compiled graphs. A result is recomputed if one fusible operator made it from
    kept operands, and if only fusible operators read it in the backward. (A matmul reads its operands from memory, so
    they are kept.)
    """

    def __init__(self) -> None:
        self._again: set[_Origin] = set()
        self._call = _Origin(None, None, 0)
        self._calls: Counter[Func] = Counter()
        self._origins: dict[int, _Origin] = {}  # storages that this piece has allocated -> their calls
        # storage -> operands of the operator that wrote it; None: several wrote it, or an operand was freed
        self._operands: dict[int, set[int] | None] = {}
        self._kept: dict[int, _Origin] = {}  # outlived their piece; no unfused operator has read them since

    def begin(self, piece: Hashable) -> None:
        self._call = _Origin(piece, None, 0)
        self._calls, self._origins, self._operands = Counter(), {}, {}

    def end(self, sizes: Sizes) -> None:
        """End the piece. `sizes` are the live storages."""
        for at, operands in self._operands.items():
            if operands is not None and operands <= sizes.keys():
                self._kept[at] = self._origins[at]
        self.begin(None)

    def calling(self, func: Func) -> None:
        """Note that an operator is called next."""
        self._calls[func] += 1
        self._call = self._call._replace(func=func, number=self._calls[func])

    def allocated(self, storage: int) -> bool:
        """Return True if the storage that the call allocates holds a recomputed result, which takes no memory."""
        self._origins[storage] = self._call
        return self._call in self._again

    def called(self, func: Func, access: Access, fuses: bool) -> None:
        """Note that the operator was called. `fuses`: as part of a fused kernel."""
        read, written = ({p.storage for p in parts} for parts in access)
        if not fuses or copies(func):
            for at in read:
                self._kept.pop(at, None)
        for at in written & self._origins.keys():
            self._operands[at] = read - {at} if fuses and at not in self._operands else None

    def freed(self, storage: int) -> None:
        if origin := self._kept.pop(storage, None):
            self._again.add(origin)
        self._origins.pop(storage, None)
        self._operands.pop(storage, None)
        for at, operands in self._operands.items():
            if operands and storage in operands:  # another storage may reuse its id
                self._operands[at] = None
