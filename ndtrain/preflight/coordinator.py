"""The ranks' reports to rank 0. They go through the launcher's store, which uses none of the connections under test."""

import os
import time
import uuid
from typing import Any

import torch.distributed as dist

from ndtrain.run import rendezvous
from ndtrain.run.signed_store import SignedStore

MARGIN_S = 5.0  # time for a report to arrive after a rank's deadline
_PAUSES_S = (0.002, 0.2)  # between two reads of the store: first and longest


def open_store(rank: int, world: int, timeout_s: float) -> SignedStore:
    """Open the store that the launcher's environment variables name. A single process uses a store of its own.

    Raises:
        ConfigError: the variables name no store.
        dist.DistError: the store does not answer.
    """
    store = dist.HashStore() if world == 1 else rendezvous.open_store(rank, timeout_s)
    # torchrun's store outlives an attempt, and keeps the reports of the attempt's ranks
    return SignedStore(store, f"preflight/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}")


class Coordinator:
    """Carries one rank's reports on each check to rank 0, and rank 0's decisions to all ranks.

    Attributes:
        nonce: a random word that only the ranks of this preflight share.
    """

    def __init__(self, store: SignedStore, rank: int, world: int, deadline_s: float):
        self._store, self._rank, self._world, self.deadline_s = store, rank, world, deadline_s
        if rank == 0:
            store.put("nonce", uuid.uuid4().hex)
        nonce = self._wait_for("nonce", time.monotonic() + deadline_s)
        if nonce is None:
            raise TimeoutError(f"rank 0 did not connect within {deadline_s:g} s")
        self.nonce = str(nonce)

    def report(self, check: str, findings: dict[str, Any]) -> None:
        self._store.put(f"{check}/{self._rank}", findings)

    def reports(self, check: str, until: float) -> dict[int, dict[str, Any]]:
        """Return rank -> its findings, for the ranks that have reported by the time `until` (monotonic). Call it on
        rank 0."""
        found = {r: self._wait_for(f"{check}/{r}", until) for r in range(self._world)}
        return {r: findings for r, findings in found.items() if isinstance(findings, dict)}

    def decide(self, question: str, yes: bool) -> None:
        """Publish rank 0's decision."""
        self._store.put(f"decision/{question}", yes)

    def decision(self, question: str) -> bool:
        """Wait for rank 0's decision.

        Raises:
            TimeoutError: rank 0 has not decided within the time it may take.
        """
        seconds = 2 * (self.deadline_s + MARGIN_S)
        yes = self._wait_for(f"decision/{question}", time.monotonic() + seconds)
        if yes is None:
            raise TimeoutError(f"rank 0 has not answered for {seconds:g} s")
        return yes is True

    def _wait_for(self, key: str, until: float) -> Any:
        """Wait for the message under `key` until the time `until` (monotonic). Return None if it has not arrived."""
        pause = _PAUSES_S[0]
        while (value := self._store.read(key)) is None:  # no `wait`, which would block signals
            if time.monotonic() >= until:
                return None
            time.sleep(pause)
            pause = min(_PAUSES_S[1], 1.5 * pause)
        return value
