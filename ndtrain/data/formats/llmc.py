"""The shards of llm.c: a header of 256 little-endian int32 (magic, version, number of tokens), then the ids.

The tools of llm.c write the end-of-text token before each document, so this token separates documents here, too.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ndtrain.config import DataConfig
from ndtrain.data.formats.interface import FormatError, TokenFile, TokenFormat, map_ids

_HEADER_BYTES = 256 * 4


@dataclass(frozen=True)
class _Kind:
    """A kind of shard, identified by (magic, version): the dtype of the ids and the token between documents."""

    dtype: str
    eos_id: int


_KINDS = {(20240520, 1): _Kind("<u2", 50256), (20240801, 7): _Kind("<u4", 128000)}  # GPT-2's ids, Llama 3's


class LlmcFormat(TokenFormat):
    """A shard, a folder or a glob of them."""

    name, pattern = "llmc", "*.bin"

    def open(self, path: Path, data: DataConfig) -> TokenFile:
        with path.open("rb") as file:
            start = file.read(_HEADER_BYTES)
        if len(start) < 12:
            raise FormatError(f"{path} is cut short: {len(start)} bytes, its header has {_HEADER_BYTES}")
        magic, version, count = np.frombuffer(start[:12], "<i4").tolist()
        kind = _KINDS.get((magic, version))
        if kind is None:
            known = " or ".join(f"{m} with version {v}" for m, v in _KINDS)
            raise FormatError(
                f"{path} is not an llm.c shard: it begins with {magic} and version {version}, not {known}"
            )
        dtype = np.dtype(kind.dtype)
        needed, size = _HEADER_BYTES + count * dtype.itemsize, path.stat().st_size
        if size != needed:
            short = "is cut short" if size < needed else "is damaged"
            raise FormatError(f"{path} {short}: {size} bytes, but its header counts {count} tokens ({needed} bytes)")
        return TokenFile(path, map_ids(path, dtype, _HEADER_BYTES), (path,), eos_id=kind.eos_id)
