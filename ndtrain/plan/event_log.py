"""Records the work of a program on a device, operator by operator: its kernels, collectives and waits.

A compiler fuses neighbouring operators into one kernel, and recomputes cheap results in the backward instead of keeping
them. `FusedKernel` and `Recomputed` have the effect of both on the memory traffic.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ndtrain.mesh.flight_recorder import Entry
from ndtrain.model.opaque import FUNCTIONS
from ndtrain.parallel.allocations import Allocations
from ndtrain.plan.events import Collective, Event, Kernel, Piece, Wait
from ndtrain.plan.operators import Access, Func, Part, access_of, copies, is_free, kernel_of, multiplies

_OPS = {"shift": "send_recv"}  # name in the flight recorder -> name in the event, if they differ
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


class EventLog(Allocations):
    """Follows the memory of a program, and records its events.

    Args:
        eager_nodes: names of autograd nodes whose backward is never compiled.
    """

    def __init__(self, eager_nodes: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.eager_nodes = eager_nodes
        self._events: list[Event] = []
        self._compiled = False
        self._most = 0  # the most bytes alive at one time in the piece
        self._kernel = FusedKernel()
        self._recomputed = Recomputed()
        self._works: dict[int, int] = {}  # id of a collective's record -> its `work` number

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in FUNCTIONS:
            with self:
                return FUNCTIONS[func](*args, **kwargs)
        self._recomputed.calling(func)
        if is_free(func):
            return super().__torch_dispatch__(func, types, args, kwargs)
        fuses = self._compiled and not self._in_eager_node() and not multiplies(func)
        if not fuses:
            self._launch()
        self._kernel.begin(self.now)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        access = access_of(func, args, kwargs, out)
        self._kernel.add(kernel_of(func, args, kwargs, access), access)
        self._recomputed.called(func, access, fuses)
        if not fuses:
            self._launch()
        return out

    def _in_eager_node(self) -> bool:
        node = torch._C._current_autograd_node()
        return node is not None and node.name() in self.eager_nodes

    @contextmanager
    def piece(self, name: Hashable, compiled: bool) -> Iterator[list[Piece]]:
        """Record what runs within this context as a `Piece`. Yield a list that receives the piece at the end.

        Args:
            name: pieces of the same name make the same calls.
            compiled: True if a compiler fuses neighbouring memory-bound operators into one kernel.
        """
        self._recomputed.begin(name)
        before = self._most = self.now
        self._events, self._compiled, self._works, self._kernel = [], compiled, {}, FusedKernel()
        made: list[Piece] = []
        yield made
        self._launch()
        self._compiled = False
        self._recomputed.end(self._sizes)
        made.append(Piece(tuple(self._events), self.now - before, self._most - before))

    def apart(self, function: Callable) -> Callable:
        """Return the function in a form whose operators are not compiled."""

        def called(*args: Any, **kwargs: Any) -> Any:
            before, self._compiled = self._compiled, False
            self._launch()
            try:
                return function(*args, **kwargs)
            finally:
                self._compiled = before

        return called

    def entered(self, entry: Entry) -> None:
        """Record a launch or a wait from the flight recorder's journal."""
        self._launch()
        record, at = entry.record, id(entry.record)
        if entry.group is None:
            if at in self._works:
                self._events.append(Wait(self._works[at]))
            return
        work = self._works[at] = len(self._works)
        axis, op = record.axis, _OPS.get(record.op, record.op)
        self._events.append(Collective(axis, op, record.nbytes, work))

    def _launch(self) -> None:
        """Record the operators called since the last event as a kernel."""
        if kernel := self._kernel.made(self._sizes):
            self._events.append(kernel)
        self._most = max(self._most, self.now, self._kernel.most(self._sizes))
        self._kernel = FusedKernel()

    # -------------------------------------------------------------------------------------------------- bookkeeping

    def _add(self, storage: torch.UntypedStorage) -> None:
        super()._add(storage)
        at = storage._cdata
        self._kernel.allocated.add(at)
        if self._recomputed.allocated(at):
            self._set_size(at, 0)

    def _freed(self, at: int) -> None:
        super()._freed(at)
        self._kernel.freed(at)
        self._recomputed.freed(at)


class Journal(list):
    """A journal of the flight recorder that passes each entry on to an event log. It keeps the entries alive, so that
    no two records have the same id."""

    def __init__(self, log: EventLog):
        super().__init__()
        self._log = log

    def append(self, entry: Entry) -> None:
        super().append(entry)
        self._log.entered(entry)
