"""Waiting for other islands without a hang of this island.

A rank may have read everything while another rank of its island still waits for another island. If the first one waited
in a collective, its hang watchdog would take this for a hang of its own island. Therefore the ranks agree every few
seconds on whether all of them are ready. Only a rank that takes no part in that agreement hangs.
"""

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import torch

from ndtrain.device.gpu import use_gpu
from ndtrain.mesh.collectives import all_reduce
from ndtrain.mesh.flight_recorder import RECORDER
from ndtrain.mesh.mesh import Mesh

AGREE_S = 5.0  # between two agreements of the ranks
FIRST_LINE_S = 60.0  # of a wait, until a line names the islands that are waited for

Work = Callable[[], bool]


def agree_s(deadline_s: float) -> float:
    """Return the seconds between two agreements, for a watchdog with this deadline."""
    return min(AGREE_S, deadline_s / 4)


class _Outcome(NamedTuple):
    ok: bool
    error: BaseException | None = None


class IslandWait:
    """Lets all ranks of an island wait for other islands.

    Create one on every rank, and call the same methods in the same order.

    Args:
        deadline_s: seconds after which a watchdog ends a rank that waits.
        tell: prints a line for the user.
        read_bytes: returns the bytes that this rank has read so far.

    Attributes:
        read_bytes: the bytes that all ranks of the island had read at the end of the last wait.
    """

    def __init__(
        self, mesh: Mesh, deadline_s: float, tell: Callable[[str], None], read_bytes: Callable[[], int] = lambda: 0
    ):
        self._mesh, self._tell, self._agree_s = mesh, tell, agree_s(deadline_s)
        self._read_bytes_here, self.read_bytes = read_bytes, 0
        self._first_line_s = min(FIRST_LINE_S, deadline_s / 2)
        self._todo: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
        # not an executor, which would wait for the thread at the exit of a rank that fails
        threading.Thread(target=self._serve, name="island wait", daemon=True).start()

    def run(self, work: Work, awaited: Callable[[], str]) -> bool:
        """Do work that waits for other islands. Return True if it has returned True on all ranks of this island."""
        self.begin(work)
        return self.wait(awaited)

    def begin(self, work: Work) -> None:
        """Begin work that waits for other islands. Call `wait` before other work.

        Args:
            work: runs in a thread of its own, without gradients. It uses no collectives.
        """
        self._todo.put(work)

    def wait(self, awaited: Callable[[], str]) -> bool:
        """Wait for the end of the work. Return True if it has returned True on all ranks of this island.

        Args:
            awaited: returns the islands that this one waits for; empty: print no line.
        """
        began, line_at = time.monotonic(), self._first_line_s
        outcome: _Outcome | None = None
        RECORDER.action, RECORDER.op = "wait for islands", None
        while True:
            outcome = outcome or self._outcome()
            unfinished, failed = self._sums(outcome)
            if not unfinished:
                return not failed
            waited = time.monotonic() - began
            if waited >= line_at and (islands := awaited()):
                line_at = 2 * waited
                self._tell(f"waits {waited:.0f} s for {islands}")

    def close(self) -> None:
        """End the thread, after the work that it does now."""
        self._todo.put(None)

    def _outcome(self) -> _Outcome | None:
        """Wait for the end of the work, until the next agreement."""
        with suppress(queue.Empty), RECORDER.waiting("other islands"):
            outcome = self._ended.get(timeout=self._agree_s)
            if outcome.error is not None:
                raise outcome.error
            return outcome
        return None

    def _sums(self, outcome: _Outcome | None) -> tuple[float, float]:
        """Return the numbers of ranks that have not finished, and of ranks that have failed."""
        mine = [outcome is None, outcome is not None and not outcome.ok, self._read_bytes_here()]
        sums = torch.tensor(mine, dtype=torch.float64, device=self._mesh.device)
        all_reduce(sums, self._mesh.world).wait()
        unfinished, failed, read_bytes = sums.tolist()
        self.read_bytes = int(read_bytes)
        return unfinished, failed

    def _serve(self) -> None:
        """Do the work, in its thread."""
        use_gpu(self._mesh.device)
        while work := self._todo.get():
            try:
                with torch.no_grad():
                    self._ended.put(_Outcome(work()))
            except BaseException as error:
                self._ended.put(_Outcome(False, error))
