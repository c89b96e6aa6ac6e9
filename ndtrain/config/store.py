"""Folders on a file system, or in an object store such as s3://bucket/run.

An object store has no folders and no renaming, but it replaces whole objects at once. `StorePath` has the methods of
`pathlib.Path` that checkpoints and tokenizers use. fsspec talks to the store, and repeats requests that fail.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, cast

from ndtrain.config.schema import Config, ConfigError

_SCHEME = "://"
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}  # scheme -> ndtrain's extra with its package
_BLOCK = 16 << 20  # bytes of an object that are uploaded in one request


class _Stat(NamedTuple):
    st_size: int
    st_mtime: float


def is_address(text: object) -> bool:
    """Return True for the address of an object store."""
    return _SCHEME in str(text)


def folder_at(text: str | Path) -> Path:
    """Return the folder with a path, or with the address of an object store. The latter is a `StorePath`.

    Raises:
        ConfigError: there is no package for such an address.
    """
    if not is_address(text):
        return Path(text).expanduser()
    scheme, _, path = str(text).partition(_SCHEME)
    try:
        import fsspec

        # other ranks write into the store too, so what it listed a moment ago is not kept
        system = fsspec.filesystem(scheme, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        extra = _EXTRAS.get(scheme)
        fix = f"pip install 'ndtrain[{extra}]'" if extra else "known are s3://, gs:// and what fsspec has a package for"
        raise ConfigError(f"{text}: no package for {scheme}{_SCHEME} is installed ({error}): {fix}") from error
    return cast(Path, StorePath(system, scheme, path.rstrip("/")))


def checkpoint_folder(cfg: Config) -> Path:
    """Return the folder of a run's checkpoints."""
    return folder_at(cfg.checkpoint.folder) if cfg.checkpoint.folder else Path(cfg.run.dir) / "checkpoints"


def in_store(path: Path) -> bool:
    """Return True if the path is in an object store."""
    return isinstance(cast(Any, path), StorePath)


class StorePath:
    """An object, or all objects whose names begin with a prefix and a slash.

    Every error of the store is an OSError.

    Args:
        system: fsspec's file system.
        scheme: of the address, for example s3.
        path: bucket and name.
    """

    def __init__(self, system: Any, scheme: str, path: str):
        self._system, self._scheme, self._path = system, scheme, PurePosixPath(system._strip_protocol(path))

    def __str__(self) -> str:
        return f"{self._scheme}{_SCHEME}{str(self._path).lstrip('/')}"

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorePath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __lt__(self, other: "StorePath") -> bool:
        return str(self) < str(other)

    def __truediv__(self, name: str | PurePosixPath) -> "StorePath":
        return self._at(self._path / name)

    def _at(self, path: PurePosixPath) -> "StorePath":
        return StorePath(self._system, self._scheme, str(path))

    @property
    def name(self) -> str:
        return self._path.name

    @property
    def suffix(self) -> str:
        return self._path.suffix

    @property
    def parent(self) -> "StorePath":
        return self._at(self._path.parent)

    def absolute(self) -> "StorePath":
        return self

    resolve = expanduser = absolute

    def with_name(self, name: str) -> "StorePath":
        return self._at(self._path.with_name(name))

    def relative_to(self, other: "StorePath") -> PurePosixPath:
        return self._path.relative_to(other._path)

    def match(self, pattern: str) -> bool:
        return self._path.match(pattern)

    # ------------------------------------------------------------------------------------------------------- requests

    def exists(self) -> bool:
        with self._asking():
            return bool(self._system.exists(str(self._path)))

    def is_file(self) -> bool:
        with self._asking():
            return bool(self._system.isfile(str(self._path)))

    def is_dir(self) -> bool:
        with self._asking():
            return bool(self._system.isdir(str(self._path)))

    def stat(self) -> _Stat:
        with self._asking():
            info = self._system.info(str(self._path))
        changed = info.get("LastModified") or info.get("created") or info.get("mtime")
        return _Stat(info["size"], changed.timestamp() if hasattr(changed, "timestamp") else float(changed or 0))

    def iterdir(self) -> Iterator["StorePath"]:
        with self._asking():
            listed = self._system.ls(str(self._path), detail=False)
        yield from sorted(self._at(PurePosixPath(path)) for path in listed if PurePosixPath(path).name)

    def glob(self, pattern: str) -> Iterator["StorePath"]:
        """Yield what fits the pattern. Only its last part may have wildcards.

        Raises:
            OSError: the store cannot be read, or has no such bucket.
        """
        folder, slash, last = pattern.rpartition("/")
        if slash:
            yield from (self / folder).glob(last)
            return
        try:
            listed = list(self.iterdir())
        except FileNotFoundError:  # no object has this prefix
            self._require_bucket()
            return
        yield from (path for path in listed if fnmatch(path.name, pattern))

    def _require_bucket(self) -> None:
        bucket = next(part for part in self._path.parts if part != "/")
        with self._asking():
            there = self._scheme not in _EXTRAS or self._system.exists(bucket)
        if not there:
            raise FileNotFoundError(errno.ENOENT, f"there is no bucket {bucket}, or it cannot be reached", str(self))

    def rglob(self, pattern: str) -> Iterator["StorePath"]:
        """Yield the objects at any depth whose name fits the pattern."""
        with self._asking():
            found = self._system.find(str(self._path))
        yield from (path for path in map(self._at, map(PurePosixPath, found)) if fnmatch(path.name, pattern))

    def open(self, mode: str = "rb") -> BinaryIO:
        """Open an object. What is written appears as a whole when the file is closed."""
        with self._asking():
            return cast(BinaryIO, self._system.open(str(self._path), mode, block_size=_BLOCK))

    def read_range(self, begin: int, end: int) -> bytes:
        """Return bytes [begin, end) of an object, or fewer if it ends before."""
        with self._asking():
            return cast(bytes, self._system.cat_file(str(self._path), start=begin, end=end))

    def read_bytes(self) -> bytes:
        with self._asking():
            return cast(bytes, self._system.cat_file(str(self._path)))

    def read_text(self) -> str:
        return self.read_bytes().decode()

    def write_bytes(self, content: bytes) -> None:
        with self._asking():
            self._system.pipe_file(str(self._path), content)

    def create(self, content: bytes) -> bool:
        """Write an object, unless it exists: then return False. Of several processes, one succeeds.

        Raises:
            OSError: also if the store cannot do this.
        """
        try:
            with self._asking():
                self._system.pipe_file(str(self._path), content, mode="create")
        except FileExistsError:
            return False
        return True

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            with self._asking():
                self._system.rm_file(str(self._path))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove_all(self) -> None:
        """Remove all objects below this one."""
        with self._asking():
            if found := self._system.find(str(self._path)):
                self._system.rm(found)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        with store_errors(str(self)):
            yield


@contextmanager
def store_errors(address: str) -> Iterator[None]:
    """Turn any error within the context into an OSError that names the address."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            kind = type(error) if type(error).__module__ == "builtins" else OSError
            raise kind(error.errno or errno.EIO, error.strerror or str(error) or kind.__name__, address) from error
        raise
    except Exception as error:  # packages have errors of their own for a lost connection
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}", address) from error
