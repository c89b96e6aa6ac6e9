"""Requests to stop a run: signals, the stop file, and the end of the launcher."""

import os
import signal
import time
from pathlib import Path

from ndtrain.runtime.launcher import Launcher, torchrun_of_rank
from ndtrain.runtime.run_owner import LAUNCH

REPEAT_S = 2.0  # one Ctrl-C reaches a rank twice within this time: from the terminal and from torchrun
POLL_S = 1.0  # interval between checks for the stop file: on shared storage a check takes milliseconds
STOP_FILE = "stop"  # in the run folder; `touch` it to stop the run. A launch script writes its name into it
LAUNCHER_GONE = "the end of torchrun"  # as the source of a stop request
_BY_FILE, _BY_LAUNCHER = -1, -2


class StopRequest:
    """Handles SIGINT, SIGTERM and SIGUSR1 until `restore`. Each of them, the stop file, or the end of torchrun requests
    a stop after the current step. A second signal, later than `REPEAT_S`, ends the process at once.

    Args:
        file: the stop file; None: this process does not check it.
        signals: whether signals are handled.
        launcher: the process without which this one is to stop; None: torchrun, if it has started this process.

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
            self._number = number

    def asked(self) -> int:
        """A number for the source of the stop request, which `name` turns into text. 0: no request."""
        if not self._number and self._file and time.monotonic() - self._looked >= POLL_S:
            self._looked = time.monotonic()
            self._number = _BY_FILE if _asks_this_run(self._file) else 0
        if not self._number and self._launcher.is_gone():
            self._number = _BY_LAUNCHER
        return self._number

    def answer(self) -> None:
        """Removes the stop file, once the request has been met."""
        if self._file:
            self._file.unlink(missing_ok=True)

    def restore(self) -> None:
        """Restores the previous signal handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _asks_this_run(file: Path) -> bool:
    """Whether the stop file is there, and not from the launch script of another run."""
    try:
        return file.read_text().strip() in ("", os.environ.get(LAUNCH))
    except (OSError, UnicodeDecodeError):
        return file.exists()


def remove_stale(file: Path, now: float) -> bool:
    """Removes a stop file that an earlier run has left. Of the requests that are there before the run looks, it keeps
    those to its own launch script, and any that are younger than that script's start. Returns whether there was one.

    Args:
        now: the modification time that a file written now has. It may come from the clock of a file server, so ages are
            compared and not times.

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
    return {_BY_FILE: "stop file", _BY_LAUNCHER: LAUNCHER_GONE}.get(asked) or signal.Signals(asked).name
