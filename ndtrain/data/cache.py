"""Files of the data cache: one process builds an entry while the others wait, and only whole entries are ever seen."""

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from ndtrain.config import ConfigError

T = TypeVar("T")

_BLOCK = 1 << 16  # bytes
_BLOCKS = 256


def digest(*parts: Any) -> str:
    """A short hexadecimal digest of JSON-serialisable `parts`."""
    return blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def load_or_build(entry: Path, load: Callable[[], T | None], build: Callable[[], None]) -> T:
    """What `load` returns; where it returns None, `build` runs first, in one process at a time.

    The lock is the kernel's (flock on `<entry>.lock`), so a killed builder does not leave it behind. An entry that is
    already there needs no lock, hence a read-only cache serves too.

    Raises:
        ConfigError: the cache cannot be written.
    """
    try:
        if (found := load()) is not None:
            return found
        entry.parent.mkdir(parents=True, exist_ok=True)
        with entry.with_name(entry.name + ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (found := load()) is None:
                build()
                found = load()
    except OSError as error:
        raise ConfigError(
            f"data.cache: cannot use {entry.parent} ({error.strerror}): set data.cache to a writable folder"
        ) from error
    if found is None:
        raise ConfigError(f"data.cache: {entry} reads back damaged: set data.cache to a folder on a sound disk")
    return found


@contextmanager
def publish(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which appears as `path`, flushed to disk, once the block ends without an exception.

    The caller holds the lock of the entry, so one temporary name serves: a leftover of a killed builder is overwritten.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def spot_digest(path: Path) -> str:
    """Digest of a file's size and of up to 256 blocks of 64 KiB spread evenly over it.

    That is every byte of a file up to 16 MiB. Of a larger one it is enough to notice truncation and lost pages, at a
    cost that does not grow with the corpus.
    """
    size = path.stat().st_size
    count = min(_BLOCKS, -(-size // _BLOCK))
    hashed = blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as file:
        for offset in np.linspace(0, max(0, size - _BLOCK), count).astype(np.int64):
            file.seek(int(offset))
            hashed.update(file.read(_BLOCK))
    return hashed.hexdigest()
