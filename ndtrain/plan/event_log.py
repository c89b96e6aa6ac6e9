"""Records the work of a program on a device, operator by operator: its kernels, collectives and waits."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ndtrain.mesh.flight_recorder import RECORDER, Entry
from ndtrain.model.opaque import FUNCTIONS
from ndtrain.parallel.allocations import Allocations
from ndtrain.plan.events import Collective, Event, Piece, Wait
from ndtrain.plan.fused_kernel import FusedKernel, Recomputed
from ndtrain.plan.operators import access_of, is_free, kernel_of, multiplies

_OPS = {"shift": "send_recv"}  # name in the flight recorder -> name in the event, if they differ


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
        fuses = self._compiled and not self._in_eager_node() and not multiplies(func, args, kwargs)
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

    @contextmanager
    def with_collectives(self) -> Iterator[None]:
        """Record collectives and waits as events too, within this context."""
        before, RECORDER.journal = RECORDER.journal, _Journal(self)
        try:
            yield
        finally:
            RECORDER.journal = before

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


class _Journal(list):
    """A journal of the flight recorder that passes each entry on to an event log. It keeps the entries alive, so that
    no two records have the same id."""

    def __init__(self, log: EventLog):
        super().__init__()
        self._log = log

    def append(self, entry: Entry) -> None:
        super().append(entry)
        self._log.entered(entry)
