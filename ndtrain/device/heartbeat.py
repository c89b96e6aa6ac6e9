"""Heartbeats in a file: whether a process on any host is alive, on storage that the hosts share.

The heartbeat is the modification time of the file, used as a counter. In an object store, it is a number in a second
object. The process sets it to a new value every `BEAT_S`, and observers only check if it changes. Clocks of different
hosts are never compared.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ndtrain.config.store import in_store

BEAT_S = 5.0  # interval of the heartbeat
DEAD_S = 60.0  # a process on another host counts as dead if its heartbeat has not changed for this time
STALL_S = 5.0  # after a longer gap between two readings the observer starts again, because its own file system was slow
_FIRST_BEAT_S = 1_000_000_000  # modification time of beat 0; a release sets it to 0


class Heartbeat:
    """A thread that updates the heartbeat of a file until `stop`.

    Args:
        name: of the thread.
    """

    def __init__(self, file: Path, name: str):
        self._file = file
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=name, daemon=True)
        self._thread.start()

    @property
    def stopped(self) -> bool:
        return self._ended.is_set()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _beat(self) -> None:
        beats = 0
        while not self._ended.wait(BEAT_S):
            beats += 1
            with suppress(OSError):  # the file system may be slow or full: the next beat may succeed
                set_beat(self._file, beats)

    def stop(self) -> None:
        """End the thread. Wait for it no longer than one interval: it takes longer only if the file system hangs."""
        self._ended.set()
        self._thread.join(BEAT_S)


class Silence:
    """How long an observer has seen a heartbeat unchanged.

    Args:
        beat: the first reading.

    Attributes:
        beat: the last reading.
        seconds: between the first and the last reading of the same value.
    """

    def __init__(self, beat: int | None, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._begin(beat)

    def _begin(self, beat: int | None) -> None:
        self.beat, self.seconds = beat, 0.0
        self._since = self._read = self._clock()

    def look(self, beat: int | None) -> float:
        """Count a further reading and return `seconds`."""
        now = self._clock()
        if beat != self.beat or now - self._read > STALL_S:
            self._begin(beat)
        else:
            self._read, self.seconds = now, now - self._since
        return self.seconds


def beat_of(file: Path) -> int | None:
    """Return the heartbeat; 0 if its process has released the file, None if there is no such file.

    The file is opened, because NFS may answer `stat` from a cache that is a minute old.
    """
    if in_store(file):
        return _beat_in_store(file)
    try:
        with open(file, "rb") as opened:
            return os.fstat(opened.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def set_beat(file: Path, number: int) -> None:
    """Set the heartbeat to the value of beat `number`, which differs from the values of all other beats."""
    if in_store(file):
        _beat_object(file).write_bytes(str(1 + number).encode())
        return
    seconds = _FIRST_BEAT_S + 2 * number  # FAT stores times with a resolution of two seconds
    os.utime(file, (seconds, seconds))


def release_beat(file: Path) -> None:
    """Set the heartbeat to 0: the process does not need the file any more."""
    if in_store(file):
        _beat_object(file).write_bytes(b"0")
    else:
        os.utime(file, ns=(0, 0))


def _beat_object(file: Path) -> Path:
    return file.with_name(f"{file.name}.beat")


def _beat_in_store(file: Path) -> int | None:
    try:
        return int(_beat_object(file).read_text())
    except FileNotFoundError:  # before the first beat, or there is no such file
        return 1 if file.exists() else None
    except ValueError:
        return -1
