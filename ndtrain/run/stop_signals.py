"""Requests to stop a run: signals, the stop file, and the end of the launcher."""

import os
import signal
import time
from pathlib import Path

from ndtrain.device.process_owner import LAUNCH
from ndtrain.run.launcher import Launcher, torchrun_of_rank

REPEAT_S = 2.0  # one Ctrl-C reaches a rank twice within this time: from the terminal and from torchrun
POLL_S = 1.0  # interval between checks for the stop file, because a check takes milliseconds on shared storage
STOP_FILE = "stop"  # in the run folder; `touch` it to stop the run. A launch script writes the id of its start into it
LAUNCHER_GONE = "the end of torchrun"  # name of this source of a stop request
_BY_LAUNCHER, _BY_FILE = 1, 2
_BY_SIGNAL = 100  # is added to the signal's number


class StopRequest:
    """A handler of SIGINT, SIGTERM and SIGUSR1 until `restore` is called.

    Each of these signals, the stop file, or the end of torchrun requests a stop after the current step. A second
    signal, more than `REPEAT_S` later, ends the process at once.

    Args:
        file: the stop file; None: this process does not check it.
        signals: True to handle signals.
        launcher: this process stops if the launcher ends. None: torchrun, if it has started this process.

    Attributes:
        signal: the name of the signal that this process received; None: none yet.
    """

    def __init__(self, file: Path | None = None, signals: bool = True, launcher: Launcher | None = None) -> None:
        self.signal: str | None = None
        self._launcher = launcher or torchrun_of_rank()
        self._file, self._looked, self._number, self._at = file, float("-inf"), 0, 0.0
        handled = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1) if signals else ()
        self._before = {s: signal.signal(s, self._on) for s in handled}

    def _on(self, number: int, frame) -> None:
        if self.signal is not None and time.monotonic() - self._at > REPEAT_S:
            os._exit(128 + number)
        if self.signal is None:
            self.signal, self._at = signal.Signals(number).name, time.monotonic()
            self._number = _BY_SIGNAL + number

    def asked(self) -> int:
        """Return a number for the source of the stop request, or 0 if there is none. `name` converts it to text.

        All ranks get the largest number, so 0 is the smallest and a signal takes precedence over the other sources.
        """
        if not self._number and self._file and time.monotonic() - self._looked >= POLL_S:
            self._looked = time.monotonic()
            self._number = _BY_FILE if _asks_this_run(self._file) else 0
        if not self._number and self._launcher.is_gone():
            self._number = _BY_LAUNCHER
        return self._number

    def answer(self) -> None:
        """Remove the stop file. Call this after the run has stopped as requested."""
        if self._file:
            self._file.unlink(missing_ok=True)

    def restore(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _asks_this_run(file: Path) -> bool:
    """Return True if the stop file exists and is not from the launch script of another run."""
    try:
        return file.read_text().strip() in ("", os.environ.get(LAUNCH))
    except (OSError, UnicodeDecodeError):
        return file.exists()


def remove_stale(file: Path, now: float) -> bool:
    """Remove a stop file left by an earlier run. Return True if there was one.

    A file younger than the start of this run's launch script is kept, unless it names another launch script.

    Args:
        now: the modification time of a file written now. It may come from a file server with another clock, so the
            function compares ages instead of times.

    Raises:
        OSError: the file cannot be removed.
    """
    try:
        age = now - file.stat().st_mtime
    except FileNotFoundError:
        return False
    launched = os.environ.get(LAUNCH, "").rpartition("-")[2]
    if launched and _asks_this_run(file) and age < time.time() - float(launched):
        return False
    file.unlink(missing_ok=True)
    return True


def name(asked: int) -> str:
    """Return the signal's name, "stop file" or `LAUNCHER_GONE` for a number of `StopRequest.asked`."""
    return {_BY_FILE: "stop file", _BY_LAUNCHER: LAUNCHER_GONE}.get(asked) or signal.Signals(asked - _BY_SIGNAL).name
