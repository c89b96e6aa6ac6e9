"""Signed messages between the processes of a job, in a store that anyone on the network may write to.

PyTorch's TCPStore does not authenticate its clients. Therefore every message carries an HMAC-SHA256 of its key and its
content, computed with the job's token. The token is not sent to the store: launchers pass it in the environment, as
`TOKEN`. A message without a valid signature counts as absent, and is logged. Without a token, as under plain torchrun,
every message is accepted.

A message is JSON of bounded size, and is parsed only after its signature was checked. Its reader checks its fields.
"""

import hashlib
import hmac
import json
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

TOKEN = "NDTRAIN_TOKEN"  # variable with a secret text that only the processes of one job know
MOST_BYTES = 8 << 20  # maximum size of a message, which is also the limit of a TCPStore
PAUSES_S = (0.005, 0.2)  # first and longest pause between two reads of the store
_NO_SIGNATURE = "unsigned"

log = logging.getLogger("ndtrain")


def signature(token: str, name: str, content: bytes) -> str:
    """Return the HMAC-SHA256 of a message as hexadecimal digits.

    Args:
        name: the whole key. It is part of the signed text, so nobody can copy the message to another key.
    """
    return hmac.new(token.encode(), name.encode() + b"\0" + content, hashlib.sha256).hexdigest()


def pauses() -> Iterator[float]:
    """Yield the seconds to wait between two reads of the store, growing by half each time up to a maximum."""
    pause, most = PAUSES_S
    while True:
        yield pause
        pause = min(most, 1.5 * pause)


class SignedStore:
    """The messages of a job, or of a part of the job.

    Args:
        store: the store that holds the messages.
        scope: prefix of their keys.
        token: the token of the job. None: the token in the environment, if any.
    """

    def __init__(self, store: dist.Store, scope: str, token: str | None = None):
        self._store, self._scope = store, scope
        self._token = os.environ.get(TOKEN) if token is None else token
        self._refused: set[str] = set()

    def within(self, scope: str) -> "SignedStore":
        """Return the messages in a sub-scope of this scope."""
        return SignedStore(self._store, f"{self._scope}/{scope}", self._token or "")

    def put(self, key: str, value: Any) -> None:
        """Publish a message. `value` must be convertible to JSON and must not be None."""
        self._store.set(self._name(key), self._sealed(key, value))

    def put_all(self, values: Mapping[str, Any]) -> None:
        """Publish several messages in one operation."""
        if values:
            names = [self._name(key) for key in values]
            self._store.multi_set(names, [self._sealed(key, value) for key, value in values.items()])

    def has(self, *keys: str) -> bool:
        """Return True if all keys exist. Signatures are not checked."""
        return self._store.check([self._name(key) for key in keys])

    def read(self, key: str) -> Any:
        """Return the message; None if there is no message signed by this job."""
        return self._opened(key, self._store.get(self._name(key))) if self.has(key) else None

    def read_all(self, keys: Iterable[str]) -> dict[str, Any]:
        """Return the messages signed by this job, by key; {} unless all keys exist. Takes at most two operations."""
        keys = list(keys)
        if not keys or not self.has(*keys):
            return {}
        found = self._store.multi_get([self._name(key) for key in keys])
        opened = {key: self._opened(key, raw) for key, raw in zip(keys, found, strict=True)}
        return {key: value for key, value in opened.items() if value is not None}

    def wait(self, key: str, timeout_s: float) -> Any:
        """Wait for a message signed by this job, and return it.

        Raises:
            DistStoreError: there is no such message within `timeout_s` seconds.
        """
        name, end = self._name(key), time.monotonic() + timeout_s
        for pause in pauses():
            self._store.wait([name], timedelta(seconds=max(0.001, end - time.monotonic())))
            value = self._opened(key, self._store.get(name))
            if value is not None:
                return value
            if time.monotonic() > end:
                break
            time.sleep(pause)
        raise dist.DistStoreError(f"no message {name} signed by this job arrived within {timeout_s:g} s")

    def wait_all(self, keys: Iterable[str], timeout_s: float) -> dict[str, Any]:
        """Wait up to `timeout_s` seconds for all messages. Return the messages that have arrived, by key."""
        missing, end, found = list(keys), time.monotonic() + timeout_s, dict[str, Any]()
        for pause in pauses():
            found |= self.read_all(missing)
            missing = [key for key in missing if key not in found]
            if not missing:
                return found
            if time.monotonic() > end:
                return found | self._read_existing(missing)
            time.sleep(pause)

    def _read_existing(self, keys: list[str]) -> dict[str, Any]:
        """Return the messages that exist, by key. If few of n are missing, this takes a few times log n operations."""
        if len(keys) <= 1 or self.has(*keys):
            return self.read_all(keys)
        half = len(keys) // 2
        return self._read_existing(keys[:half]) | self._read_existing(keys[half:])

    def claim(self, key: str, value: Any) -> Any:
        """Claim a key, and return the value of the first process that claimed it: `value` if no other was faster."""
        expected, mine = "", self._sealed(key, value)
        for _ in range(3):  # the second attempt replaces a forged message, unless someone replaces it again
            held = self._store.compare_set(self._name(key), expected, mine)
            first = self._opened(key, held)
            if first is not None:
                return first
            expected = held.decode(errors="replace")
        return value

    def _name(self, key: str) -> str:
        return f"{self._scope}/{key}"

    def _sealed(self, key: str, value: Any) -> str:
        """Return the message as `SIGNATURE JSON`, in ASCII."""
        content = json.dumps(value)
        signed = signature(self._token, self._name(key), content.encode()) if self._token else _NO_SIGNATURE
        return f"{signed} {content}"

    def _opened(self, key: str, raw: bytes) -> Any:
        """Return the content of a message; None if it is too long, is not signed by this job, or is not JSON."""
        signed, _, content = raw.partition(b" ")
        if len(raw) > MOST_BYTES:
            return self._refuse(key, "is too long")
        if self._token and not hmac.compare_digest(signed, signature(self._token, self._name(key), content).encode()):
            return self._refuse(key, "is not signed by this job")
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            return self._refuse(key, "is not JSON")

    def _refuse(self, key: str, why: str) -> None:
        """Warn that a message is ignored, once for each key."""
        name = self._name(key)
        if name in self._refused:
            return
        self._refused.add(name)
        reason = f"another process writes into the store, or ranks have different {TOKEN}"
        line = f"ignored the message {name}, which {why}: {reason}"
        log.warning(line)
        print(f"warning: {line}", file=sys.stderr, flush=True)
