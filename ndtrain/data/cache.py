"""Files of the data cache. One process builds an entry while the others wait. Readers see only complete entries."""

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

_SAMPLE_BYTES = 1 << 16  # of one block that `sampled_digest` reads
SAMPLES = 256  # of a corpus


def digest(*parts: Any) -> str:
    """Return a short hexadecimal digest of JSON-serialisable `parts`."""
    return blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def load_or_build(entry: Path, load: Callable[[], T | None], build: Callable[[], None]) -> T:
    """Return the result of `load`. If it is None, run `build` first, in one process at a time.

    The lock is the kernel's (flock on `<entry>.lock`), so a killed builder does not leave it behind. Loading an
    existing entry takes no lock, so the cache may be read-only.

    Raises:
        ConfigError: the cache cannot be written.
    """
    try:
        if (loaded := load()) is not None:
            return loaded
        entry.parent.mkdir(parents=True, exist_ok=True)
        with entry.with_name(entry.name + ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (loaded := load()) is None:
                build()
                loaded = load()
    except OSError as error:
        raise ConfigError(
            f"data.cache: cannot use {entry.parent} ({error.strerror}): set data.cache to a writable folder"
        ) from error
    if loaded is None:
        raise ConfigError(
            f"data.cache: {entry} was damaged when read back: set data.cache to a folder on a healthy disk"
        )
    return loaded


@contextmanager
def atomic_write(path: Path, suffix: str = ".tmp") -> Iterator[BinaryIO]:
    """Yield a file to write. If the block ends without an exception, flush it to disk and rename it to `path`.

    Args:
        suffix: of the temporary file. The default is for writers that hold the lock of the entry: the next builder
            overwrites the file of a killed one.
    """
    temporary = path.with_name(path.name + suffix)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sampled_digest(path: Path, samples: int = SAMPLES) -> str:
    """Return a digest of a file's size and of up to `samples` blocks of 64 KiB, spread evenly over it.

    A file of at most `samples` blocks (16 MiB by default) is read whole. For a larger file the digest detects
    truncation and large missing regions, and its cost does not grow with the corpus.
    """
    size = path.stat().st_size
    count = min(samples, -(-size // _SAMPLE_BYTES))
    hashed = blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as file:
        for offset in np.linspace(0, max(0, size - _SAMPLE_BYTES), count).astype(np.int64):
            file.seek(int(offset))
            hashed.update(file.read(_SAMPLE_BYTES))
    return hashed.hexdigest()
