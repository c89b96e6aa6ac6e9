"""How the ranks report to rank 0: through the launcher's store, which uses none of the connections that are checked."""

import os
import time
import uuid
from typing import Any

import torch.distributed as dist

from ndtrain.runtime import rendezvous
from ndtrain.runtime.signed_store import SignedStore

MARGIN_S = 5.0  # beyond the deadline of what a rank does, for its report to arrive
_PAUSES_S = (0.002, 0.2)  # between two reads of the store, growing


def open_store(rank: int, world: int, timeout_s: float) -> SignedStore:
    """The messages in the store that the launcher's variables name; one process has its own.

    Raises:
        ConfigError: the variables name none.
        dist.DistError: it does not answer.
    """
    store = dist.HashStore() if world == 1 else rendezvous.open_store(rank, timeout_s)
    # torchrun's store outlives an attempt, and with it what the attempt's ranks reported
    return SignedStore(store, f"preflight/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}")


class Coordinator:
    """Carries one rank's reports on each check to rank 0, and rank 0's decisions to all ranks.

    Attributes:
        nonce: a random word that the ranks of this preflight share, and no other's.
    """

    def __init__(self, store: SignedStore, rank: int, world: int, deadline_s: float):
        self._store, self._rank, self._world, self.deadline_s = store, rank, world, deadline_s
        if rank == 0:
            store.put("nonce", uuid.uuid4().hex)
        nonce = self._wait_for("nonce", time.monotonic() + deadline_s)
        if nonce is None:
            raise TimeoutError(f"rank 0 has not come within {deadline_s:g} s")
        self.nonce = str(nonce)

    def report(self, check: str, findings: dict[str, Any]) -> None:
        self._store.put(f"{check}/{self._rank}", findings)

    def reports(self, check: str, until: float) -> dict[int, dict[str, Any]]:
        """On rank 0: rank -> its findings, for those that have reported by the time `until` (monotonic)."""
        found = {r: self._wait_for(f"{check}/{r}", until) for r in range(self._world)}
        return {r: findings for r, findings in found.items() if isinstance(findings, dict)}

    def decide(self, question: str, yes: bool) -> None:
        """Publishes rank 0's decision."""
        self._store.put(f"decision/{question}", yes)

    def decision(self, question: str) -> bool:
        """Waits for rank 0's decision.

        Raises:
            TimeoutError: there is none within the time that rank 0 may take.
        """
        seconds = 2 * (self.deadline_s + MARGIN_S)
        yes = self._wait_for(f"decision/{question}", time.monotonic() + seconds)
        if yes is None:
            raise TimeoutError(f"rank 0 has not answered for {seconds:g} s")
        return yes is True

    def _wait_for(self, key: str, until: float) -> Any:
        """The message, for which it waits until that time (monotonic); None: it has not come."""
        pause = _PAUSES_S[0]
        while (value := self._store.read(key)) is None:  # and no `wait`, in which no signal is heard
            if time.monotonic() >= until:
                return None
            time.sleep(pause)
            pause = min(_PAUSES_S[1], 1.5 * pause)
        return value
