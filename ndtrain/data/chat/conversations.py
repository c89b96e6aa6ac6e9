"""Conversations as flat arrays: the token ids, and the weight of each token in the loss.

The arrays are made once from JSONL files, kept in the data cache and memory-mapped.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ndtrain.config import ConfigError
from ndtrain.data.cache import atomic_write, digest, load_or_build, sampled_digest
from ndtrain.data.chat.rows import RowError, Sample, samples_of, token_weights
from ndtrain.data.chat.template import ChatTemplate
from ndtrain.data.corpora import parse_record
from ndtrain.data.documents import SPLITS, is_held_out
from ndtrain.data.progress import progress_on_stderr
from ndtrain.data.store import map_tokens, token_dtype
from ndtrain.data.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_VERSION = 2  # of the arrays made from given files; a new version invalidates every cache entry
_ROW_BYTES = 64 << 20  # of the longest row that is accepted
_BATCH_CHARACTERS = 1 << 22  # tokenised at a time
_PLAIN = (0.0, 1.0)  # the weights of tokens if no row sets another one
_MOST_WEIGHTS = 256
_ARRAYS = ("ids", "learned", "ends", "firsts")  # of a split, each in its own file


@dataclass(frozen=True)
class ChatFiles:
    """JSONL files of conversations.

    Attributes:
        setting: the key and value that begin an error message.
        root, files: the files are '/'-separated paths below `root`, sorted.
        validation: the fraction of rows in the validation split.
    """

    setting: str
    root: Path
    files: tuple[str, ...]
    validation: float

    def key(self) -> str:
        """Return a digest of the settings and of every file's name, size and modification time."""
        stats = [os.stat(self.root / name) for name in self.files]
        entries = [(name, s.st_size, s.st_mtime_ns) for name, s in zip(self.files, stats, strict=True)]
        return digest(_VERSION, str(self.root), self.validation, entries)

    def size(self) -> int:
        return sum(os.path.getsize(self.root / name) for name in self.files)

    def rows(self) -> Iterator[tuple[str, bytes]]:
        """Yield (`file:line`, the line) for every row.

        Raises:
            ConfigError: a file cannot be read, or a row is too long.
        """
        for name in self.files:
            try:
                with (self.root / name).open("rb") as file:
                    yield from _lines(file, name, self.location)
            except OSError as error:
                raise ConfigError(f"{self.setting}: cannot read {self.root / name}: {error.strerror}") from error

    def location(self, row: str) -> str:
        """Return the name of the row `file:line` in messages."""
        return f"data.path: {self.root / row}"


def _lines(file: BinaryIO, name: str, location: Callable[[str], str]) -> Iterator[tuple[str, bytes]]:
    number = 0
    while line := file.readline(_ROW_BYTES + 1):
        number += 1
        if len(line) > _ROW_BYTES:
            raise ConfigError(f"{location(f'{name}:{number}')}: longer than {_ROW_BYTES >> 20} MiB: split the row")
        if line.strip():
            yield f"{name}:{number}", line


@dataclass(frozen=True)
class Conversations:
    """Tokenised conversations of one split, one after the other.

    Attributes:
        ids: unsigned [n].
        learned: uint8 [n]: the index of each token's weight in `weights`; 0 for a token that is not learned.
        weights: float32 [at most 256]: 0, 1, and other weights.
        ends: int64 [conversations]: the offset after the last token of each conversation.
        firsts: int64 [conversations]: the index within each conversation of its first learned token, other than 0.
        rows: the number of rows that the conversations were made from.
    """

    ids: np.ndarray
    learned: np.ndarray
    weights: np.ndarray
    ends: np.ndarray
    firsts: np.ndarray
    rows: int

    @property
    def has_weights(self) -> bool:
        """True if tokens have weights other than 0 and 1."""
        return len(self.weights) > len(_PLAIN)

    @property
    def starts(self) -> np.ndarray:
        """int64 [conversations]: the offset of the first token of each conversation."""
        return np.concatenate([np.zeros(1, np.int64), self.ends[:-1]])[: len(self.ends)]

    @property
    def lengths(self) -> np.ndarray:
        """int64 [conversations]: the number of tokens of each conversation."""
        return self.ends - self.starts


@dataclass(frozen=True)
class ChatCorpus:
    """The two splits and a digest of their content. `last` holds each conversation's last learned special token."""

    train: Conversations
    validation: Conversations
    fingerprint: str
    last: frozenset[int]


def tokenise_chat(files: ChatFiles, template: ChatTemplate | None, tokenizer: Tokenizer, cache: Path) -> ChatCorpus:
    """Return the tokenised conversations, which are kept in the folder `cache`.

    The process that tokenises them shows its progress on stderr.

    Raises:
        ConfigError: a row cannot be trained on, or the cache cannot be written.
    """
    key = digest(files.key(), tokenizer.digest(), template and template.identity)
    entry = cache / f"chat-{key}.json"
    return load_or_build(entry, partial(_load, entry), partial(_build, files, template, tokenizer, entry))


def _load(entry: Path) -> ChatCorpus | None:
    """Return the entry; None if it is absent or damaged."""
    try:
        record = json.loads(entry.read_bytes())
        if any(sampled_digest(entry.with_name(name)) != found for name, found in record["files"].items()):
            return None
        splits = [_open_split(entry, split, record) for split in SPLITS]
        return ChatCorpus(*splits, record["fingerprint"], frozenset(record["last"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError, EOFError):
        return None


def _open_split(entry: Path, split: str, record: dict[str, Any]) -> Conversations:
    ids, learned, ends, firsts = (_path(entry, split, what) for what in _ARRAYS)
    return Conversations(
        map_tokens(ids, np.dtype(record["dtype"])),
        map_tokens(learned, np.dtype(np.uint8)),
        np.asarray(record["weights"], np.float32),
        np.load(ends),
        np.load(firsts),
        record["rows"][split],
    )


def _path(entry: Path, split: str, what: str) -> Path:
    return entry.with_name(f"{entry.stem}.{split}.{what}")


# ------------------------------------------------------------------------------------------------------------ making


class _SplitWriter:
    """Writes the arrays of one split."""

    def __init__(self, ids: BinaryIO, learned: BinaryIO):
        self._ids, self._learned, self._hashed = ids, learned, blake2b(digest_size=16)
        self.lengths: list[int] = []
        self.firsts: list[int] = []
        self.rows = 0

    def write(self, ids: np.ndarray, learned: np.ndarray, first: int) -> None:
        for file, array in ((self._ids, ids), (self._learned, learned)):
            file.write(array)
            self._hashed.update(array)
        self.lengths.append(len(ids))
        self.firsts.append(first)

    @property
    def ends(self) -> np.ndarray:
        return np.cumsum(np.asarray(self.lengths, np.int64))

    def digest(self) -> str:
        return digest(self._hashed.hexdigest(), self.lengths)


def _build(files: ChatFiles, template: ChatTemplate | None, tokenizer: Tokenizer, entry: Path) -> None:
    log.info("tokenising %s: %d files in %s", files.setting, len(files.files), files.root)
    dtype = np.dtype(token_dtype(tokenizer.vocab_size)).newbyteorder("<")
    special, last = tokenizer.special_ids(), set[int]()
    weights = list(_PLAIN)
    with ExitStack() as stack, progress_on_stderr("tokenising", files.size()) as advance:
        opened = lambda split, what: stack.enter_context(atomic_write(_path(entry, split, what)))
        writers = {split: _SplitWriter(opened(split, "ids"), opened(split, "learned")) for split in SPLITS}
        for batch in _batches(_read(files, template, tokenizer)):
            for row, (ids, weight) in zip(batch, _encode(batch, tokenizer), strict=True):
                writer, learned = writers[SPLITS[row.held_out]], _indices(weight, weights)
                if len(weights) > _MOST_WEIGHTS:
                    location = files.location(row.name)
                    raise ConfigError(f"{location}: more than {_MOST_WEIGHTS - 2} different weights: round them")
                places = np.flatnonzero(learned[1:]) + 1
                if not len(places):
                    raise ConfigError(f"{files.location(row.name)}: has nothing to train on: remove the row")
                writer.rows += row.begins
                writer.write(ids.astype(dtype), learned, int(places[0]))
                learned_special = places[np.isin(ids[places], special)]
                last |= {int(ids[learned_special[-1]])} if len(learned_special) else set()
                advance(row.size, len(ids))
    for split, writer in writers.items():
        for what, array in (("ends", writer.ends), ("firsts", np.asarray(writer.firsts, np.int64))):
            with atomic_write(_path(entry, split, what)) as file:
                np.save(file, array)
    record = {
        "dtype": dtype.str,
        "files": {p.name: sampled_digest(p) for p in (_path(entry, s, what) for s in SPLITS for what in _ARRAYS)},
        "rows": {split: writer.rows for split, writer in writers.items()},
        "weights": weights,
        "fingerprint": digest("chat", *(writers[split].digest() for split in SPLITS), *weights[len(_PLAIN) :]),
        "last": sorted(last)[:1000],
    }
    with atomic_write(entry) as file:  # written last: the entry is complete once this file exists
        file.write(json.dumps(record).encode())


@dataclass(frozen=True)
class _RowSample:
    """A sample made from a row.

    Attributes:
        name: the row.
        begins: True if this is the first sample of its row.
        size: the bytes of the row if this is its first sample, else 0.
    """

    name: str
    held_out: bool
    begins: bool
    sample: Sample
    size: int


def _read(files: ChatFiles, template: ChatTemplate | None, tokenizer: Tokenizer) -> Iterator[_RowSample]:
    eos = tokenizer.token(tokenizer.eos_id)
    for name, line in files.rows():
        location = files.location(name)
        try:
            samples = samples_of(parse_record(line, location), template, eos)
        except RowError as error:
            raise ConfigError(f"{location}: {error}") from error
        for number, sample in enumerate(samples):
            if not _is_encodable(sample.text):
                raise ConfigError(f"{location}: contains an unpaired surrogate: correct or remove the row")
            held_out = is_held_out(name, files.validation)
            yield _RowSample(name, held_out, number == 0, sample, len(line) if number == 0 else 0)


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _batches(samples: Iterator[_RowSample]) -> Iterator[list[_RowSample]]:
    batch: list[_RowSample] = []
    size = 0
    for sample in samples:
        batch.append(sample)
        size += len(sample.sample.text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode(batch: Sequence[_RowSample], tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the ids of each sample, int64 [n], and their weights [n]. A token that is not learned has weight 0."""
    encoded = tokenizer.encode_markup([(row.sample.text, row.sample.special) for row in batch])
    for row, (ids, offsets) in zip(batch, encoded, strict=True):
        yield np.asarray(ids, np.int64), np.asarray(token_weights(offsets, row.sample.spans))


def _indices(weight: np.ndarray, known: list[float]) -> np.ndarray:
    """Return the index in `known` of each weight, uint8 [n]. Append new weights to `known`."""
    values, inverse = np.unique(weight, return_inverse=True)
    known += [value for value in values.tolist() if value not in known]
    return np.array([known.index(value) for value in values.tolist()])[inverse].astype(np.uint8)
