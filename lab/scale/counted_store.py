"""A store that counts the operations of its process."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist


class CountedStore(dist.Store):
    """Passes operations on to a store, and counts them.

    Attributes:
        operations: name of an operation -> how often it was called. A wait for several keys counts once.
        nbytes: bytes of the values that were sent and received.
    """

    def __init__(self, store: dist.Store):
        super().__init__()
        self._store, self.operations, self.nbytes = store, Counter[str](), 0

    def set(self, key: str, value: Any) -> None:
        self._count("set", [value])
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        value = self._store.get(key)
        self._count("get", [value])
        return value

    def add(self, key: str, amount: int) -> int:
        self._count("add")
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        self._count("check")
        return self._store.check(keys)

    def compare_set(self, key: str, expected: Any, wanted: Any) -> bytes:
        self._count("compare_set", [wanted])
        return self._store.compare_set(key, expected, wanted)

    def wait(self, *args: Any) -> None:
        self._count("wait")
        self._store.wait(*args)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = self._store.multi_get(keys)
        self._count("multi_get", values)
        return values

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        self._count("multi_set", values)
        self._store.multi_set(keys, values)

    def has_extended_api(self) -> bool:
        """Return True: `multi_get` and `multi_set` exist."""
        return True

    def _count(self, name: str, values: Sequence[Any] = ()) -> None:
        self.operations[name] += 1
        self.nbytes += sum(map(len, values))
