"""Reads elements of the tensors in safetensors files, after checking their headers."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

from ndtrain.checkpoint.safetensors_io import WEIGHT_DTYPES, DamagedFile, bytes_of
from ndtrain.config.json_file import JsonError, read_object
from ndtrain.config.store import StorePath, in_store
from ndtrain.mesh.row_map import Rows

_ITEM_BYTES = {name: dtype.itemsize for name, dtype in WEIGHT_DTYPES.items()} | {
    "C64": 8, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1,
    "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
_LONGEST_HEADER = 100_000_000  # bytes: the library's own limit
_FIRST = 64 << 10  # bytes of an object that are read at first, for the header
_MOST = 2**63 - 1  # the largest size
_LONGEST_RANGE = 8 << 20  # bytes of an object that are requested in advance
_MOST_RANGES = 32  # ranges that are on their way at a time
_CONNECTIONS = 8  # to an object store, of one rank
_OPEN = 16  # files that one reader keeps open
_GAP = 64 << 10  # bytes: a smaller gap between two pieces is read along with them, which is faster than a second call
_SPAN = 1 << 20  # bytes of pieces and gaps read together: they stay in the cache until the pieces are copied


class Stored(NamedTuple):
    """A tensor stored in a file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    size: int  # bytes


class Reader:
    """Reads elements of the tensors of a set of safetensors files.

    The files are read with `pread`, never mapped. If the disk cannot deliver a page, the call then raises an error.
    With a mapped file, a signal would end the process.

    Args:
        files: are opened at once.
        rename: name of a tensor in its file -> name that it has in this reader.
        index: tensor -> its file, for further files, each of which is opened when a tensor of it is needed.

    Raises:
        DamagedFile: a file cannot be read, its header does not parse, or two files hold the same tensor. Or a header's
            tensors overlap, leave gaps, reach outside their file or have another size than their shape. Methods raise
            it too, if they open a file, or if a file does not hold the tensors that the index names.
    """

    def __init__(
        self,
        files: Iterable[Path],
        rename: Callable[[str], str] = lambda name: name,
        index: Mapping[str, Path] | None = None,
    ):
        self._tensors: dict[str, Stored] = {}
        self._elements = ElementReader()
        self._rename, self._index = rename, {rename(name): path for name, path in (index or {}).items()}
        for path in files:
            self._add(path)

    @classmethod
    def of_stem(cls, folder: Path, stem: str) -> "Reader":
        """Return a reader of the files `stem*.safetensors`. If they have an index, it opens only those that it needs.

        Raises:
            DamagedFile: as the class.
        """
        index = folder / f"{stem}.safetensors.index.json"
        if not index.exists():
            return cls(sorted(folder.glob(f"{stem}*.safetensors")))
        return cls((), index={name: folder / file for name, file in weight_map(index).items()})

    def _add(self, path: Path) -> None:
        """Add the tensors of a file."""
        for name, stored in tensors_of(path)[0].items():
            name = self._rename(name)
            other = self._tensors[name].path if name in self._tensors else self._index.get(name, path)
            if other != path:
                raise DamagedFile(f"tensor {name} is in {other} and again in {path}")
            self._tensors[name] = stored

    def _stored(self, name: str) -> Stored:
        """Return a tensor's place. Opens its file, if no tensor of it was needed before."""
        if name not in self._tensors and name in self._index:
            self._add(self._index[name])
            if name not in self._tensors:
                raise DamagedFile(f"{self._index[name]} does not contain tensor {name}, although the index names it")
        return self._tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self._tensors or name in self._index

    def name_also(self, names: Mapping[str, str]) -> None:
        """Add further names for tensors: further name -> name. Names of tensors that do not exist are skipped."""
        self._tensors |= {also: self._stored(name) for also, name in names.items() if name in self}

    def names(self) -> list[str]:
        return list(dict.fromkeys([*self._tensors, *self._index]))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored(name).shape

    def file(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self._stored(name).path

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor.

        Raises:
            DamagedFile: it is a dtype that no weight has.
        """
        stored = self._stored(name)
        if stored.dtype not in WEIGHT_DTYPES:
            raise DamagedFile(
                f"{stored.path}: tensor {name} has the dtype {stored.dtype}; known: {', '.join(WEIGHT_DTYPES)}"
            )
        return WEIGHT_DTYPES[stored.dtype]

    def read(self, name: str, rows: Rows, out: Tensor | None = None) -> Tensor:
        """Return elements of a tensor [rows.numel].

        Args:
            out: the result, [rows.numel], contiguous, on the CPU, with the tensor's dtype. None: new memory.

        Raises:
            DamagedFile: the file cannot be read, was truncated after its header was read, or has a dtype that no weight
                has.
        """
        stored, dtype = self._stored(name), self.dtype(name)
        if (rows.start + rows.span) * dtype.itemsize > stored.size:
            raise ValueError(f"{rows} are outside tensor {name} of shape {stored.shape}")
        return self._elements.read(stored, dtype, rows, out)

    def expect(self, name: str, rows: Rows) -> None:
        """Tell the kernel that these elements will be read soon."""
        self._elements.expect(self._stored(name), rows)


class ElementReader:
    """Reads elements of stored tensors with `pread`, or from an object store."""

    def __init__(self) -> None:
        self._ranges = RangeReader()
        self._files = _OpenFiles()
        self._span: np.ndarray | None = None  # uint8 [_SPAN], allocated at the first use

    def read(self, stored: Stored, dtype: torch.dtype, rows: Rows, out: Tensor | None = None) -> Tensor:
        """Return elements [rows.numel], which must be inside the tensor. `dtype` is the one that `stored` names.

        Raises:
            DamagedFile: as `Reader.read`.
        """
        item = dtype.itemsize
        out = torch.empty(rows.numel, dtype=dtype) if out is None else out
        bytes_NL = bytes_of(out).reshape(rows.number, rows.length * item)
        begin, step = stored.offset + rows.start * item, rows.stride * item
        if rows.number == 1 or rows.stride == rows.length:
            self._fill(stored.path, memoryview(bytes_NL.reshape(-1)), begin)
        elif step - rows.length * item > _GAP or step > _SPAN:
            for i, piece in enumerate(bytes_NL):
                self._fill(stored.path, memoryview(piece), begin + i * step)
        else:
            self._read_with_gaps(stored.path, bytes_NL, begin, step)
        return out

    def _fill(self, path: Path, view: memoryview, begin: int) -> None:
        """Fill all of `view` with the bytes of a file, from byte `begin` on."""
        if in_store(path):
            self._ranges.fill(cast(StorePath, path), view, begin)
        else:
            _fill(self._files.open(path), path, view, begin)

    def _read_with_gaps(self, path: Path, bytes_NL: np.ndarray, begin: int, step: int) -> None:
        """Read N pieces of L bytes, which start `step` bytes apart, together with the gaps between them."""
        if self._span is None:
            self._span = np.empty(_SPAN, np.uint8)
        for i in range(0, len(bytes_NL), _SPAN // step):
            pieces = bytes_NL[i : i + _SPAN // step]
            read = self._span[: (len(pieces) - 1) * step + pieces.shape[1]]
            self._fill(path, memoryview(read), begin + i * step)
            np.copyto(pieces, as_strided(read, pieces.shape, (step, 1)))

    def expect(self, stored: Stored, rows: Rows) -> None:
        """Say that these elements will be read soon. They are requested from the kernel or from the object store."""
        item = _ITEM_BYTES[stored.dtype]
        begin = stored.offset + rows.start * item
        if in_store(stored.path):
            self._ranges.request(cast(StorePath, stored.path), begin, begin + rows.span * item)
        elif hasattr(os, "posix_fadvise"):  # macOS has none
            with suppress(OSError):
                os.posix_fadvise(self._files.open(stored.path), begin, rows.span * item, os.POSIX_FADV_WILLNEED)


class RangeReader:
    """Reads ranges of objects. Ranges that were requested before are on their way already, several at a time."""

    def __init__(self) -> None:
        self._requested: dict[tuple[StorePath, int, int], Future[bytes]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def request(self, path: StorePath, begin: int, end: int) -> None:
        """Request a range, unless it is too long or too many are on their way."""
        if end - begin <= _LONGEST_RANGE and len(self._requested) < _MOST_RANGES:
            self._pool = self._pool or ThreadPoolExecutor(_CONNECTIONS, "object reader")
            self._requested[path, begin, end] = self._pool.submit(path.read_range, begin, end)

    def fill(self, path: StorePath, view: memoryview, begin: int) -> None:
        """Fill all of `view` with the bytes of an object, from byte `begin` on.

        Raises:
            DamagedFile: the object cannot be read, or ends too early.
        """
        end = begin + len(view)
        key = next((k for k in self._requested if k[0] == path and k[1] <= begin and end <= k[2]), None)
        with reading(cast(Path, path)):
            if key is None:
                data = path.read_range(begin, end)
            else:
                asked = self._requested[key]
                if end == key[2]:  # the last part of the range
                    del self._requested[key]
                data = asked.result()[begin - key[1] : end - key[1]]
        if len(data) != len(view):
            raise DamagedFile(f"{path} was truncated while it was read: it now ends before byte {end}")
        view[:] = data


class _OpenFiles:
    """The most recently used files. A large model has more files than a process may have open."""

    def __init__(self) -> None:
        self._fds: dict[Path, int] = {}  # the most recently used one is last

    def open(self, path: Path) -> int:
        """Return the descriptor of a file. It is valid until other files are opened.

        Raises:
            DamagedFile: the file cannot be opened.
        """
        fd = self._fds.pop(path, None)
        if fd is None:
            while len(self._fds) >= _OPEN:
                os.close(self._fds.pop(next(iter(self._fds))))
            with reading(path):
                fd = os.open(path, os.O_RDONLY)
        self._fds[path] = fd
        return fd

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        for fd in self._fds.values():
            close(fd)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Treat an error of the operating system within the context as a file that cannot be read.

    Raises:
        DamagedFile: the message names `path`.
    """
    try:
        yield
    except OSError as error:
        raise DamagedFile(f"{path} cannot be read ({error.strerror or error})") from error


def _fill(fd: int, path: Path, view: memoryview, offset: int) -> None:
    """Fill all of `view` with the bytes of a file, starting at `offset`."""
    with reading(path):
        while view:
            done = os.preadv(fd, [view], offset)
            if not done:
                raise DamagedFile(
                    f"{path} was truncated while it was read: it now ends before byte {offset + len(view)}"
                )
            view, offset = view[done:], offset + done


# ----------------------------------------------------------------------------------------------------------- headers


def weight_map(index: Path) -> dict[str, str]:
    """Return the file name of each tensor, from an index.

    Raises:
        DamagedFile: it cannot be read, does not parse, or names a file that is not in its folder.
    """
    try:
        found = read_object(index).get("weight_map")
    except JsonError as error:
        raise DamagedFile(str(error)) from error
    if not isinstance(found, dict) or not found or not all(isinstance(file, str) for file in found.values()):
        raise DamagedFile(f"{index.name} does not parse: its weight_map does not name files")
    if strange := [file for file in found.values() if Path(file).name != file]:
        raise DamagedFile(f"{index.name} names the file {strange[0]}, which is not in the folder")
    return found


def read_header(path: Path) -> bytes:
    """Return the file's header including its length field, as far as the file reaches.

    Raises:
        OSError: the file cannot be read.
    """
    if in_store(path):
        return _header_in_store(path)
    with open(path, "rb") as f:
        length = f.read(8)
        return length + f.read(min(int.from_bytes(length, "little"), os.fstat(f.fileno()).st_size, _LONGEST_HEADER))


def _header_in_store(path: Path) -> bytes:
    object_, size = cast(StorePath, path), path.stat().st_size
    first = object_.read_range(0, min(size, _FIRST))
    end = min(8 + int.from_bytes(first[:8], "little"), size, _LONGEST_HEADER)
    return first[:end] if end <= len(first) else first + object_.read_range(len(first), end)


def tensors_of(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """Return the tensors of a file, in the order of their bytes, and the metadata in its header.

    Raises:
        DamagedFile: they do not fill the file exactly, from the end of the header to the end of the file.
    """
    with reading(path):
        file_size, header = path.stat().st_size, read_header(path)
    if len(header) < 8:
        raise DamagedFile(f"{path} is damaged: it has {len(header)} bytes, less than the 8 of a header's length")
    base = 8 + int.from_bytes(header[:8], "little")
    if base != len(header):
        raise DamagedFile(f"{path} is damaged: its header does not fit into the file")
    tensors, at = {}, base
    parsed, metadata = _parse(path, header[8:])
    entries = [(name, *_entry(path, name, e)) for name, e in parsed.items()]
    for name, dtype, shape, first, last in sorted(entries, key=lambda e: e[3:]):
        if base + last > file_size:
            raise DamagedFile(f"{path} is truncated: tensor {name} ends at byte {base + last} of {file_size}")
        if base + first != at:
            raise DamagedFile(f"{path} is damaged: tensor {name} overlaps the one before it, or leaves a gap")
        tensors[name] = Stored(path, dtype, shape, base + first, last - first)
        at = base + last
    if at != file_size:
        raise DamagedFile(f"{path} is damaged: {file_size - at} bytes follow its last tensor")
    return tensors, metadata


def _parse(path: Path, text: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the entry of each tensor, and the metadata. It must not accept a header that the library refuses."""
    try:
        if text[:1] != b"{":
            raise ValueError("it is not a JSON object")
        hooks = dict.fromkeys(("parse_int", "parse_float", "parse_constant"), _natural)
        entries = json.loads(text.decode(), object_pairs_hook=_once, **hooks)
        notes = entries.pop("__metadata__", None)
        if notes is not None and not (isinstance(notes, dict) and all(isinstance(n, str) for n in notes.values())):
            raise ValueError("its __metadata__ are not strings")
        return entries, notes or {}
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path} is damaged: its header does not parse ({error})") from error


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{text} is not a whole number, 0 or more")
    return int(text)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for name, value in pairs:
        if name in entries:
            raise ValueError(f"{name} occurs twice")
        for text in (name, value):
            if isinstance(text, str):
                text.encode()  # raises for half of a surrogate pair
        entries[name] = value
    return entries


def _entry(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Return (dtype, shape, first byte, last byte + 1) of a header's entry. Bytes count from the end of the header."""
    refuse = lambda why: DamagedFile(f"{path} is damaged: tensor {name} {why}")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise refuse("does not have dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise refuse("has a shape or offsets that are not lists of sizes")
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise refuse(f"has the dtype {dtype}; known: {', '.join(_ITEM_BYTES)}")
    if offsets[1] - offsets[0] != _elements(shape) * _ITEM_BYTES[dtype]:
        raise refuse(f"has offsets that do not fit its shape {tuple(shape)}")
    return dtype, tuple(shape), *offsets


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(x) is int and x <= _MOST for x in value)


def _elements(shape: list[int]) -> int:
    """Return the number of elements. If it overflows in the library, return a number larger than any file's."""
    number = 1
    for size in shape:
        number *= size
        if number > _MOST:
            break
    return number
