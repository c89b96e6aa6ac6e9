"""safetensors files written in place by many ranks and read by runs.

The library writes whole files from whole tensors; here every rank knows the byte layout beforehand (it follows from
names, shapes and dtype alone) and writes only its own elements. Format: 8 bytes little-endian header length, a JSON
header of name -> {dtype, shape, data_offsets}, the tensors' bytes.
"""

import json
import math
import mmap
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_BLOCK = 1 << 20  # words summed at one time


class DamagedFile(ValueError):
    """A file that is not what it should be; the message names it."""


# ------------------------------------------------------------------------------------------------------------ layout


@dataclass(frozen=True)
class PlannedFile:
    """One file of a planned set: its header and where each tensor's bytes begin."""

    name: str
    header: bytes
    offsets: dict[str, int]  # tensor -> first byte in the file
    size: int
    dtype: torch.dtype


def plan_files(
    stem: str, tensors: Mapping[str, tuple[int, ...]], dtype: torch.dtype, max_bytes: int
) -> list[PlannedFile]:
    """Splits tensors, in order, over `stem.safetensors` or `stem-00001-of-0000N.safetensors` of at most `max_bytes`
    each (a larger tensor gets a file of its own)."""
    groups: list[list[str]] = [[]]
    room = max_bytes
    for name, shape in tensors.items():
        need = math.prod(shape) * dtype.itemsize
        if groups[-1] and need > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(name)
        room -= need
    n = len(groups)
    names = [f"{stem}.safetensors"] if n == 1 else [f"{stem}-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]
    return [_plan(file, {t: tensors[t] for t in g}, dtype) for file, g in zip(names, groups, strict=True)]


def _plan(file: str, tensors: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> PlannedFile:
    entries: dict = {"__metadata__": {"format": "pt"}}
    offsets, at = {}, 0
    for name, shape in tensors.items():
        end = at + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        offsets[name], at = at, end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin on 8-byte boundaries
    header = len(text).to_bytes(8, "little") + text
    return PlannedFile(file, header, {n: len(header) + o for n, o in offsets.items()}, len(header) + at, dtype)


def index_json(files: list[PlannedFile]) -> dict:
    """Hugging Face's `*.safetensors.index.json` of a split set."""
    return {
        "metadata": {"total_size": sum(f.size - len(f.header) for f in files)},
        "weight_map": {name: f.name for f in files for name in f.offsets},
    }


def create(path: Path, plan: PlannedFile) -> None:
    """The file with its header and its full size, tensors still unwritten. Raises OSError where the disk is full."""
    with open(path, "wb") as f:
        os.posix_fallocate(f.fileno(), 0, plan.size)
        f.write(plan.header)


def read_header(path: Path) -> bytes:
    """The file's first bytes, as many as its own length field says."""
    with open(path, "rb") as f:
        length = f.read(8)
        return length + f.read(min(int.from_bytes(length, "little"), path.stat().st_size))


def write_all(fd: int, data: Tensor, offset: int) -> None:
    """The bytes of a contiguous CPU tensor at `offset`."""
    view = memoryview(_words(data)).cast("B")
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


# ---------------------------------------------------------------------------------------------------------- checksum


def checksum(data: Tensor, start: int) -> Tensor:
    """Checksum of elements [start, start + n) of a tensor: two sums modulo 2^64, int64 [2].

    With b_i the tensor's 16- or 32-bit words: sum b_i and sum b_i * (i + 1). Sums of parts add up to the sum of the
    whole, so owners add theirs without reading again; a changed word shows in the first, moved words in the second.
    """
    words = _words(data)
    at = start * (data.element_size() // words.itemsize)
    total = np.zeros(2, dtype=np.uint64)
    for begin in range(0, words.size, _BLOCK):
        block = words[begin : begin + _BLOCK].astype(np.uint64)
        total[0] += block.sum()
        total[1] += (block * np.arange(at + begin + 1, at + begin + 1 + block.size, dtype=np.uint64)).sum()
    return torch.from_numpy(total.view(np.int64))


def _words(data: Tensor) -> np.ndarray:
    """A contiguous CPU tensor's memory as unsigned words, without a copy."""
    two = data.element_size() == 2
    return (
        data.detach()
        .contiguous()
        .view(torch.int16 if two else torch.int32)
        .numpy()
        .view(np.uint16 if two else np.uint32)
    )


# ----------------------------------------------------------------------------------------------------------- reading


class Reader:
    """Memory-maps a set of safetensors files and reads elements of their tensors.

    Raises:
        DamagedFile: a header that does not parse, or that points outside its file.
    """

    def __init__(self, files: list[Path]):
        self._tensors: dict[str, tuple[Path, torch.dtype, tuple[int, ...], int]] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        for path in files:
            self._open(path)

    def _open(self, path: Path) -> None:
        try:
            with open(path, "rb") as f:
                self._maps[path] = mapped = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise DamagedFile(f"{path} is empty") from error
        length = int.from_bytes(mapped[:8], "little")
        if len(mapped) < 8 or length > len(mapped) - 8:
            raise DamagedFile(f"{path} is damaged: its header does not fit into the file")
        try:
            entries = json.loads(mapped[8 : 8 + length])
            entries.pop("__metadata__", None)
            for name, entry in entries.items():
                self._add(path, name, entry, 8 + length, len(mapped))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise (
                error
                if isinstance(error, DamagedFile)
                else DamagedFile(f"{path} is damaged: its header does not parse")
            ) from error

    def _add(self, path: Path, name: str, entry: dict, base: int, end: int) -> None:
        first, last = entry["data_offsets"]
        shape = tuple(entry["shape"])
        if entry["dtype"] not in _DTYPES:
            raise DamagedFile(f"{path}: tensor {name} has the dtype {entry['dtype']}; known: {', '.join(_DTYPES)}")
        dtype = _DTYPES[entry["dtype"]]
        if first < 0 or last - first != math.prod(shape) * dtype.itemsize or min(shape, default=0) < 0:
            raise DamagedFile(f"{path} is damaged: tensor {name}'s offsets do not fit its shape {shape}")
        if base + last > end:
            raise DamagedFile(f"{path} is truncated: tensor {name} ends at byte {base + last} of {end}")
        self._tensors[name] = (path, dtype, shape, base + first)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name][2]

    def read(self, name: str, start: int, length: int) -> Tensor:
        """Elements [start, start + length) in row-major order, read-only, not copied."""
        path, dtype, _, offset = self._tensors[name]
        raw = np.frombuffer(self._maps[path], np.uint8, length * dtype.itemsize, offset + start * dtype.itemsize)
        if dtype.itemsize > 1 and (offset % dtype.itemsize):  # another writer's header may leave tensors unaligned
            raw = raw.copy()
        return _tensor_view(raw, dtype)


def _tensor_view(raw: np.ndarray, dtype: torch.dtype) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "not writable": it is only ever copied from
        return torch.from_numpy(raw).view(dtype)
