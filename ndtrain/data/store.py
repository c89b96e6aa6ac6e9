"""Corpora as flat arrays of token ids: tokenised once into the data cache, or a memory-mapped file of the user's."""

import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ndtrain.config import ConfigError, DataConfig
from ndtrain.data.cache import digest, load_or_build, publish, spot_digest
from ndtrain.data.corpora import matching_files
from ndtrain.data.documents import SPLITS, Corpus, Part
from ndtrain.data.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger(__name__)

SAMPLE = 32 << 20  # bytes of text that a bpe is trained on
_BATCH = 1 << 22  # characters tokenised at a time
_CHUNK = 1 << 24  # token ids scanned at a time


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


def corpus_tokenizer(data: DataConfig, corpus: Corpus, cache: Path) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names for one corpus; a bpe is trained on a sample of it and kept in `cache`.

    Raises:
        ConfigError: as `load_tokenizer`.
    """
    trained = cache / f"bpe-{digest(corpus.key(), data.vocab_size, SAMPLE)}.json"
    return load_tokenizer(data, lambda: corpus.sample(SAMPLE), trained)


def _load(entry: Path) -> Tokens | None:
    """The entry, or None where it is absent or damaged."""
    try:
        record = json.loads(entry.read_bytes())
        paths = _split_paths(entry)
        if any(spot_digest(path) != record["files"][split] for split, path in paths.items()):
            return None
        train, validation = (map_tokens(paths[split], np.dtype(record["dtype"])) for split in SPLITS)
        return Tokens(train, validation, record["fingerprint"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _split_paths(entry: Path) -> dict[str, Path]:
    return {split: entry.with_name(f"{entry.stem}.{split}.bin") for split in SPLITS}


def _build(corpus: Corpus, tokenizer: Tokenizer, entry: Path) -> None:
    log.info("tokenising %s", corpus.describe())
    paths = _split_paths(entry)
    written = write_splits(corpus, tokenizer, paths)
    record = {
        "dtype": np.dtype(token_dtype(tokenizer.vocab_size)).newbyteorder("<").str,
        "files": {split: spot_digest(path) for split, path in paths.items()},
        "fingerprint": fingerprint(*(written[split].digest for split in SPLITS)),
    }
    with publish(entry) as file:  # last: it vouches for the others
        file.write(json.dumps(record).encode())


def token_dtype(vocab_size: int) -> str:
    """The type that token ids are stored in: uint16 where they fit, else uint32."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def fingerprint(train: str, validation: str) -> str:
    """Of a corpus, from the digests of its two splits."""
    return digest(train, validation)


@dataclass(frozen=True)
class Written:
    """What a file holds of one split: tokens, documents, the largest id (-1: none), and the blake2b of its bytes."""

    tokens: int
    documents: int
    largest: int
    digest: str


class _Split:
    """One split while it is written."""

    def __init__(self, file: BinaryIO, dtype: np.dtype):
        self._file, self._dtype, self._hashed = file, dtype, blake2b(digest_size=16)
        self._tokens, self._documents, self._largest = 0, 0, -1

    def add(self, part: Part, ids: list[int]) -> None:
        data = np.asarray(ids, self._dtype)
        self._file.write(data.tobytes())
        self._hashed.update(data)
        self._tokens += len(data)
        self._documents += part.last
        self._largest = max(self._largest, int(data.max(initial=0)) if len(data) else -1)

    def written(self) -> Written:
        return Written(self._tokens, self._documents, self._largest, self._hashed.hexdigest())


def write_splits(corpus: Corpus, tokenizer: Tokenizer, paths: dict[str, Path]) -> dict[str, Written]:
    """Tokenises a corpus into one file for each split, each published when all are whole; what each holds.
    Little-endian `token_dtype`; every document ends with the end-of-text token.

    Raises:
        ConfigError: a document cannot be read.
    """
    dtype = np.dtype(token_dtype(tokenizer.vocab_size)).newbyteorder("<")
    with ExitStack() as stack:
        splits = {split: _Split(stack.enter_context(publish(path)), dtype) for split, path in paths.items()}
        for part, ids in encoded(corpus.parts(), tokenizer):
            splits[SPLITS[part.held_out]].add(part, ids)
    return {name: split.written() for name, split in splits.items()}


def encoded(
    parts: Iterable[Part], tokenizer: Tokenizer, characters: int | None = None
) -> Iterator[tuple[Part, list[int]]]:
    """Each part with its token ids, those of the last part of a document with the end-of-text token. Parts of about
    `characters` together are tokenised at a time."""
    for batch in _batched(parts, characters or _BATCH):
        for part, ids in zip(batch, tokenizer.encode_batch([part.text for part in batch]), strict=True):
            yield part, [*ids, tokenizer.eos_id] if part.last else ids


def _batched(parts: Iterable[Part], characters: int) -> Iterator[list[Part]]:
    batch: list[Part] = []
    size = 0
    for part in parts:
        batch.append(part)
        size += len(part.text)
        if size >= characters:
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


def open_bin(path: str, dtype: str, cache: Path, key: str = "data.path") -> tuple[np.ndarray, Scan]:
    """The token ids of the flat little-endian file `path`, memory-mapped, and their scan (kept in `cache`). `key` is
    the setting that gave `path`.

    Raises:
        ConfigError: not exactly one file, an empty one, or a size that is no multiple of `dtype`'s.
    """
    root, names = matching_files(path, "*.bin", key)
    if len(names) > 1:
        raise ConfigError(f"{key}={path}: data=bin reads one file but {len(names)} are here: name one of them")
    file, kind = root / names[0], np.dtype(dtype).newbyteorder("<")
    stat = file.stat()
    if stat.st_size == 0:
        raise ConfigError(f"{key}={path}: the file holds no tokens: give another one")
    if stat.st_size % kind.itemsize:
        raise ConfigError(
            f"{key}={path}: {stat.st_size} bytes are no multiple of the {kind.itemsize} of "
            f"data.dtype={dtype}: the file is cut short, or data.dtype is another"
        )
    tokens = map_tokens(file, kind)
    entry = cache / f"scan-{digest(str(file), stat.st_size, stat.st_mtime_ns, dtype)}.json"
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
