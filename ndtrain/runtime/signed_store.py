"""Messages between the processes of a job, signed, in a store that anyone on the network may write to.

PyTorch's TCPStore asks nobody who they are. So every message carries an HMAC-SHA256 of its key and its content, made
with the job's token. The token does not cross the network with them: launchers hand it over in the environment, as
`TOKEN`. A message that is not signed with it counts as absent, and is logged. Without a token, as under plain torchrun,
every message counts.

A message is JSON. Its size is bounded, and it is parsed after its signature is checked. Its reader checks its fields.
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

TOKEN = "NDTRAIN_TOKEN"  # any text that the processes of one job share, and nobody else knows
MOST_BYTES = 8 << 20  # of a message; a TCPStore takes no larger ones
PAUSES_S = (0.005, 0.2)  # between two looks into the store: the first, growing to the last
_NO_SIGNATURE = "unsigned"

log = logging.getLogger("ndtrain")


def signature(token: str, name: str, content: bytes) -> str:
    """The HMAC-SHA256 of a message as hexadecimal digits.

    Args:
        name: the whole key, so that a message cannot be copied to another key.
    """
    return hmac.new(token.encode(), name.encode() + b"\0" + content, hashlib.sha256).hexdigest()


def pauses() -> Iterator[float]:
    """Seconds to wait between two looks into the store, growing by half each time."""
    pause, most = PAUSES_S
    while True:
        yield pause
        pause = min(most, 1.5 * pause)


class SignedStore:
    """The messages of a job, or of a part of it.

    Args:
        store: holds them.
        scope: the beginning of their keys.
        token: None: that of the environment, if it has one.
    """

    def __init__(self, store: dist.Store, scope: str, token: str | None = None):
        self._store, self._scope = store, scope
        self._token = os.environ.get(TOKEN) if token is None else token
        self._refused: set[str] = set()

    def within(self, scope: str) -> "SignedStore":
        """The messages of a part of this scope."""
        return SignedStore(self._store, f"{self._scope}/{scope}", self._token or "")

    def put(self, key: str, value: Any) -> None:
        """Publishes a message, which JSON can express and which is not None."""
        self._store.set(self._name(key), self._sealed(key, value))

    def put_all(self, values: Mapping[str, Any]) -> None:
        """Publishes several messages in one operation."""
        if values:
            names = [self._name(key) for key in values]
            self._store.multi_set(names, [self._sealed(key, value) for key, value in values.items()])

    def has(self, *keys: str) -> bool:
        """Whether all keys are there, with a valid signature or without."""
        return self._store.check([self._name(key) for key in keys])

    def read(self, key: str) -> Any:
        """The message. None: there is none that this job has signed."""
        return self._opened(key, self._store.get(self._name(key))) if self.has(key) else None

    def read_all(self, keys: Iterable[str]) -> dict[str, Any]:
        """The messages that this job has signed, by key. Nothing until all keys are there. Two operations at most."""
        keys = list(keys)
        if not keys or not self.has(*keys):
            return {}
        found = self._store.multi_get([self._name(key) for key in keys])
        opened = {key: self._opened(key, raw) for key, raw in zip(keys, found, strict=True)}
        return {key: value for key, value in opened.items() if value is not None}

    def wait(self, key: str, timeout_s: float) -> Any:
        """The message, as soon as there is one that this job has signed.

        Raises:
            DistStoreError: there is none within `timeout_s` seconds.
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
        raise dist.DistStoreError(f"no message {name} that this job has signed came within {timeout_s:g} s")

    def wait_all(self, keys: Iterable[str], timeout_s: float) -> dict[str, Any]:
        """The messages, as soon as all are there; those that came where some did not within `timeout_s` seconds."""
        missing, end, found = list(keys), time.monotonic() + timeout_s, dict[str, Any]()
        for pause in pauses():
            found |= self.read_all(missing)
            missing = [key for key in missing if key not in found]
            if not missing:
                return found
            if time.monotonic() > end:
                late = {key: self.read(key) for key in missing}
                return found | {key: value for key, value in late.items() if value is not None}
            time.sleep(pause)

    def claim(self, key: str, value: Any) -> Any:
        """The message of the first process that has claimed the key: `value`, unless another one was faster."""
        expected, mine = "", self._sealed(key, value)
        for _ in range(3):  # the second replaces a forged message, unless that is replaced again
            held = self._store.compare_set(self._name(key), expected, mine)
            first = self._opened(key, held)
            if first is not None:
                return first
            expected = held.decode(errors="replace")
        return value

    def _name(self, key: str) -> str:
        return f"{self._scope}/{key}"

    def _sealed(self, key: str, value: Any) -> str:
        """`SIGNATURE JSON`, in ASCII."""
        content = json.dumps(value)
        signed = signature(self._token, self._name(key), content.encode()) if self._token else _NO_SIGNATURE
        return f"{signed} {content}"

    def _opened(self, key: str, raw: bytes) -> Any:
        """The content. None: this job has not signed it, or it is no JSON."""
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
        """Says so, once for each key."""
        name = self._name(key)
        if name in self._refused:
            return
        self._refused.add(name)
        line = f"ignored: the message {name} {why}: a stranger writes into the store, or ranks have different {TOKEN}"
        log.warning(line)
        print(f"warning: {line}", file=sys.stderr, flush=True)
