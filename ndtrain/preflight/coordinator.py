"""Where the ranks report to rank 0: in the launcher's store, which takes none of the connections that are checked."""

import json
import os
import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

MARGIN_S = 5.0  # beyond the deadline of what a rank does, for its report to arrive
_PAUSES_S = (0.002, 0.2)  # between two looks at the store, ever longer


def open_store(rank: int, world: int, timeout_s: float) -> dist.Store:
    """The store that the launcher's variables name; one process has its own.

    Raises:
        dist.DistError: it does not answer.
    """
    if world == 1:
        return dist.HashStore()
    store, _, _ = next(iter(dist.rendezvous("env://", rank, world, timeout=timedelta(seconds=timeout_s))))
    # torchrun's store outlives an attempt, and with it what the attempt's ranks reported
    return dist.PrefixStore(f"preflight/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


class Coordinator:
    """One rank's end. Every rank reports on each check, rank 0 reads the reports and rules whether to go on.

    Attributes:
        nonce: a word that this preflight's ranks share, and no other's.
    """

    def __init__(self, store: dist.Store, rank: int, world: int, deadline_s: float):
        self._store, self._rank, self._world, self.deadline_s = store, rank, world, deadline_s
        if rank == 0:
            store.set("nonce", uuid.uuid4().hex)
        if not self._comes("nonce", time.monotonic() + deadline_s):
            raise TimeoutError(f"rank 0 has not come within {deadline_s:g} s")
        self.nonce = store.get("nonce").decode()

    def report(self, check: str, found: dict[str, Any]) -> None:
        self._store.set(f"{check}/{self._rank}", json.dumps(found))

    def reports(self, check: str, until: float) -> dict[int, dict[str, Any]]:
        """On rank 0: rank -> what it found, for those whose report has come at the time `until` (monotonic)."""
        keys = {r: f"{check}/{r}" for r in range(self._world)}
        return {r: json.loads(self._store.get(key)) for r, key in keys.items() if self._comes(key, until)}

    def rule(self, question: str, yes: bool) -> None:
        """On rank 0."""
        self._store.set(f"ruling/{question}", "yes" if yes else "no")

    def decision(self, question: str) -> bool:
        """What rank 0 rules.

        Raises:
            TimeoutError: nothing, for longer than it may take.
        """
        seconds = 2 * (self.deadline_s + MARGIN_S)
        if not self._comes(f"ruling/{question}", time.monotonic() + seconds):
            raise TimeoutError(f"rank 0 has not answered for {seconds:g} s")
        return self._store.get(f"ruling/{question}") == b"yes"

    def _comes(self, key: str, until: float) -> bool:
        """Whether the key is there by then."""
        pause = _PAUSES_S[0]
        while not self._store.check([key]):  # and no `wait`, in which no signal is heard
            if time.monotonic() >= until:
                return False
            time.sleep(pause)
            pause = min(_PAUSES_S[1], 1.5 * pause)
        return True
