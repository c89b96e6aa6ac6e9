"""Thousands of ranks in one process. Each is a thread, and one of them runs at a time until it waits for another.

Time is virtual: it advances only when all ranks wait or sleep. Store operations, messages and open files are counted
for each rank.
"""

import heapq
import itertools
import os
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

STACK_BYTES = 1 << 20


@dataclass
class Counted:
    """What one rank has done.

    Attributes:
        operations: of the store, by name.
        peers: the ranks that it has exchanged messages with.
        files: the names of the files that it has opened.
        most_open: the most files that this process had open while it opened one. No rank waits with an open file.
    """

    operations: Counter[str] = field(default_factory=Counter)
    peers: set[int] = field(default_factory=set)
    files: Counter[str] = field(default_factory=Counter)
    most_open: int = 0


class Cluster:
    """The ranks of one host process.

    Attributes:
        counted: by rank.
        group: a group of all ranks, for `dist.all_reduce`, `dist.send` and `dist.recv` on the CPU.
        values: of the store.
        now: virtual seconds.
    """

    def __init__(self, ranks: int):
        self.ranks, self.now, self.values = ranks, 0.0, dict[str, bytes]()
        self.counted = [Counted() for _ in range(ranks)]
        self.group, self.store = _Group(self), _Store(self)
        self._own, self._turn = threading.local(), [threading.Semaphore(0) for _ in range(ranks)]
        self._scheduler = threading.Semaphore(0)
        self._ready: deque[int] = deque()
        self._waiting: defaultdict[str, list[int]] = defaultdict(list)  # what is waited for -> ranks
        self._asleep: list[tuple[float, int, int]] = []  # a heap
        self._order = itertools.count()

    @property
    def rank(self) -> int:
        """The rank that runs."""
        return self._own.rank

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """Run work(rank) on every rank, and return the results.

        Raises:
            BaseException: that of the first rank that failed.
            RuntimeError: ranks wait for something that does not happen.
        """
        results: list[Any] = [None] * self.ranks
        errors: dict[int, BaseException] = {}

        def body(rank: int) -> None:
            self._own.rank = rank
            self._turn[rank].acquire()
            try:
                results[rank] = work(rank)
            except BaseException as error:
                errors[rank] = error
            self._scheduler.release()

        before = threading.stack_size(STACK_BYTES)
        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(self.ranks)]
        with self._patched():
            for thread in threads:
                thread.start()
            threading.stack_size(before)
            self._ready.extend(range(self.ranks))
            while (rank := self._next()) is not None and not errors:
                self._turn[rank].release()
                self._scheduler.acquire()
        if errors:
            raise errors[min(errors)]
        if any(self._waiting.values()):
            raise RuntimeError(f"ranks wait for ever: {dict(list(self._waiting.items())[:5])}")
        return results

    def wait(self, what: str) -> None:
        """Let the others run until `what` has happened."""
        self._waiting[what].append(self.rank)
        self._give_up_turn()

    def happened(self, what: str) -> None:
        self._ready.extend(self._waiting.pop(what, ()))

    def sleep(self, seconds: float) -> None:
        heapq.heappush(self._asleep, (self.now + seconds, next(self._order), self.rank))
        self._give_up_turn()

    def _give_up_turn(self) -> None:
        self._scheduler.release()
        self._turn[self.rank].acquire()

    def _next(self) -> int | None:
        if not self._ready and self._asleep:
            self.now, _, rank = heapq.heappop(self._asleep)
            return rank
        return self._ready.popleft() if self._ready else None

    @contextmanager
    def _patched(self) -> Iterator[None]:
        """Clocks, collectives and files of this process are the cluster's."""
        really_open, others = os.open, _open_files()

        def opened(path: Any, *args: Any, **options: Any) -> int:
            fd = really_open(path, *args, **options)
            if (rank := getattr(self._own, "rank", None)) is not None:
                counted = self.counted[rank]
                counted.files[os.path.basename(path)] += 1
                counted.most_open = max(counted.most_open, _open_files() - others)
            return fd

        with (
            mock.patch.object(os, "open", opened),
            mock.patch.multiple(time, sleep=self.sleep, monotonic=lambda: self.now),
            mock.patch.multiple(dist, all_reduce=_all_reduce, send=_send, recv=_recv),
        ):
            yield


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


class _Group:
    """All ranks of a cluster, as a process group."""

    def __init__(self, cluster: Cluster):
        self.cluster, self.calls = cluster, [0] * cluster.ranks
        self.sums: dict[int, tuple[Tensor, int, int]] = {}  # number of a call -> result, arrived, left
        self.mail: defaultdict[tuple[int, int], deque[Tensor]] = defaultdict(deque)

    def rank(self) -> int:
        return self.cluster.rank

    def size(self) -> int:
        return self.cluster.ranks


def _all_reduce(x: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
    """Around a ring: each rank exchanges messages with its two neighbours."""
    cluster, rank = group.cluster, group.rank()
    cluster.counted[rank].peers |= {(rank - 1) % group.size(), (rank + 1) % group.size()}
    call, group.calls[rank] = group.calls[rank], group.calls[rank] + 1
    combine = {dist.ReduceOp.SUM: torch.add, dist.ReduceOp.MIN: torch.minimum, dist.ReduceOp.MAX: torch.maximum}[op]
    total, arrived, left = group.sums.get(call, (None, 0, 0))
    group.sums[call] = (x.clone() if total is None else combine(total, x), arrived + 1, left)
    if arrived + 1 == group.size():
        cluster.happened(f"all_reduce {call}")
    else:
        cluster.wait(f"all_reduce {call}")
    total, arrived, left = group.sums[call]
    x.copy_(total)
    group.sums[call] = total, arrived, left + 1
    if left + 1 == group.size():
        del group.sums[call]


def _send(x: Tensor, group: Any, group_dst: int) -> None:
    rank = group.rank()
    group.cluster.counted[rank].peers.add(group_dst)
    group.mail[rank, group_dst].append(x.clone())
    group.cluster.happened(f"message {rank} -> {group_dst}")


def _recv(x: Tensor, group: Any, group_src: int) -> None:
    rank = group.rank()
    group.cluster.counted[rank].peers.add(group_src)
    while not group.mail[group_src, rank]:
        group.cluster.wait(f"message {group_src} -> {rank}")
    x.copy_(group.mail[group_src, rank].popleft())


class _Store(dist.Store):
    """A store in this process, which counts the operations of each rank."""

    def __init__(self, cluster: Cluster):
        super().__init__()
        self._cluster = cluster

    def set(self, key: str, value: Any) -> None:
        self._count("set")
        self._put(key, value)

    def get(self, key: str) -> bytes:
        self._count("get")
        return self._cluster.values[key]

    def check(self, keys: list[str]) -> bool:
        self._count("check")
        return all(key in self._cluster.values for key in keys)

    def wait(self, keys: list[str], *_: Any) -> None:
        self._count("wait")
        for key in keys:
            while key not in self._cluster.values:
                self._cluster.wait(f"key {key}")

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._count("multi_get")
        return [self._cluster.values[key] for key in keys]

    def multi_set(self, keys: list[str], values: Sequence[Any]) -> None:
        self._count("multi_set")
        for key, value in zip(keys, values, strict=True):
            self._put(key, value)

    def _put(self, key: str, value: Any) -> None:
        self._cluster.values[key] = value.encode() if isinstance(value, str) else value
        self._cluster.happened(f"key {key}")

    def _count(self, name: str) -> None:
        self._cluster.counted[self._cluster.rank].operations[name] += 1
