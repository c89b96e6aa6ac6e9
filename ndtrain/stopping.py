"""How a rank is asked to stop, and how it says what went wrong."""

import os
import signal
import sys
import time

import torch.distributed as dist

from ndtrain.config import world_from_env

REPEAT_S = 2.0  # the same Ctrl-C reaches a rank from the terminal and again from torchrun
PATIENCE_S = 5.0  # how long a rank that lost a peer lets that one speak, and the launcher end them all


class StopRequest:
    """SIGINT, SIGTERM and SIGUSR1 ask for a stop after a step; a later second one ends the process at once."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self._at = 0.0
        self._before = {s: signal.signal(s, self._on) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}

    def _on(self, number: int, frame) -> None:
        if self.signal is not None and time.monotonic() - self._at > REPEAT_S:
            os._exit(128 + number)
        if self.signal is None:
            self.signal, self._at = signal.Signals(number).name, time.monotonic()

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def say_failure(error: BaseException, stop: StopRequest) -> None:
    """The traceback, at once; but a rank that only lost a peer waits, so that the rank at fault is heard first. The
    launcher ends it meanwhile, or had begun to before the loss came to light."""
    if _lost_a_peer(error):
        if stop.signal:
            print(f"rank {world_from_env()[0]}: stopped by {stop.signal}, and a peer has left", file=sys.stderr)
            return
        time.sleep(PATIENCE_S)
    sys.excepthook(type(error), error, error.__traceback__)


def _lost_a_peer(error: BaseException) -> bool:
    """Whether an error says no more than that another rank does not answer. Gloo's are known by their source file."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))
