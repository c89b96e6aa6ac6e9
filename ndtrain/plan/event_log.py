"""Writes down what a program asks of a device, operator by operator, with its collectives and its waits for them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ndtrain.distributed.flight_recorder import RECORDER, Entry
from ndtrain.parallel.allocations import Allocations
from ndtrain.parallel.compiled_linear import linear_backward
from ndtrain.parallel.fp8 import linear_backward_fp8
from ndtrain.plan.events import Collective, Event, Kernel, Piece, Wait
from ndtrain.plan.operators import Access, Part, access_of, is_free, kernel_of, multiplies

_OPS = {"shift": "send_recv"}  # the flight recorder's name -> the event's, where they differ
# On the meta device these run as one operator that computes nothing: what they call instead is recorded.
_PROGRAMS: dict[Any, Callable] = {op._opoverload: op._init_fn for op in (linear_backward, linear_backward_fp8)}


class EventLog(Allocations):
    """Follows the memory of a program, and writes down its events."""

    def __init__(self) -> None:
        super().__init__()
        self._events: list[Event] = []
        self._fusing = False
        self._most = 0  # bytes alive at one time in the piece
        self._group = _Group(0)
        self._tickets: dict[int, int] = {}  # id of a collective's record -> its ticket

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _PROGRAMS:
            with self:
                return _PROGRAMS[func](*args, **kwargs)
        free = is_free(func)
        alone = not free and not (self._fusing and not multiplies(func, args, kwargs))
        if alone:
            self._flush()
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if free:
            return out
        access = access_of(func, args, kwargs, out)
        kernel = kernel_of(func, args, kwargs, access)
        self._group.add(kernel, access)
        if alone:
            self._flush()
        return out

    @contextmanager
    def piece(self, fusing: bool) -> Iterator[list[Piece]]:
        """Yields a list that holds the block's `Piece` at its end.

        Args:
            fusing: whether neighbouring operators that are bound by memory are one kernel, as a compiler makes them.
        """
        before = self._most = self.now
        self._events, self._fusing, self._tickets, self._group = [], fusing, {}, _Group(before)
        made: list[Piece] = []
        yield made
        self._flush()
        made.append(Piece(tuple(self._events), self.now - before, self._most - before))

    @contextmanager
    def with_collectives(self) -> Iterator[None]:
        """Inside, collectives and waits are events too."""
        before, RECORDER.journal = RECORDER.journal, _Journal(self)
        try:
            yield
        finally:
            RECORDER.journal = before

    def entered(self, entry: Entry) -> None:
        """A launch or a wait of the flight recorder's journal."""
        self._flush()
        record, at = entry.record, id(entry.record)
        if entry.group is None:
            if at in self._tickets:
                self._events.append(Wait(self._tickets[at]))
            return
        ticket = self._tickets[at] = len(self._tickets)
        axis, op = record.channel.partition(" ")[0], _OPS.get(record.op, record.op)
        self._events.append(Collective(axis, op, record.nbytes, ticket))

    def _flush(self) -> None:
        """The operators since the last other event become one kernel."""
        if kernel := self._group.kernel(self._sizes):
            self._events.append(kernel)
            made = sum(self._sizes[at] for at in self._group.made)
            self._most = max(self._most, self._group.before + made)
        self._most = max(self._most, self.now)
        self._group = _Group(self.now)

    def _add(self, storage: torch.UntypedStorage) -> None:
        super()._add(storage)
        self._group.made.add(storage._cdata)

    def _freed(self, at: int) -> None:
        super()._freed(at)
        self._group.freed(at)


class _Journal(list):
    """The flight recorder's journal, which an event log reads as it is written. It keeps the entries, so that no two
    records have one id."""

    def __init__(self, log: EventLog):
        super().__init__()
        self._log = log

    def append(self, entry: Entry) -> None:
        super().append(entry)
        self._log.entered(entry)


class _Group:
    """An operator, or neighbouring ones that are bound by memory, as one kernel: it reads what was there before it
    once, and writes what outlives it.

    Args:
        before: bytes that were alive before it.

    Attributes:
        made: the storages that are allocated since, and alive.
    """

    def __init__(self, before: int) -> None:
        self.before = before
        self.made: set[int] = set()
        self._first: Kernel | None = None
        self._read: dict[int, set[Part]] = {}
        self._written: dict[int, set[Part]] = {}
        self._bytes = 0  # read from storages that are freed since

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
        self.made.discard(storage)

    def kernel(self, alive: dict[int, int]) -> Kernel | None:
        """The kernel; None without operators.

        Args:
            alive: storage -> its bytes.
        """
        if self._first is None:
            return None
        size = self._bytes
        for touched in (self._read, self._written):
            for at, parts in touched.items():
                total = sum(p.bytes for p in parts)
                size += min(total, alive.get(at, total))
        return self._first._replace(bytes=size)
