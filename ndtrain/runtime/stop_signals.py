"""How a run is asked to stop."""

import os
import signal
import time
from pathlib import Path

REPEAT_S = 2.0  # the same Ctrl-C reaches a rank from the terminal and again from torchrun
LOOK_S = 1.0  # how often the stop file is looked for: on shared storage that takes milliseconds
STOP_FILE = "stop"  # in the run folder; `touch` it to stop the run
_BY_FILE = -1


class StopRequest:
    """SIGINT, SIGTERM and SIGUSR1 ask for a stop after a step, and so does the stop file; a later second signal ends
    the process at once.

    Attributes:
        signal: the name of the signal that this process got; None: none yet.
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
        """A number that says by what this process was asked to stop (`name` tells); 0: it was not."""
        if not self._number and self._file and time.monotonic() - self._looked >= LOOK_S:
            self._looked = time.monotonic()
            self._number = _BY_FILE if self._file.exists() else 0
        return self._number

    def answer(self) -> None:
        """Takes the stop file away: the request has been met."""
        if self._file:
            self._file.unlink(missing_ok=True)

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def name(asked: int) -> str:
    """What `StopRequest.asked` stands for."""
    return "stop file" if asked == _BY_FILE else signal.Signals(asked).name
