"""Corpora as flat arrays of token ids: tokenised once into the data cache, or a memory-mapped file of the user's."""

import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ndtrain.config import ConfigError, DataConfig
from ndtrain.data.cache import digest, load_or_build, publish, spot_digest
from ndtrain.data.corpora import Corpus, Part, matching_files
from ndtrain.data.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_BATCH = 1 << 22  # characters tokenised at a time
_CHUNK = 1 << 24  # token ids scanned at a time
_SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Tokens:
    """The two splits as read-only memory-mapped uint16 or uint32 arrays, and a digest of all their ids."""

    train: np.ndarray
    validation: np.ndarray
    fingerprint: str


def tokenise(corpus: Corpus, tokenizer: Tokenizer, cache: Path) -> Tokens:
    """The corpus as token ids, each document followed by the end-of-text token. Kept in the folder `cache`.

    Raises:
        ConfigError: a document cannot be read, or the cache cannot be written.
    """
    entry = cache / f"{digest(corpus.key(), tokenizer.digest())}.json"
    return load_or_build(entry, partial(_load, entry), partial(_build, corpus, tokenizer, entry))


def _split_path(entry: Path, split: str) -> Path:
    return entry.with_name(f"{entry.stem}.{split}.bin")


def _load(entry: Path) -> Tokens | None:
    """The entry, or None where it is absent or damaged."""
    try:
        record = json.loads(entry.read_bytes())
        if any(spot_digest(_split_path(entry, split)) != record["files"][split] for split in _SPLITS):
            return None
        train, validation = (map_tokens(_split_path(entry, split), np.dtype(record["dtype"])) for split in _SPLITS)
        return Tokens(train, validation, record["fingerprint"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _build(corpus: Corpus, tokenizer: Tokenizer, entry: Path) -> None:
    log.info("tokenising %s: %d files in %s", corpus.setting, len(corpus.files), corpus.root)
    dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    hashed = {split: blake2b(digest_size=16) for split in _SPLITS}
    with ExitStack() as stack:
        files: dict[str, BinaryIO] = {s: stack.enter_context(publish(_split_path(entry, s))) for s in _SPLITS}
        for part, ids in _encoded(corpus.parts(), tokenizer):
            split = _SPLITS[part.held_out]
            data = np.asarray(ids, dtype).tobytes()
            files[split].write(data)
            hashed[split].update(data)
    record = {
        "dtype": dtype,
        "files": {split: spot_digest(_split_path(entry, split)) for split in _SPLITS},
        "fingerprint": digest(*(hashed[split].hexdigest() for split in _SPLITS)),
    }
    with publish(entry) as file:  # last: it vouches for the others
        file.write(json.dumps(record).encode())


def _encoded(parts: Iterator[Part], tokenizer: Tokenizer) -> Iterator[tuple[Part, list[int]]]:
    for batch in _batched(parts):
        for part, ids in zip(batch, tokenizer.encode_batch([part.text for part in batch]), strict=True):
            yield part, [*ids, tokenizer.eos_id] if part.last else ids


def _batched(parts: Iterator[Part]) -> Iterator[list[Part]]:
    batch: list[Part] = []
    size = 0
    for part in parts:
        batch.append(part)
        size += len(part.text)
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def map_tokens(path: Path, dtype: np.dtype) -> np.ndarray:
    """A flat file of token ids as a read-only array; an empty file, which cannot be mapped, as an empty one."""
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)


# ------------------------------------------------------------------------------------------ token files of the user's


@dataclass(frozen=True)
class Scan:
    """What one pass over a token file finds: the largest id, where it first stands, and a digest of the file."""

    largest: int
    offset: int  # in tokens
    fingerprint: str


def open_bin(data: DataConfig, cache: Path) -> tuple[np.ndarray, Scan]:
    """The token ids of the flat little-endian file `data.path`, memory-mapped, and their scan (kept in `cache`).

    Raises:
        ConfigError: not exactly one file, an empty one, or a size that is no multiple of `data.dtype`'s.
    """
    root, names = matching_files(data.path, "*.bin")
    if len(names) > 1:
        raise ConfigError(f"data.path={data.path}: data=bin reads one file but {len(names)} are here: name one of them")
    path, dtype = root / names[0], np.dtype(data.dtype).newbyteorder("<")
    stat = path.stat()
    if stat.st_size == 0:
        raise ConfigError(f"data.path={data.path}: the file holds no tokens: give another one")
    if stat.st_size % dtype.itemsize:
        raise ConfigError(
            f"data.path={data.path}: {stat.st_size} bytes are no multiple of the {dtype.itemsize} of "
            f"data.dtype={data.dtype}: the file is cut short, or data.dtype is another"
        )
    tokens = map_tokens(path, dtype)
    entry = cache / f"scan-{digest(str(path), stat.st_size, stat.st_mtime_ns, data.dtype)}.json"
    return tokens, load_or_build(entry, partial(_load_scan, entry), partial(_scan, tokens, entry))


def holds(tokens: np.ndarray, token: int) -> bool:
    """Whether `token` stands somewhere in `tokens`; reads up to the first place alone."""
    return any((tokens[start : start + _CHUNK] == token).any() for start in range(0, len(tokens), _CHUNK))


def _load_scan(entry: Path) -> Scan | None:
    try:
        return Scan(**json.loads(entry.read_bytes()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _scan(tokens: np.ndarray, entry: Path) -> None:
    largest, offset = -1, 0
    hashed = blake2b(digest_size=16)
    for start in range(0, len(tokens), _CHUNK):
        chunk = tokens[start : start + _CHUNK]
        hashed.update(chunk)
        at = int(chunk.argmax())
        if chunk[at] > largest:
            largest, offset = int(chunk[at]), start + at
    record = {"largest": largest, "offset": offset, "fingerprint": hashed.hexdigest()}
    with publish(entry) as file:
        file.write(json.dumps(record).encode())
