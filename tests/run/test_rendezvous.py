"""How ranks meet: what it costs, who is missing, and what a stranger can do."""

import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from ndtrain.config import ConfigError
from ndtrain.run import rendezvous, signed_store
from ndtrain.run.rendezvous import shake_hands
from ndtrain.run.signed_store import SignedStore

WORLD = 64


class Counting:
    """A store that counts operations."""

    def __init__(self, store: dist.Store):
        self.store, self.operations = store, Counter()

    def __getattr__(self, name):
        def call(*args):
            self.operations[name] += 1
            return getattr(self.store, name)(*args)

        return call

    @property
    def total(self) -> int:
        return sum(self.operations.values())


class Clock:
    """Time that passes only where someone sleeps, and what happens at some times."""

    def __init__(self, monkeypatch, events=()):
        self.now, self.events = 0.0, sorted(events, key=lambda event: event[0])
        for module in (rendezvous, signed_store):
            monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        while self.events and self.events[0][0] <= self.now:
            self.events.pop(0)[1]()


def signed(store) -> SignedStore:
    return SignedStore(store, "ndtrain", "secret")


def greets(store, rank: int, nonce: str):
    return lambda: signed(store).put(f"handshake/{rank}", nonce)


def test_shake_hands_waits_cheaply_and_names_missing_ranks(monkeypatch):
    """Rank 0 waits two minutes for three of 64 ranks that never come. It once took 201,597 operations."""
    shared = dist.HashStore()
    counting = Counting(shared)
    absent = (3, 17, 40)
    clock = Clock(monkeypatch, [(r / 10, greets(shared, r, f"nonce {r}")) for r in range(1, WORLD) if r not in absent])
    with pytest.raises(dist.DistStoreError) as error:
        shake_hands(signed(counting), 0, WORLD, 120.0)
    assert str(error.value) == "not all of 64 ranks joined within 120 s: ranks 3, 17, 40 did not"
    assert clock.now < 121 and counting.total < 120 * 5 + 2 * WORLD + 50, counting.operations


def test_shake_hands_counts_many_missing_ranks(monkeypatch):
    Clock(monkeypatch)
    with pytest.raises(dist.DistStoreError, match=r"ranks 1, 2, 3, 4, 5, 6, 7, 8 and 55 more did not$"):
        shake_hands(signed(dist.HashStore()), 0, WORLD, 1.0)


def test_shake_hands_ignores_ranks_of_earlier_attempt(monkeypatch):
    """Its handshake is still in torchrun's store, but it never reads the reply."""
    store = dist.HashStore()
    Clock(monkeypatch)
    for rank in (1, 2):
        greets(store, rank, f"old {rank}")()
    with pytest.raises(dist.DistStoreError, match=r"within 9 s: ranks 1, 2 did not$"):
        shake_hands(signed(store), 0, 3, 9.0)


def test_shake_hands_names_missing_reply_of_rank_0():
    with pytest.raises(dist.DistStoreError, match=r"^rank 2 had no reply from rank 0 within 0.1 s"):
        shake_hands(signed(dist.HashStore()), 2, 3, 0.1)


def met(store: dist.Store, world: int) -> set[str]:
    """The attempts that the ranks believe to be in."""
    with ThreadPoolExecutor(world) as pool:
        return set(pool.map(lambda rank: shake_hands(signed(store), rank, world, 60.0), range(world)))


def test_shake_hands_works_in_store_of_earlier_attempt():
    store = dist.HashStore()
    first, second = met(store, 4), met(store, 4)
    assert len(first) == len(second) == 1 and first != second
    assert len(met(store, 1)) == 1


def test_shake_hands_ignores_forged_messages(capsys):
    store = dist.HashStore()
    for rank in range(1, 4):
        SignedStore(store, "ndtrain", "guess").put(f"handshake/{rank}", "forged")
    assert len(met(store, 4)) == 1


def test_the_ranks_of_one_host_meet_on_loopback(monkeypatch):
    """Rank 0 serves the store. On several hosts its address is MASTER_ADDR; on one host nothing resolves that name."""
    free = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=1)).port
    variables = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "no-such-host", "MASTER_PORT": str(free)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with ThreadPoolExecutor(3) as pool:
        meetings = list(pool.map(lambda rank: rendezvous.meet(rank, 3, 60.0), range(3)))
    assert len({meeting.prefix for meeting in meetings}) == 1
    meetings[0].messages.put("x", 1)
    assert meetings[2].messages.read("x") == 1
    assert os.environ["GLOO_SOCKET_IFNAME"] in ("lo", "lo0") and os.environ["NCCL_SOCKET_IFNAME"][0] == "="
    rendezvous._servers.pop(free)


def test_missing_master_addr_is_one_line_error(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="MASTER_ADDR and MASTER_PORT are not set"):
        rendezvous.meet(1, 2, 1.0)
