"""How a compiler changes a program's memory traffic: neighbouring operators become one kernel, and results that are
cheap to make again are not kept for the backward."""

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import NamedTuple

from ndtrain.plan.events import Kernel
from ndtrain.plan.operators import Access, Func, Part, copies

Sizes = Mapping[int, int]  # storage that is alive -> its bytes


class FusedKernel:
    """An operator, or neighbouring ones that are bound by memory, as one kernel. It reads what was there before it
    once, and writes what outlives it.

    Attributes:
        allocated: the storages that it has allocated and that are alive.
    """

    def __init__(self) -> None:
        self.allocated: set[int] = set()
        self._before: int | None = None
        self._first: Kernel | None = None
        self._read: dict[int, set[Part]] = {}
        self._written: dict[int, set[Part]] = {}
        self._bytes = 0  # read from storages that are freed since

    def begin(self, now: int) -> None:
        """An operator is called next; `now` bytes are alive."""
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
        """What was written to it is read by nobody. Its id may be another storage's from now on."""
        self._bytes += sum(p.bytes for p in self._read.pop(storage, ()))
        self._written.pop(storage, None)
        self.allocated.discard(storage)

    def made(self, sizes: Sizes) -> Kernel | None:
        """The kernel; None without operators."""
        if self._first is None:
            return None
        size = self._bytes
        for touched in (self._read, self._written):
            for at, parts in touched.items():
                total = sum(p.bytes for p in parts)
                size += min(total, sizes.get(at, total))
        return self._first._replace(bytes=size)

    def most(self, sizes: Sizes) -> int:
        """Bytes alive while it runs: its operands and its results, and nothing in between."""
        return (self._before or 0) + sum(sizes[at] for at in self.allocated)


class _Origin(NamedTuple):
    """Names a storage among those of all pieces of one name: by the call that allocated it."""

    piece: Hashable
    func: Func | None
    number: int  # of the calls of this operator in the piece


class Recomputed:
    """Which results a compiled program makes again in its backward instead of keeping them. It is seen in one run of
    pieces, and holds for the later runs of pieces of the same names.

    As PyTorch's partitioner of compiled graphs decides it: a result that one fusible operator made, of operands that
    are kept anyway, and that the backward reads in fusible operators alone. (A matmul reads it from memory, so then it
    is kept.)
    """

    def __init__(self) -> None:
        self._again: set[_Origin] = set()
        self._call = _Origin(None, None, 0)
        self._calls: Counter[Func] = Counter()
        self._origins: dict[int, _Origin] = {}  # of the storages that this piece has allocated
        # of one operator that wrote it; None: several did, or an operand is freed
        self._operands: dict[int, set[int] | None] = {}
        self._kept: dict[int, _Origin] = {}  # those that outlived their piece and that no matmul has read since

    def begin(self, piece: Hashable) -> None:
        self._call = _Origin(piece, None, 0)
        self._calls, self._origins, self._operands = Counter(), {}, {}

    def end(self, sizes: Sizes) -> None:
        """The piece is over; `sizes` are alive."""
        for at, operands in self._operands.items():
            if operands is not None and operands <= sizes.keys():
                self._kept[at] = self._origins[at]
        self.begin(None)

    def calling(self, func: Func) -> None:
        """An operator is called next."""
        self._calls[func] += 1
        self._call = self._call._replace(func=func, number=self._calls[func])

    def allocated(self, storage: int) -> bool:
        """Whether this storage, which the call allocates, holds what is made again, and so takes no memory."""
        self._origins[storage] = self._call
        return self._call in self._again

    def called(self, func: Func, access: Access, fuses: bool) -> None:
        """The operator was called, as part of a fused kernel or not."""
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
            if operands and storage in operands:  # its id may be another storage's from now on
                self._operands[at] = None
