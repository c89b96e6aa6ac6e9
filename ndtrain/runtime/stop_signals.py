"""Requests to stop a run: signals and the stop file."""

import os
import signal
import time
from pathlib import Path

REPEAT_S = 2.0  # one Ctrl-C reaches a rank twice within this time: from the terminal and from torchrun
POLL_S = 1.0  # interval between checks for the stop file: on shared storage a check takes milliseconds
STOP_FILE = "stop"  # in the run folder; `touch` it to stop the run
_BY_FILE = -1


class StopRequest:
    """Handles SIGINT, SIGTERM and SIGUSR1 until `restore`. Each of them, or the stop file, requests a stop after the
    current step. A second signal, later than `REPEAT_S`, ends the process at once.

    Args:
        file: the stop file; None: this process does not check it.

    Attributes:
        signal: the name of the signal that this process received; None: none yet.
    """

    def __init__(self, file: Path | None = None, signals: bool = True) -> None:
        self.signal: str | None = None
        self._file, self._looked, self._number, self._at = file, float("-inf"), 0, 0.0
        heard = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1) if signals else ()
        self._before = {s: signal.signal(s, self._on) for s in heard}

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
            self._number = _BY_FILE if self._file.exists() else 0
        return self._number

    def answer(self) -> None:
        """Removes the stop file, once the request has been met."""
        if self._file:
            self._file.unlink(missing_ok=True)

    def restore(self) -> None:
        """Restores the previous signal handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


def name(asked: int) -> str:
    """The signal's name, or "stop file", for a number of `StopRequest.asked`."""
    return "stop file" if asked == _BY_FILE else signal.Signals(asked).name
