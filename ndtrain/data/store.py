"""Corpora as flat arrays of token ids, tokenised once into the data cache or read from the user's token file.

The arrays are memory-mapped.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ndtrain.config import ConfigError, DataConfig
from ndtrain.config.json_file import parse_object
from ndtrain.data.cache import atomic_write, digest, load_or_build, sampled_digest
from ndtrain.data.corpora import matching_files
from ndtrain.data.documents import SPLITS, Corpus, TextChunk
from ndtrain.data.progress import progress_on_stderr
from ndtrain.data.token_array import Tokens
from ndtrain.data.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger(__name__)

TOKENIZER_SAMPLE = 32 << 20  # bytes of text that a bpe is trained on
_BATCH_CHARACTERS = 1 << 22  # tokenised at a time
_SCAN_TOKENS = 1 << 24  # scanned at a time

content_hash = partial(blake2b, digest_size=16)  # the hash of `SplitStats.digest`


@dataclass(frozen=True)
class TokenisedCorpus:
    """The two splits as read-only memory-mapped arrays, uint16 or uint32, and a digest of all their ids."""

    train: np.ndarray
    validation: np.ndarray
    fingerprint: str


def tokenise(corpus: Corpus, tokenizer: Tokenizer, cache: Path) -> TokenisedCorpus:
    """Return the corpus as token ids, with the end-of-text token after each document.

    The ids are kept in the folder `cache`. The process that makes them shows its progress on stderr.

    Raises:
        ConfigError: a document cannot be read, or the cache cannot be written.
    """
    entry = cache / f"{digest(corpus.key(), tokenizer.digest())}.json"
    return load_or_build(entry, partial(_load, entry), partial(_build, corpus, tokenizer, entry))


def corpus_tokenizer(data: DataConfig, corpus: Corpus, cache: Path) -> Tokenizer:
    """Return the tokenizer that `data.tokenizer` names. A bpe is trained on a sample of `corpus` and kept in `cache`.

    Raises:
        ConfigError: as `load_tokenizer`.
    """
    trained = cache / f"bpe-{digest(corpus.key(), data.vocab_size, TOKENIZER_SAMPLE)}.json"
    return load_tokenizer(data, lambda: sample_texts(corpus, TOKENIZER_SAMPLE), trained)


def sample_texts(corpus: Corpus, limit: int) -> Iterator[str]:
    """Yield about `limit` bytes of the training split for a tokenizer, and show the progress on stderr."""
    with progress_on_stderr("training the tokenizer", corpus.size()) as advance:
        yield from corpus.sample(limit, lambda chunk: advance(chunk.size, 0))


def _load(entry: Path) -> TokenisedCorpus | None:
    """Return the entry; None if it is absent or damaged."""
    try:
        record = parse_object(entry.read_bytes(), str(entry))
        paths = _split_paths(entry)
        if any(sampled_digest(path) != record["files"][split] for split, path in paths.items()):
            return None
        train, validation = (map_tokens(paths[split], np.dtype(record["dtype"])) for split in SPLITS)
        return TokenisedCorpus(train, validation, record["fingerprint"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _split_paths(entry: Path) -> dict[str, Path]:
    return {split: entry.with_name(f"{entry.stem}.{split}.bin") for split in SPLITS}


def _build(corpus: Corpus, tokenizer: Tokenizer, entry: Path) -> None:
    log.info("tokenising %s", corpus.describe())
    paths = _split_paths(entry)
    with progress_on_stderr("tokenising", corpus.size()) as advance:
        stats = write_splits(corpus, tokenizer, paths, lambda chunk, ids: advance(chunk.size, len(ids)))
    record = {
        "dtype": stored_dtype(tokenizer).str,
        "files": {split: sampled_digest(path) for split, path in paths.items()},
        "fingerprint": corpus_fingerprint(*(stats[split].digest for split in SPLITS)),
    }
    _write_entry(entry, record)  # written last: the entry is complete once this file exists


def _write_entry(entry: Path, record: dict[str, Any]) -> None:
    with atomic_write(entry) as file:
        file.write(json.dumps(record).encode())


def token_dtype(vocab_size: int) -> str:
    """Return the dtype in which token ids are stored: uint16 if they fit, else uint32."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def stored_dtype(tokenizer: Tokenizer) -> np.dtype:
    """Return the dtype of the tokenizer's ids in files, little-endian."""
    return np.dtype(token_dtype(tokenizer.vocab_size)).newbyteorder("<")


def corpus_fingerprint(train: str, validation: str) -> str:
    """Return the fingerprint of a corpus from the digests of its two splits."""
    return digest(train, validation)


# ------------------------------------------------------------------------------------------------------ writing tokens


@dataclass(frozen=True)
class SplitStats:
    """Statistics of a split's token file.

    Attributes:
        tokens, documents: their numbers.
        largest: the largest id; -1 if there is none.
        digest: the blake2b of the file's bytes.
    """

    tokens: int
    documents: int
    largest: int
    digest: str


@dataclass(frozen=True)
class SplitTokens:
    """Consecutive tokens of one split.

    Attributes:
        ids: in their stored form, [n].
        documents: the number of documents that end in them.
    """

    ids: np.ndarray
    documents: int


class SplitWriter:
    """Writes the token file of one split and counts what it writes."""

    def __init__(self, file: BinaryIO):
        self._file, self._hashed = file, content_hash()
        self._tokens, self._documents, self._largest = 0, 0, -1

    def write(self, tokens: SplitTokens) -> None:
        """Append tokens."""
        self._file.write(tokens.ids)
        self._hashed.update(tokens.ids)
        self._tokens += len(tokens.ids)
        self._documents += tokens.documents
        self._largest = max(self._largest, int(tokens.ids.max()) if len(tokens.ids) else -1)

    def stats(self) -> SplitStats:
        return SplitStats(self._tokens, self._documents, self._largest, self._hashed.hexdigest())


def write_splits(
    corpus: Corpus,
    tokenizer: Tokenizer,
    paths: dict[str, Path],
    on_chunk: Callable[[TextChunk, np.ndarray], None] = lambda chunk, ids: None,
) -> dict[str, SplitStats]:
    """Tokenise a corpus into one file for each split, and return the statistics of each file.

    The ids are little-endian `token_dtype`. Every document ends with the end-of-text token. The files appear once all
    of them are complete.

    Args:
        on_chunk: called with each chunk and its ids after they are written.

    Raises:
        ConfigError: a document cannot be read.
    """
    dtype = stored_dtype(tokenizer)
    with ExitStack() as stack:
        writers = {split: SplitWriter(stack.enter_context(atomic_write(path))) for split, path in paths.items()}
        for chunk, token_ids in encode_chunks(corpus.chunks(), tokenizer):
            ids = np.asarray(token_ids, dtype)
            writers[SPLITS[chunk.held_out]].write(SplitTokens(ids, int(chunk.last)))
            on_chunk(chunk, ids)
    return {split: writer.stats() for split, writer in writers.items()}


def encode_chunks(
    chunks: Iterable[TextChunk], tokenizer: Tokenizer, batch_characters: int | None = None
) -> Iterator[tuple[TextChunk, list[int]]]:
    """Yield each chunk with its token ids. The last chunk of a document also has the end-of-text token.

    Args:
        batch_characters: approximate number of characters tokenised at a time; None: 4 Mi.
    """
    for batch in _batched(chunks, batch_characters or _BATCH_CHARACTERS):
        for chunk, ids in zip(batch, tokenizer.encode_batch([chunk.text for chunk in batch]), strict=True):
            yield chunk, [*ids, tokenizer.eos_id] if chunk.last else ids


def _batched(chunks: Iterable[TextChunk], characters: int) -> Iterator[list[TextChunk]]:
    batch: list[TextChunk] = []
    size = 0
    for chunk in chunks:
        batch.append(chunk)
        size += len(chunk.text)
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def map_tokens(path: Path, dtype: np.dtype) -> np.ndarray:
    """Return a flat file of token ids as a read-only array. An empty file, which cannot be mapped, gives an empty
    array.
    """
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)


# ---------------------------------------------------------------------------------------------- the user's token files


@dataclass(frozen=True)
class TokenFileScan:
    """The result of one pass over a token file.

    Attributes:
        largest: the largest id.
        offset: the position of its first occurrence, in tokens.
        fingerprint: a digest of the file.
    """

    largest: int
    offset: int
    fingerprint: str


def open_token_file(setting: str, dtype: str, cache: Path, key: str = "data.path") -> tuple[np.ndarray, TokenFileScan]:
    """Return the token ids of a flat little-endian file, memory-mapped, and their scan, which is kept in `cache`.

    Args:
        setting: the path, as the setting `key` gives it.

    Raises:
        ConfigError: `setting` names several files, the file is missing or empty, or its size is no multiple of
            `dtype`'s.
    """
    root, names = matching_files(setting, "*.bin", key)
    if len(names) > 1:
        raise ConfigError(
            f"{key}={setting}: data=bin reads one file, but there are {len(names)} here: give one of them"
        )
    file, stored = root / names[0], np.dtype(dtype).newbyteorder("<")
    stat = file.stat()
    if stat.st_size == 0:
        raise ConfigError(f"{key}={setting}: the file holds no tokens: give another one")
    if stat.st_size % stored.itemsize:
        raise ConfigError(
            f"{key}={setting}: {stat.st_size} bytes are not a multiple of the {stored.itemsize} of "
            f"data.dtype={dtype}: the file is cut short, or data.dtype is wrong"
        )
    tokens = map_tokens(file, stored)
    return tokens, scan_tokens(file, tokens, cache, dtype)


def scan_tokens(file: Path, tokens: np.ndarray, cache: Path, form: str) -> TokenFileScan:
    """Return the scan of a file's tokens, which is kept in `cache`.

    Args:
        form: names how the bytes of the file become tokens; each form has its own scan.
    """
    stat = file.stat()
    entry = cache / f"scan-{digest(str(file), stat.st_size, stat.st_mtime_ns, form)}.json"
    return load_or_build(entry, partial(_load_scan, entry), partial(_scan, tokens, entry))


def contains_token(tokens: Tokens, token: int) -> bool:
    """Return True if `token` occurs in `tokens`. Read no further than the block of its first occurrence."""
    blocks = range(0, len(tokens), _SCAN_TOKENS)
    return any((tokens[start : start + _SCAN_TOKENS] == token).any() for start in blocks)


def token_positions(tokens: np.ndarray, token: int) -> np.ndarray:
    """Return the positions of `token` in `tokens`, int64 [n]."""
    blocks = range(0, len(tokens), _SCAN_TOKENS)
    places = [start + np.flatnonzero(tokens[start : start + _SCAN_TOKENS] == token) for start in blocks]
    return np.concatenate([np.empty(0, np.int64), *places])


def _load_scan(entry: Path) -> TokenFileScan | None:
    try:
        return TokenFileScan(**parse_object(entry.read_bytes(), str(entry)))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _scan(tokens: np.ndarray, entry: Path) -> None:
    largest, offset = -1, 0
    hashed = content_hash()
    for start in range(0, len(tokens), _SCAN_TOKENS):
        block = tokens[start : start + _SCAN_TOKENS]
        hashed.update(block)
        at = int(block.argmax())
        if block[at] > largest:
            largest, offset = int(block[at]), start + at
    _write_entry(entry, {"largest": largest, "offset": offset, "fingerprint": hashed.hexdigest()})
