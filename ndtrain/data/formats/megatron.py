"""Megatron's indexed datasets: PREFIX.bin holds token ids, PREFIX.idx the positions of its sequences and documents.

All numbers are little-endian. The index consists of:

- a header of 34 bytes: magic, u64 version, u8 code of the ids' type, u64 number of sequences, u64 number of entries in
  the document table;
- int32 lengths of the sequences;
- int64 byte offsets of the sequences in the .bin;
- the document table: the int64 number of each document's first sequence, and at the end the number of sequences.

The index of multimodal data ends with an int8 for each sequence, which is not read.
"""

import glob
import struct
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from ndtrain.arguments import near
from ndtrain.config import ConfigError, DataConfig
from ndtrain.data.formats.interface import FormatError, TokenFile, TokenFormat, map_ids

_MAGIC, _VERSION = b"MMIDIDX\x00\x00", 1
_HEADER = struct.Struct("<9sQBQQ")
# code -> the dtype in which the ids are read. No id is negative, so a signed type is read as unsigned.
_TYPES = {1: "uint8", 2: "uint8", 3: "uint16", 4: "uint32", 5: "uint64", 8: "uint16"}
_FLOATS = {6: "float64", 7: "float32"}
_ENTRY_BYTES = 4 + 8  # of a sequence: its length and its offset


@dataclass(frozen=True)
class _Header:
    """The header of an index: the dtype of the ids and the lengths of the tables."""

    dtype: np.dtype
    sequences: int
    table: int


class MegatronFormat(TokenFormat):
    """A prefix, a .bin or .idx file, a folder or a glob of them."""

    name, pattern = "megatron", "*.idx"

    def files(self, setting: str, key: str) -> list[Path]:
        prefix = Path(setting).expanduser()
        prefix = prefix.with_suffix("") if prefix.suffix in (".bin", ".idx") else prefix
        both = [_beside(prefix, suffix) for suffix in (".bin", ".idx")]
        if any(path.is_file() for path in both):
            return [both[0].parent.resolve() / both[0].name]
        if glob.has_magic(setting):
            setting = setting.removesuffix(".bin").removesuffix(".idx") + ".idx"
        try:
            return [path.with_suffix(".bin") for path in super().files(setting, key)]
        except ConfigError as error:
            hint = near(prefix.name, [path.stem for path in prefix.parent.glob("*.idx")])
            raise ConfigError(
                f"{key}={setting}: there is no PREFIX.idx: {hint}give the prefix (without .bin), a folder or a glob"
            ) from error

    def open(self, path: Path, data: DataConfig) -> TokenFile:
        index = path.with_suffix(".idx")
        for part in (path, index):
            if not part.is_file():
                raise FormatError(f"{part} is missing: an indexed dataset has a .bin and an .idx")
        header = _read_header(index)
        tokens = map_ids(path, header.dtype)
        return TokenFile(path, tokens, (path, index), partial(_document_ends, path, index, header, len(tokens)))


def _beside(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)  # a prefix may have dots


def _read_header(index: Path) -> _Header:
    """Read the header of an index and compare it with the size of the file.

    Raises:
        FormatError: the file is no index, has another version or a type that holds no ids, or is cut short.
    """
    with index.open("rb") as file:
        start = file.read(_HEADER.size)
    if start[: len(_MAGIC)] != _MAGIC:
        raise FormatError(f"{index} is not an index of Megatron: it does not begin with MMIDIDX")
    if len(start) < _HEADER.size:
        raise FormatError(f"{index} is cut short: {len(start)} bytes, its header has {_HEADER.size}")
    _, version, code, sequences, table = _HEADER.unpack(start)
    if version != _VERSION:
        raise FormatError(f"{index} has version {version}: only version {_VERSION} can be read")
    if code not in _TYPES:
        what = f"holds {_FLOATS[code]}, not token ids" if code in _FLOATS else f"has an unknown token id type ({code})"
        raise FormatError(f"{index} {what}")
    size, needed = index.stat().st_size, _HEADER.size + sequences * _ENTRY_BYTES + table * 8
    if size not in (needed, needed + sequences):
        short = "is cut short" if size < needed else "is damaged"
        raise FormatError(f"{index} {short}: {size} bytes, but its header counts {needed}")
    return _Header(np.dtype(_TYPES[code]).newbyteorder("<"), sequences, table)


def _document_ends(path: Path, index: Path, header: _Header, tokens: int) -> np.ndarray:
    """Return the offset after the last token of each document, int64 [documents].

    Raises:
        FormatError: the tables contradict each other or the .bin.
    """
    n = header.sequences
    lengths = np.memmap(index, "<i4", "r", _HEADER.size, (n,)) if n else np.empty(0, np.int32)
    offsets = np.memmap(index, "<i8", "r", _HEADER.size + 4 * n, (n,)) if n else np.empty(0, np.int64)
    table = np.memmap(index, "<i8", "r", _HEADER.size + _ENTRY_BYTES * n, (header.table,)) if header.table else []
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if n and lengths.min() < 0:
        raise FormatError(f"{index} is damaged: sequence {int(lengths.argmin())} has length {lengths.min()}")
    if ends[-1] != tokens:
        short = "is cut short" if tokens < ends[-1] else "holds more than its index counts"
        raise FormatError(f"{path} {short}: {tokens} tokens, but {index.name} counts {ends[-1]}")
    wrong = np.flatnonzero(offsets != ends[:-1] * header.dtype.itemsize)
    if wrong.size:
        at = int(wrong[0])
        raise FormatError(
            f"{index}: sequence {at} starts at byte {offsets[at]}, not at the end of the previous one: only files "
            "with their sequences in order can be read"
        )
    if len(table) == 0 or table[0] != 0 or table[-1] != n or (np.diff(table) < 0).any():
        raise FormatError(f"{index} is damaged: its document boundaries do not match its {n} sequences")
    return ends[table[1:]]
