"""The flight recorder of a process: its last few hundred collectives, and its current step and action.

It is always on and costs one or two microseconds per collective. When a run hangs, `run/hang_watchdog.py` collects
the records of every rank.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

from ndtrain.mesh.collective_record import CollectiveRecord
from ndtrain.mesh.device_progress import DeviceProgress

KEPT = 512  # records
LISTED = 8  # maximum number of ranks that are all in the name of a channel


class Entry(NamedTuple):
    """A launch or the beginning of a wait, in the journal of a process.

    Attributes:
        thread: the id of the thread that launched or waits.
        group, ranks: (a launch) the process group's name, and its global ranks in order. None and empty for a wait.
        to, source: (a message) ranks of the group, as in `Recorder.launch`.
        among: (a collective) the ranks of the group that take part; None: all ranks.
        op: the index of the current op in the rank's program, or None.
    """

    record: CollectiveRecord
    thread: int
    group: str | None = None
    ranks: tuple[int, ...] = ()
    to: int | None = None
    source: int | None = None
    among: Sequence[int] | None = None
    op: int | None = None


def listed(ranks: Sequence[int]) -> str:
    """Return the ranks of a group as text, which does not grow with their number. It differs for any two groups of a
    mesh that have a name in common."""
    if len(ranks) <= LISTED:
        return str(list(ranks))
    return f"[{ranks[0]}, {ranks[1]}, ... {ranks[-1]}]"


class Recorder:
    """A recorder of collectives and waits. A process has one, `RECORDER`.

    Args:
        kept: number of records to keep.

    Attributes:
        step: the current step, from 1; 0 before the first.
        action, op: the current action of the step, and the index of the current op in the rank's program, or None.
        members: channel -> the global ranks on it.
        mark: None, or a function that returns a context manager. Each wait runs inside it, so that a profiler shows it.
        last: the last records, oldest first.
        moves: the number of steps begun, operations launched, and waits begun or ended.
        counts: channel -> number of operations launched on it.
        journal: None, or the list to which every launch and every wait is appended, in order.
        device: the pending operations on this process's GPU; None: operations on a GPU are not followed.
    """

    def __init__(self, kept: int = KEPT):
        self.step, self.action = 0, "start-up"
        self.op: int | None = None
        self.device: DeviceProgress | None = None
        self.members: dict[str, tuple[int, ...]] = {}
        self.mark: Callable[[CollectiveRecord], AbstractContextManager] | None = None
        self._marks: dict[int, AbstractContextManager] = {}
        self.last: deque[CollectiveRecord] = deque(maxlen=kept)
        self.counts: dict[str, int] = {}
        self.moves = 0
        self.journal: list[Entry] | None = None
        self._channels: dict[str, str] = {}
        self._waits: dict[int, CollectiveRecord] = {}
        self._began, self._waited = time.monotonic(), 0.0
        self._main = threading.get_ident()

    # ------------------------------------------------------------------------------------------------------ recording

    def name_group(self, group: Any, axis: str, ranks: Sequence[int]) -> None:
        """Name the channel of a process group after its mesh axis and its global ranks. A lane may follow the axis."""
        channel = f"{axis} {listed(ranks)}"
        self._channels[group.group_name] = channel
        self.members[channel] = tuple(ranks)

    def begin(self, step: int) -> None:
        """Mark the beginning of a step. `busy` subtracts only the waits of the calling thread."""
        self.step, self.action, self.op = step, "begin", None
        self.moves += 1
        self._began, self._waited, self._main = time.monotonic(), 0.0, threading.get_ident()

    @property
    def where(self) -> str:
        """The current action, with the index of the op as `ndtrain plan program` prints it."""
        return self.action if self.op is None else f"{self.action}, op {self.op}"

    def busy(self) -> float:
        """Return the seconds since the beginning of the step, without the waits for other ranks and for data."""
        return time.monotonic() - self._began - self._waited

    def launch(
        self,
        op: str,
        group: Any,
        nbytes: int,
        to: int | None = None,
        source: int | None = None,
        among: Sequence[int] | None = None,
    ) -> CollectiveRecord:
        """Record the launch of an operation.

        Args:
            to, source: ranks of the group. With neither, it is a collective over `group`. With one of them, it is a
                message to or from that rank. With both equal, it is an exchange with that rank. With both different, it
                is a step around a ring.
            among: the ranks of the group that take part in the collective; None: all ranks.
        """
        whole = channel = self._channels.get(group.group_name, group.group_name)
        if (to is None) != (source is None) or (to is not None and to == source):
            channel = self._pair_channel(channel, group, to, source)
        number = self.counts[channel] = self.counts.get(channel, 0) + 1
        record = CollectiveRecord(op, channel, number, nbytes, self.step, self.action, time.monotonic())
        record.on_device = self.device is not None and self.device.runs(group)
        self.last.append(record)
        self.moves += 1
        if self.journal is not None:
            ranks = self.members.get(whole, tuple(range(group.size())))
            self.journal.append(
                Entry(record, threading.get_ident(), group.group_name, ranks, to, source, among, self.op)
            )
        return record

    def follow(self, record: CollectiveRecord, works: Iterable[Any]) -> None:
        """Follow the launched operation on the device, if it runs there."""
        if record.on_device and self.device is not None:
            self.device.add(record, works)

    def _pair_channel(self, channel: str, group: Any, to: int | None, source: int | None) -> str:
        """Return the channel between two ranks, for messages in one direction or for exchanges."""
        me = group.rank()
        sends_to, receives_from = me if to is None else to, me if source is None else source
        one, other = sorted((me, sends_to)) if to == source else (receives_from, sends_to)
        name = f"{channel} {one} {'with' if to == source else 'to'} {other}"
        if name not in self.members:
            ranks = self.members.get(channel, tuple(range(group.size())))
            self.members[name] = (ranks[one], ranks[other])
        return name

    def enter(self, record: CollectiveRecord) -> None:
        """Mark the beginning of this thread's wait for `record`."""
        record.waited = time.monotonic()
        self.moves += 1
        self._waits[id(record)] = record
        if self.journal is not None:
            self.journal.append(Entry(record, threading.get_ident(), op=self.op))
        if self.mark:
            self._marks[id(record)] = mark = self.mark(record)
            mark.__enter__()

    def leave(self, record: CollectiveRecord) -> None:
        """Mark the end of the wait for `record`."""
        if mark := self._marks.pop(id(record), None):
            mark.__exit__(None, None, None)
        record.ended = time.monotonic()
        self.moves += 1
        self._waits.pop(id(record), None)
        if threading.get_ident() == self._main:
            self._waited += record.ended - record.waited

    @contextmanager
    def waiting(self, what: str, on_device: bool = False) -> Iterator[None]:
        """Record the block as a wait for something other than a collective: data, the result of a step.

        Args:
            on_device: True if the wait ends when the GPU has completed the work queued on it.
        """
        record = CollectiveRecord(what, "", 0, 0, self.step, self.action, time.monotonic(), on_device=on_device)
        self.enter(record)
        try:
            yield
        finally:
            self.leave(record)

    # ---------------------------------------------------------------------------------------------------------- asking

    def longest_wait(self) -> tuple[CollectiveRecord | None, float]:
        """Return the record that has been waited for longest, or None, and the seconds of that wait. This includes
        operations that a GPU has not completed, even if the host does not wait."""
        host, device = list(self._waits.values()), self.device  # one call, because other threads change the dict
        if device is None:
            waits = [(record, record.waited) for record in host]
        else:
            waits = [(record, record.waited) for record in host if not record.on_device]
            waits += device.waits([record for record in host if record.on_device])
        if not waits:
            return None, 0.0
        oldest, since = min(waits, key=lambda wait: wait[1])
        return oldest, time.monotonic() - since


RECORDER = Recorder()
