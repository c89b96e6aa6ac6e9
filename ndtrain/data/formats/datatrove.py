"""The .ds files of datatrove: little-endian uint16 or uint32 ids and nothing else.

Two optional files may be next to FILE.ds. FILE.ds.index holds the ends of the documents, in tokens, as little-endian
uint64. The first line of FILE.ds.metadata is `<tokenizer>|<bytes of a token>`, the second is the number of tokens.
"""

from functools import partial
from pathlib import Path

import numpy as np

from ndtrain.config import DataConfig
from ndtrain.data.formats.interface import FormatError, TokenFile, TokenFormat, map_ids

_TYPES = {2: "uint16", 4: "uint32"}


class DatatroveFormat(TokenFormat):
    """A .ds file, a folder or a glob of them."""

    name, pattern = "datatrove", "*.ds"

    def open(self, path: Path, data: DataConfig) -> TokenFile:
        index, metadata = (path.with_name(path.name + suffix) for suffix in (".index", ".metadata"))
        parts = (path, *(part for part in (index, metadata) if part.is_file()))
        name, source = _dtype(path, index, metadata, data)
        if data.dtype not in (DataConfig.dtype, name):
            raise FormatError(f"{path}: its tokens are {name} according to {source}: set data.dtype={name}")
        tokens = map_ids(path, np.dtype(name).newbyteorder("<"))
        if metadata in parts and (count := _read_metadata(metadata)[1]) != len(tokens):
            short = "is cut short" if len(tokens) < count else "is damaged"
            raise FormatError(f"{path} {short}: {len(tokens)} tokens, but {metadata.name} counts {count}")
        ends = partial(_document_ends, path, index, len(tokens)) if index in parts else None
        return TokenFile(path, tokens, parts, ends)


def _dtype(path: Path, index: Path, metadata: Path, data: DataConfig) -> tuple[str, str]:
    """Return the dtype of the ids and its origin: the metadata, else the index, else `data.dtype`."""
    if metadata.is_file():
        return _TYPES[_read_metadata(metadata)[0]], metadata.name
    if index.is_file() and (last := _last_end(index)):
        for size, name in _TYPES.items():
            if path.stat().st_size == last * size:
                return name, index.name
        raise FormatError(
            f"{path}: {path.stat().st_size} bytes are neither 2 nor 4 for each of the {last} tokens that {index.name} "
            "counts: one of the two files is cut short"
        )
    return data.dtype, "data.dtype"


def _last_end(index: Path) -> int:
    """Return the last entry of an index; 0 if the index is empty."""
    with index.open("rb") as file:
        file.seek(max(0, index.stat().st_size // 8 * 8 - 8))
        return int.from_bytes(file.read(8), "little")


def _read_metadata(path: Path) -> tuple[int, int]:
    """Return (bytes of a token, number of tokens).

    Raises:
        FormatError: the file does not contain both.
    """
    try:
        lines = path.read_text().splitlines()
        size, count = int(lines[0].rpartition("|")[2]), int(lines[1])
    except (ValueError, IndexError) as error:
        raise FormatError(f"{path} is damaged: it has neither a token size nor a token count") from error
    if size not in _TYPES:
        raise FormatError(f"{path}: tokens of {size} bytes: only 2 and 4 can be read")
    return size, count


def _document_ends(path: Path, index: Path, tokens: int) -> np.ndarray:
    """Return the offset after the last token of each document, int64 [documents].

    Raises:
        FormatError: the index contradicts the ids.
    """
    if index.stat().st_size % 8:
        raise FormatError(f"{index} is cut short: {index.stat().st_size} bytes, but 8 bytes per document are needed")
    ends = np.fromfile(index, "<u8").astype(np.int64)
    wrong = np.flatnonzero(np.diff(ends, prepend=0) < 0)
    if wrong.size:
        raise FormatError(f"{index} is damaged: document {int(wrong[0])} ends before it begins")
    if (counted := int(ends[-1]) if len(ends) else 0) != tokens:
        raise FormatError(f"{path}: {tokens} tokens, but {index.name} counts {counted}: one of them is cut short")
    return ends
