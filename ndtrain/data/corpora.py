"""Corpora as named documents: which files they are, how each is read, and which documents are held out."""

import glob
import io
import json
import os
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import chain, pairwise
from pathlib import Path
from typing import TextIO

from ndtrain.config import ConfigError, DataConfig
from ndtrain.data.cache import digest

PIECE = 1 << 20  # characters of a document that are held and tokenised at a time
_VERSION = 1  # of what the code below makes of the same files: a change here outdates every cache entry
_INSTALLED = {"site-packages", "dist-packages"}


@dataclass(frozen=True)
class Document:
    """One text. `name` is unique in the corpus; `pieces` are its text in order, each at most PIECE characters."""

    name: str
    pieces: Iterator[str]


@dataclass(frozen=True)
class Part:
    """One piece of a document, as tokenising sees it."""

    text: str
    held_out: bool  # belongs to the validation split
    last: bool  # ends its document


@dataclass(frozen=True)
class Corpus:
    """Files that hold documents.

    `files` are '/'-separated paths below `root`, sorted. `read(path, name)` yields the documents of one file. `setting`
    is the key and value an error message opens with. `validation` is the fraction of documents held out.
    """

    setting: str
    root: Path
    files: tuple[str, ...]
    read: Callable[[Path, str], Iterator[Document]]
    validation: float

    def key(self) -> str:
        """Digest of the settings and of every file's name, size and time of change: cheap to compute at each start."""
        stats = [os.stat(self.root / name) for name in self.files]
        entries = [(name, s.st_size, s.st_mtime_ns) for name, s in zip(self.files, stats, strict=True)]
        reader = (self.read.func.__name__, self.read.args) if isinstance(self.read, partial) else self.read.__name__
        return digest(_VERSION, str(self.root), reader, self.validation, entries)

    def parts(self) -> Iterator[Part]:
        """Every document's pieces, in the order of `files`. Empty documents have none."""
        for document in self._documents():
            held_out = _fraction("split", document.name) < self.validation
            for text, following in pairwise(chain(document.pieces, (None,))):
                yield Part(text, held_out, last=following is None)

    def sample(self, limit: int) -> Iterator[str]:
        """About `limit` bytes of the training split (all of it, if smaller), drawn evenly and always the same."""
        size = sum(os.path.getsize(self.root / name) for name in self.files) * (1 - self.validation)
        share = limit / max(size, 1)
        for number, part in enumerate(self.parts()):
            if not part.held_out and _fraction("sample", number) < share:
                yield part.text

    def _documents(self) -> Iterator[Document]:
        for name in self.files:
            try:
                yield from self.read(self.root / name, name)
            except OSError as error:
                raise ConfigError(f"{self.setting}: cannot read {self.root / name}: {error.strerror}") from error


def _fraction(purpose: str, name: str | int) -> float:
    """A number in [0, 1) that depends on the arguments alone, so that a new document moves no other."""
    hashed = blake2b(os.fsencode(f"{purpose}:{name}"), digest_size=8).digest()
    return int.from_bytes(hashed, "little") / 2**64


def open_corpus(data: DataConfig) -> Corpus:
    """The corpus that `data.name` (python, text or jsonl) and `data.path` name. Reads no text yet.

    Raises:
        ConfigError: the path does not exist, or no file matches.
    """
    if data.name == "python":
        root = Path(sysconfig.get_paths()["stdlib"])
        files = tuple(name for name in _files_below(root, "*.py") if not _INSTALLED & set(name.split("/")))
        if not files:
            raise ConfigError(f"data=python: no .py file in {root}: use data=text data.path=<folder>")
        return Corpus("data=python", root, files, _read_python, data.validation)
    setting = f"data.path={data.path}"
    if data.name == "text":
        root, files = matching_files(data.path, "*")
        return Corpus(setting, root, files, _read_text, data.validation)
    root, files = matching_files(data.path, "*.jsonl")
    return Corpus(setting, root, files, partial(_read_jsonl, data.text_key), data.validation)


def matching_files(path: str, pattern: str) -> tuple[Path, tuple[str, ...]]:
    """(root, sorted '/'-separated names below it) of a file, of the files in a folder that match `pattern`, or of a
    glob. Hidden files and folders are left out of folders and globs.

    Raises:
        ConfigError: nothing there.
    """
    place = Path(path).expanduser()
    if place.is_file():
        return place.parent.resolve(), (place.name,)
    if place.is_dir():
        root = place.resolve()
        files = _files_below(root, pattern)
        if not files:
            raise ConfigError(f"data.path={path}: no file {pattern} in this folder: name another, or a glob")
        return root, tuple(files)
    if not glob.has_magic(path):
        raise ConfigError(f"data.path={path}: no such file or folder: give an existing one, or a glob")
    depth = next(i for i, part in enumerate(place.parts) if glob.has_magic(part))
    root = Path(*place.parts[:depth]).resolve()
    found = glob.glob(str(Path(*place.parts[depth:])), root_dir=root, recursive=True)
    files = sorted(Path(name).as_posix() for name in found if (root / name).is_file())
    if not files:
        raise ConfigError(f"data.path={path}: no file matches this glob: correct it")
    return root, tuple(files)


def _files_below(root: Path, pattern: str) -> list[str]:
    found = (p.relative_to(root) for p in root.rglob(pattern) if p.is_file())
    return sorted(p.as_posix() for p in found if not any(part.startswith(".") for part in p.parts))


# ---------------------------------------------------------------------------------------------- readers of one file


def _read_python(path: Path, name: str) -> Iterator[Document]:
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError:  # test data in other encodings
        return
    yield Document(name, _pieces(io.StringIO(text).read))


def _read_text(path: Path, name: str) -> Iterator[Document]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        yield Document(name, _decoded_pieces(file, path))


def _decoded_pieces(file: TextIO, path: Path) -> Iterator[str]:
    try:
        yield from _pieces(file.read)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"data.path: {path} is not UTF-8 text: convert it, or leave it out with a glob such as "
            "data.path='corpus/**/*.txt'"
        ) from error


def _read_jsonl(text_key: str, path: Path, name: str) -> Iterator[Document]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                text = _jsonl_text(line, text_key, f"data.path: {path}:{number}")
                yield Document(f"{name}:{number}", _pieces(io.StringIO(text).read))


def _jsonl_text(line: bytes, text_key: str, place: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:  # broken JSON or UTF-8
        raise ConfigError(f"{place}: not a JSON object ({error}): correct or remove the line") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{place}: not a JSON object but a {type(record).__name__}: correct or remove the line")
    if text_key not in record:
        fields = ", ".join(record) or "none"
        raise ConfigError(f"{place}: no field {text_key!r}: set data.text_key to one of its fields ({fields})")
    text = record[text_key]
    if not isinstance(text, str):
        raise ConfigError(f"{place}: field {text_key!r} is not a string: set data.text_key to the field with the text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{place}: field {text_key!r} holds a lone surrogate: correct or remove the line") from error
    return text


_CUT = re.compile(r"[^\W_](?=\r?\n)")


def _pieces(read: Callable[[int], str]) -> Iterator[str]:
    """The text behind `read(characters)`, in pieces of at most PIECE characters.

    A long text is cut between a word and a line end, where byte-level tokenizers cut anyway: its tokens stay the same.
    """
    held = ""
    while chunk := read(PIECE - len(held)):
        held += chunk
        if len(held) == PIECE:
            *_, cut = chain((PIECE,), (match.end() for match in _CUT.finditer(held, PIECE // 2)))
            yield held[:cut]
            held = held[cut:]
    if held:
        yield held
