"""What this process did last, always on: a few hundred of its collectives, and where it is now.

It costs a microsecond or two a collective. When a run hangs, `runtime/hang_watchdog.py` asks every rank for it.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

KEPT = 512  # collectives


@dataclass(slots=True, eq=False)
class CollectiveRecord:
    """A collective, or one message.

    Attributes:
        channel: what it went over: operations over one channel are numbered alike on all its members.
        number: counted from 1, on this channel.
        nbytes: of the whole.
        step, action: what the rank was at when it launched this.
        launched, waited, ended: seconds of this machine's monotonic clock; 0 where that has not come yet. On a GPU
            `ended` is when the host went on, not when the operation was over.
    """

    op: str
    channel: str
    number: int
    nbytes: int
    step: int
    action: str
    launched: float
    waited: float = 0.0
    ended: float = 0.0


class Recorder:
    """One a process, like a logger.

    Attributes:
        step: the step being made, from 1; 0 before the first.
        action: what of it.
        members: channel -> the global ranks on it.
        mark: None, or what to wrap around every wait, so that a profiler sees it.
    """

    def __init__(self, kept: int = KEPT):
        self.step, self.action = 0, "start-up"
        self.members: dict[str, tuple[int, ...]] = {}
        self.mark: Callable[[CollectiveRecord], AbstractContextManager] | None = None
        self._marks: dict[int, AbstractContextManager] = {}
        self.last: deque[CollectiveRecord] = deque(maxlen=kept)
        self.counts: dict[str, int] = {}
        self._channels: dict[str, str] = {}
        self._waits: dict[int, CollectiveRecord] = {}
        self._began, self._waited = time.monotonic(), 0.0
        self._main = threading.get_ident()

    # ------------------------------------------------------------------------------------------------------ recording

    def name(self, group: Any, axis: str, ranks: Sequence[int]) -> None:
        """Operations over the process group `group` show as over `axis`, between these global ranks."""
        channel = f"{axis} {list(ranks)}"
        self._channels[group.group_name] = channel
        self.members[channel] = tuple(ranks)

    def begin(self, step: int) -> None:
        """A step begins."""
        self.step, self.action = step, "begin"
        self._began, self._waited, self._main = time.monotonic(), 0.0, threading.get_ident()

    def busy(self) -> float:
        """Seconds since the step began in which this rank did not wait for others or for data."""
        return time.monotonic() - self._began - self._waited

    def launch(
        self, op: str, group: Any, nbytes: int, to: int | None = None, source: int | None = None
    ) -> CollectiveRecord:
        """A collective over `group` starts; or with `to` or `source`, ranks of the group, one message. With both, and
        the same, an exchange of two."""
        channel = self._channels.get(group.group_name, group.group_name)
        if (to is None) != (source is None) or (to is not None and to == source):
            channel = self._line(channel, group, to, source)
        number = self.counts[channel] = self.counts.get(channel, 0) + 1
        record = CollectiveRecord(op, channel, number, nbytes, self.step, self.action, time.monotonic())
        self.last.append(record)
        return record

    def _line(self, channel: str, group: Any, to: int | None, source: int | None) -> str:
        """The channel between two ranks: messages of one way, or exchanges."""
        me = group.rank()
        one, other = sorted((me, to)) if to == source else (me, to) if source is None else (source, me)
        name = f"{channel} {one} {'with' if to == source else 'to'} {other}"
        if name not in self.members:
            ranks = self.members.get(channel, tuple(range(group.size())))
            self.members[name] = (ranks[one], ranks[other])
        return name

    def enter(self, record: CollectiveRecord) -> None:
        """This thread waits for `record` now."""
        record.waited = time.monotonic()
        self._waits[id(record)] = record
        if self.mark:
            self._marks[id(record)] = mark = self.mark(record)
            mark.__enter__()

    def leave(self, record: CollectiveRecord) -> None:
        """It waits no more."""
        if mark := self._marks.pop(id(record), None):
            mark.__exit__(None, None, None)
        record.ended = time.monotonic()
        self._waits.pop(id(record), None)
        if threading.get_ident() == self._main:
            self._waited += record.ended - record.waited

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """For what is waited for without a collective of ours: data, a step's result."""
        record = CollectiveRecord(what, "", 0, 0, self.step, self.action, time.monotonic())
        self.enter(record)
        try:
            yield
        finally:
            self.leave(record)

    # ---------------------------------------------------------------------------------------------------------- asking

    def longest_wait(self) -> tuple[CollectiveRecord | None, float]:
        """What has been waited for longest, and since how many seconds."""
        waits = list(self._waits.values())  # one call: other threads go on
        if not waits:
            return None, 0.0
        oldest = min(waits, key=lambda f: f.waited)
        return oldest, time.monotonic() - oldest.waited


RECORDER = Recorder()
