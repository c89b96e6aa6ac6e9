"""safetensors files that many ranks write in place.

The safetensors library writes whole files from whole tensors. Here every rank computes the byte layout in advance from
names, shapes and dtypes, and writes only its own elements. Format: 8 bytes with the little-endian header length, a JSON
header of name -> {dtype, shape, data_offsets}, then the tensors' bytes.
"""

import ctypes
import errno
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ndtrain.mesh.row_map import Rows

# dtypes of weights, and of indices. A file may have tensors of other dtypes, but they are not read
DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
DTYPE_NAMES |= {torch.int64: "I64"}
WEIGHT_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items() if dtype.is_floating_point}


class DamagedFile(ValueError):
    """A file that is damaged or invalid. The message names it."""


# ------------------------------------------------------------------------------------------------------------ layout


@dataclass(frozen=True)
class PlannedFile:
    """One file of a planned set: its header and where each tensor's bytes begin."""

    name: str
    header: bytes
    offsets: dict[str, int]  # tensor -> first byte in the file
    size: int


Described = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # name -> shape, dtype


def plan_files(stem: str, tensors: Described, max_bytes: int) -> list[PlannedFile]:
    """Distribute tensors over `stem.safetensors`, or over files `stem-00001-of-0000N.safetensors`.

    A file has at most `max_bytes`, but a larger tensor gets a file of its own. The widest dtype comes first, so that
    all tensors are aligned. Otherwise the order is kept."""
    groups: list[list[str]] = [[]]
    room = max_bytes
    for name, (shape, dtype) in sorted(tensors.items(), key=lambda t: -t[1][1].itemsize):
        need = math.prod(shape) * dtype.itemsize
        if groups[-1] and need > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(name)
        room -= need
    n = len(groups)
    names = [f"{stem}.safetensors"] if n == 1 else [f"{stem}-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]
    return [plan_file(file, {t: tensors[t] for t in g}) for file, g in zip(names, groups, strict=True)]


def plan_file(name: str, tensors: Described, notes: Mapping[str, str] | None = None) -> PlannedFile:
    """Plan a file with these tensors, in this order.

    Args:
        notes: further entries of the header's metadata.
    """
    entries: dict = {"__metadata__": {"format": "pt", **(notes or {})}}
    offsets, at = {}, 0
    for tensor, (shape, dtype) in tensors.items():
        end = at + math.prod(shape) * dtype.itemsize
        entries[tensor] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        offsets[tensor], at = at, end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin on 8-byte boundaries
    header = len(text).to_bytes(8, "little") + text
    return PlannedFile(name, header, {n: len(header) + o for n, o in offsets.items()}, len(header) + at)


def index_json(files: list[PlannedFile]) -> dict:
    """Return Hugging Face's `*.safetensors.index.json` for a set of files."""
    return {
        "metadata": {"total_size": sum(f.size - len(f.header) for f in files)},
        "weight_map": {name: f.name for f in files for name in f.offsets},
    }


# ----------------------------------------------------------------------------------------------------------- writing


def create(path: Path, plan: PlannedFile) -> None:
    """Create a file with its header and its full size, still without tensors. Raises OSError if the disk is full."""
    with open(path, "wb") as f:
        if not _allocate(f.fileno(), plan.size):
            f.truncate(plan.size)
        f.write(plan.header)


def _allocate(fd: int, size: int) -> bool:
    """Reserve the space of a file. Return False if its file system cannot do that, as some network file systems.

    `os.posix_fallocate` would then write to each block of the file.

    Raises:
        OSError: the disk is full.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if call is None:  # macOS
        return False
    while call(ctypes.c_int(fd), ctypes.c_int(0), ctypes.c_int64(0), ctypes.c_int64(size)) != 0:
        if (number := ctypes.get_errno()) in (errno.EOPNOTSUPP, errno.ENOSYS):
            return False
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
    return True


def write(fd: int, data: Tensor, offset: int, rows: Rows) -> None:
    """Write elements of the tensor that starts at byte `offset`. `data`: [rows.numel], contiguous, on the CPU."""
    view, item = memoryview(bytes_of(data)), data.element_size()
    size, step, at = rows.length * item, rows.stride * item, offset + rows.start * item
    for i in range(rows.number):
        write_all(fd, [view[i * size : (i + 1) * size]], at + i * step)


def write_all(fd: int, views: Sequence[memoryview], offset: int) -> None:
    """Write the views, at most `MOST_VIEWS`, one after the other from byte `offset` on."""
    left = list(views)
    while left:
        done = os.pwritev(fd, left, offset)
        offset += done
        while left and done >= len(left[0]):
            done -= len(left.pop(0))
        if left:
            left[0] = left[0][done:]


MOST_VIEWS = 1024  # that one system call accepts: IOV_MAX of Linux and macOS


def bytes_of(data: Tensor) -> np.ndarray:
    """Return the memory of a contiguous CPU tensor as uint8, without a copy."""
    return data.detach().view(torch.uint8).numpy()
