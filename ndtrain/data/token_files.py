"""A corpus of token files in the formats of other programs: its documents, and its validation split.

Results that need a pass over all tokens or documents are computed once and kept in the data cache.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path

import numpy as np

from ndtrain.config import ConfigError, DataConfig
from ndtrain.config.json_file import parse_object
from ndtrain.data.cache import atomic_write, digest, load_or_build
from ndtrain.data.corpora import refuse_address
from ndtrain.data.documents import SPLITS
from ndtrain.data.formats import FORMATS, FormatError, TokenFile
from ndtrain.data.order import hash_fractions
from ndtrain.data.store import TokenFileScan, scan_tokens, token_positions
from ndtrain.data.token_array import TokenArray

_TABLES = ("runs", "starts")  # of a split, each in a file next to the entry
_VERSION = 2  # of the table of a corpus in the data cache; a new version invalidates every entry


@dataclass(frozen=True)
class DocumentSummary:
    """Properties that all documents of a corpus share.

    Attributes:
        documents: the number of documents with at least one token; 0: not every file has an index of documents.
        eos_id: the token that ends each document and occurs nowhere else; None: there is none. If `documents` is 0,
            this is the end token by the convention of the format.
    """

    documents: int
    eos_id: int | None


@dataclass(frozen=True)
class TokenFiles:
    """Opened token files of one format.

    Attributes:
        setting: the key and value that begin an error message.
        files, scans: the files in order, and the result of one pass over each.
        summary: of their documents.
        train, validation: the tokens of the two splits. They have the document starts of the indices unless
            `data.eos_id` is set.
        fingerprint: a digest of all ids and of the split.
    """

    setting: str
    files: tuple[TokenFile, ...]
    scans: tuple[TokenFileScan, ...]
    summary: DocumentSummary
    train: TokenArray
    validation: TokenArray
    fingerprint: str


def open_token_files(data: DataConfig, settings: Sequence[str], key: str, validation: float, cache: Path) -> TokenFiles:
    """Open the files of format `data.name` that `settings` name, in this order.

    Args:
        key: the name of the settings, for errors.
        validation: the fraction of the documents in the validation split.

    Raises:
        ConfigError: a file is missing, damaged or of another format. The message names the file.
    """
    setting = f"{key}={settings[0] if len(settings) == 1 else '[' + ','.join(settings) + ']'}"
    format_ = FORMATS[data.name]
    for one in settings:
        refuse_address(one, key)
    paths = [path for one in settings for path in format_.files(one, key)]
    _refuse_twice(setting, paths)
    try:
        files = tuple(format_.open(path, data) for path in paths)
        scans = tuple(scan_tokens(file.path, file.tokens, cache, data.name) for file in files)
        identity = [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for file in files for p in file.parts]
        entry = cache / f"documents-{digest(_VERSION, data.name, identity, data.dtype, data.eos_id, validation)}.json"
        table = load_or_build(entry, partial(_load, entry), partial(_build, files, data.eos_id, validation, entry))
    except FormatError as error:
        raise ConfigError(f"{setting}: {error}") from error
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {error.filename}: {error.strerror}") from error
    summary, splits = table
    tokens = [file.tokens for file in files]
    indexed = summary.documents > 0 and data.eos_id is None
    train, held_out = (TokenArray(tokens, runs, starts if indexed else None) for runs, starts in splits)
    contents = [(scan.fingerprint, file.tokens.dtype.str) for scan, file in zip(scans, files, strict=True)]
    fingerprint = digest(contents, validation, summary.documents, len(train))
    return TokenFiles(setting, files, scans, summary, train, held_out, fingerprint)


def _refuse_twice(setting: str, paths: Sequence[Path]) -> None:
    twice = next((path for n, path in enumerate(paths) if path in paths[:n]), None)
    if twice is not None:
        raise ConfigError(
            f"{setting}: lists {twice} twice: list each file once (data.blend gives a file a larger weight)"
        )


def _load(entry: Path) -> tuple[DocumentSummary, list[list[np.ndarray]]] | None:
    """Return the summary, and for each split its runs and document starts; None if the entry is absent or damaged."""
    try:
        summary = DocumentSummary(**parse_object(entry.read_bytes(), str(entry)))
        tables = [[_table_path(entry, split, what) for what in _TABLES] for split in SPLITS]
        return summary, [[np.load(path, mmap_mode="r") for path in paths] for paths in tables]
    except (FileNotFoundError, ValueError, TypeError, EOFError):
        return None


def _table_path(entry: Path, split: str, what: str) -> Path:
    return entry.with_name(f"{entry.stem}.{split}.{what}.npy")


def _build(files: Sequence[TokenFile], eos_id: int | None, validation: float, entry: Path) -> None:
    ends_of = [_document_ends(file, eos_id) for file in files]
    parts = [_split_runs(n, file, ends, validation) for n, (file, ends) in enumerate(zip(files, ends_of, strict=True))]
    for number, split in enumerate(SPLITS):
        runs = np.concatenate([np.empty((3, 0), np.int64), *(part[number] for part in parts)], axis=1)
        for what, table in zip(_TABLES, (runs, _document_starts(runs, ends_of)), strict=True):
            with atomic_write(_table_path(entry, split, what)) as out:
                np.save(out, table)
    with atomic_write(entry) as out:  # written last: the entry is complete once this file exists
        out.write(json.dumps(asdict(_summary(files, ends_of))).encode())


def _document_ends(file: TokenFile, eos_id: int | None) -> np.ndarray | None:
    """Return the ends of documents, int64 [documents], from the index or else the separating token; None if unknown."""
    if file.document_ends is not None:
        return file.document_ends()
    eos_id = file.eos_id if eos_id is None else eos_id
    if eos_id is None:
        return None
    ends = token_positions(file.tokens, eos_id) + 1
    if not len(ends):
        return None
    return ends if ends[-1] == len(file.tokens) else np.append(ends, len(file.tokens))


def _split_runs(number: int, file: TokenFile, ends: np.ndarray | None, validation: float) -> tuple[np.ndarray, ...]:
    """Return the runs of the training and of the validation split in file `number`, int64 [3, R] each.

    Whether a document is held out depends only on the file's name and on the document's number in the file.
    """
    whole = np.array([[number], [0], [len(file.tokens)]], np.int64)[:, : len(file.tokens)]
    if ends is None or validation == 0 or not len(ends):
        return whole, whole[:, :0]
    held_out = hash_fractions(_name_key(file.path), len(ends)) < validation
    edges = np.flatnonzero(np.diff(held_out)) + 1  # documents that begin a run
    firsts, lasts = np.concatenate([[0], edges]), np.concatenate([edges, [len(ends)]]) - 1
    starts = np.where(firsts > 0, ends[firsts - 1], 0)
    runs = np.stack([np.full(len(firsts), number), starts, ends[lasts] - starts]).astype(np.int64)
    of_split = [runs[:, (held_out[firsts] == held) & (runs[2] > 0)] for held in (False, True)]
    return of_split[0], of_split[1]


def _document_starts(runs: np.ndarray, ends_of: Sequence[np.ndarray | None]) -> np.ndarray:
    """Return where the documents of a split start in the array of its runs, int64 [documents]. Empty documents are left
    out.
    """
    offsets, parts = np.cumsum(runs[2]) - runs[2], [np.empty(0, np.int64)]
    for number, ends in enumerate(ends_of):
        of_file = np.flatnonzero(runs[0] == number)
        if ends is None or not len(of_file):
            continue
        starts = np.concatenate([[0], ends[:-1]])[np.diff(ends, prepend=0) > 0]
        first, length, offset = runs[1, of_file], runs[2, of_file], offsets[of_file]
        run = np.searchsorted(first, starts, side="right") - 1
        inside = (run >= 0) & (starts < (first + length)[run])
        parts.append((starts - first[run] + offset[run])[inside])
    return np.concatenate(parts)


def _name_key(path: Path) -> int:
    """Return a number that depends on the name of a file but not on its folder, which may differ between machines."""
    return int.from_bytes(blake2b(path.name.encode(), digest_size=8).digest(), "little")


def _summary(files: Sequence[TokenFile], ends_of: Sequence[np.ndarray | None]) -> DocumentSummary:
    """Return the summary of all documents, based on their last tokens."""
    if any(file.document_ends is None for file in files):
        known = {file.eos_id for file in files}
        return DocumentSummary(0, known.pop() if len(known) == 1 else None)
    first, count, stands = None, 0, 0
    for file, ends in zip(files, ends_of, strict=True):
        ends = ends[np.diff(ends, prepend=0) > 0]  # an empty document has no last token
        if not len(ends):
            continue
        last = file.tokens[ends - 1]
        first = int(last[0]) if first is None else first
        if (last != first).any():
            return DocumentSummary(count + len(ends), None)
        count, stands = count + len(ends), stands + len(token_positions(file.tokens, first))
    return DocumentSummary(count, first if stands == count else None)
