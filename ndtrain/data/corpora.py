"""Corpora of files: find the files of a corpus, and read the documents in each file."""

import fnmatch
import glob
import io
import json
import os
import sysconfig
from collections.abc import Callable, Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import numpy as np

from ndtrain.config import ConfigError, DataConfig, registry
from ndtrain.config.store import is_address
from ndtrain.data.cache import digest
from ndtrain.data.documents import Corpus, Document, text_chunks
from ndtrain.data.hf import open_dataset_corpus

_VERSION = 1  # of the documents made from given files; a new version invalidates every cache entry
_INSTALLED = {"site-packages", "dist-packages"}
_COUNT_BYTES = 1 << 20  # read at a time to count lines


@dataclass(frozen=True)
class FileCorpus(Corpus):
    """Files that hold documents.

    Attributes:
        root, files: the files are '/'-separated paths below `root`, sorted.
        read: `read(path, name)` yields the documents of one file. If `by_line`, it also takes `start`, `end` (bytes)
            and `number`. It then yields the lines that start in [start, end); the first one is line `number`.
        by_line: True if every line is a document.
    """

    setting: str
    root: Path
    files: tuple[str, ...]
    read: Callable[..., Iterator[Document]]
    validation: float
    by_line: bool = False

    def key(self) -> str:
        """Return a digest of the settings and of every file's name, size and modification time.

        It includes the name of the `read` function, so renaming this function invalidates the cache entries of its
        corpora.
        """
        stats = [os.stat(self.root / name) for name in self.files]
        entries = [(name, s.st_size, s.st_mtime_ns) for name, s in zip(self.files, stats, strict=True)]
        reader = (self.read.func.__name__, self.read.args) if isinstance(self.read, partial) else self.read.__name__
        return digest(_VERSION, str(self.root), reader, self.validation, entries)

    def documents(self) -> Iterator[Document]:
        for name in self.files:
            try:
                yield from self.read(self.root / name, name)
            except OSError as error:
                raise ConfigError(f"{self.setting}: cannot read {self.root / name}: {error.strerror}") from error

    def size(self) -> int:
        return sum(os.path.getsize(self.root / name) for name in self.files)

    def partition(self, size: int) -> Iterator[tuple["FileCorpus", int]]:
        """Group small files. Split larger files between lines if every line is a document."""
        group: list[str] = []
        group_bytes = 0
        for name in self.files:
            length = os.path.getsize(self.root / name)
            if group and group_bytes + length > size:
                yield replace(self, files=tuple(group)), group_bytes
                group, group_bytes = [], 0
            if self.by_line and length > size:
                yield from self._partition_lines(name, length, size)
            else:
                group.append(name)
                group_bytes += length
        if group:
            yield replace(self, files=tuple(group)), group_bytes

    def _partition_lines(self, name: str, length: int, size: int) -> Iterator[tuple["FileCorpus", int]]:
        """Partition one file at line starts. Count its lines first, because line numbers name the documents."""
        starts = range(0, length, size)
        before = [max(0, start - 1) for start in starts]  # the line with this byte belongs to the previous part
        with ThreadPoolExecutor() as pool:
            lines = pool.map(partial(_count_lines, self.root / name), before, [*before[1:], length])
        number = 1
        for start, count in zip(starts, lines, strict=True):
            end = min(start + size, length)
            read = partial(self.read, start=start, end=end, number=number + (start > 0))
            yield replace(self, files=(name,), read=read), end - start
            number += count

    def describe(self) -> str:
        return f"{self.setting}: {len(self.files)} files in {self.root}"


def _count_lines(path: Path, start: int, end: int) -> int:
    """Count the lines that end in bytes [start, end) of the file."""
    count = 0
    with path.open("rb") as file:
        file.seek(start)
        while block := file.read(min(_COUNT_BYTES, end - file.tell())):
            count += int(np.count_nonzero(np.frombuffer(block, np.uint8) == ord("\n")))  # numpy releases the GIL
    return count


def open_corpus(data: DataConfig) -> Corpus:
    """Open the corpus given by `data.name` (python, text, jsonl, hf without streaming, or a plugin's source) and
    `data.path`.

    This reads no text yet. For hf, the library may download and prepare the dataset.

    Raises:
        ConfigError: the path does not exist, no file matches, or `datasets` cannot open it.
    """
    if data.name in registry.names("source"):
        return registry.get("source", data.name)(data)
    if data.name == "hf":
        return open_dataset_corpus(data)
    if data.name == "python":
        root = Path(sysconfig.get_paths()["stdlib"])
        files = tuple(_files_below(root, "*.py", without=_INSTALLED))
        if not files:
            raise ConfigError(f"data=python: no .py file in {root}: use data=text data.path=<folder>")
        return FileCorpus("data=python", root, files, _read_python, data.validation)
    setting = f"data.path={data.path}"
    if data.name == "text":
        root, files = matching_files(data.path, "*")
        return FileCorpus(setting, root, files, _read_text, data.validation)
    if data.name == "jsonl":
        root, files = matching_files(data.path, "*.jsonl")
        return FileCorpus(setting, root, files, partial(_read_jsonl, data.text_key), data.validation, by_line=True)
    raise ConfigError(f"data={data.name}: not a text corpus: choose python, text, jsonl or hf")


def refuse_address(setting: str, key: str) -> None:
    """Refuse a setting that names files in an object store.

    Raises:
        ConfigError: it does.
    """
    if is_address(setting):
        raise ConfigError(
            f"{key}={setting}: only prepared tokens are read from an object store: run `ndtrain data prepare`, upload "
            "its folder, and give that with data=bin"
        )


def matching_files(setting: str, pattern: str, key: str = "data.path") -> tuple[Path, tuple[str, ...]]:
    """Return (root, sorted '/'-separated names below root) of the files that a setting names.

    Hidden files and folders are left out of folders and globs.

    Args:
        setting: a file, a glob, or a folder, in which files have to match `pattern`.
        key: the name of the setting, for errors.

    Raises:
        ConfigError: there is no such file.
    """
    refuse_address(setting, key)
    path = Path(setting).expanduser()
    if path.is_file():
        return path.parent.resolve(), (path.name,)
    if path.is_dir():
        root = path.resolve()
        files = _files_below(root, pattern)
        if not files:
            raise ConfigError(f"{key}={setting}: no file {pattern} in this folder: give another folder, or a glob")
        return root, tuple(files)
    if not glob.has_magic(setting):
        raise ConfigError(f"{key}={setting}: no such file or folder: give an existing one, or a glob")
    depth = next(i for i, part in enumerate(path.parts) if glob.has_magic(part))
    root = Path(*path.parts[:depth]).resolve()
    matches = glob.glob(str(Path(*path.parts[depth:])), root_dir=root, recursive=True)
    files = sorted(Path(name).as_posix() for name in matches if (root / name).is_file())
    if not files:
        raise ConfigError(f"{key}={setting}: no file matches this glob: correct it")
    return root, tuple(files)


def _files_below(root: Path, pattern: str, without: Container[str] = ()) -> list[str]:
    """Return the sorted '/'-separated names of the files below a folder that match a pattern.

    Args:
        without: names of folders to leave out, in addition to hidden files and folders.
    """
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in without]
        found = [name for name in fnmatch.filter(files, pattern) if not name.startswith(".")]
        below = Path(folder).relative_to(root)
        names += [(below / name).as_posix() for name in found if os.path.isfile(os.path.join(folder, name))]
    return sorted(names)


# ------------------------------------------------------------------------------------------- the documents of one file


def _read_python(path: Path, name: str) -> Iterator[Document]:
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError:  # test data in other encodings
        return
    yield Document(name, text_chunks(io.StringIO(text).read))


def _read_text(path: Path, name: str) -> Iterator[Document]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        yield Document(name, _decoded_chunks(file, path))


def _decoded_chunks(file: TextIO, path: Path) -> Iterator[str]:
    try:
        yield from text_chunks(file.read)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"data.path: {path} is not UTF-8 text: convert it, or exclude it with a glob such as "
            "data.path='corpus/**/*.txt'"
        ) from error


def _read_jsonl(
    text_key: str, path: Path, name: str, start: int = 0, end: int | None = None, number: int = 1
) -> Iterator[Document]:
    """Yield a document for each line that starts in bytes [start, end) of the file. The first one is line `number`."""
    with path.open("rb") as file:
        for line_number, line in enumerate(_lines(file, start, end), start=number):
            if line.strip():
                text = _jsonl_text(line, text_key, f"data.path: {path}:{line_number}")
                extra_bytes = len(line) - len(text.encode())
                yield Document(f"{name}:{line_number}", text_chunks(io.StringIO(text).read), extra_bytes=extra_bytes)


def _lines(file: BinaryIO, start: int, end: int | None) -> Iterator[bytes]:
    """Yield the lines that start in bytes [start, end)."""
    offset = start
    if start:
        file.seek(start - 1)
        offset += len(file.readline()) - 1
    for line in file:
        if end is not None and offset >= end:
            return
        yield line
        offset += len(line)


def parse_record(line: bytes, location: str) -> dict[str, Any]:
    """Return the JSON object in a line of JSONL.

    Raises:
        ConfigError: the line is not a JSON object. The message begins with `location`.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # broken JSON or UTF-8, or thousands of brackets
        why = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ConfigError(f"{location}: not a JSON object ({why}): correct or remove the line") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{location}: not a JSON object but a {type(record).__name__}: correct or remove the line")
    return record


def _jsonl_text(line: bytes, text_key: str, location: str) -> str:
    """Return the text of a line of JSONL.

    Raises:
        ConfigError: the line has no valid text in its field `text_key`. The message begins with `location`.
    """
    record = parse_record(line, location)
    if text_key not in record:
        fields = ", ".join(record) or "none"
        raise ConfigError(f"{location}: no field {text_key!r}: set data.text_key to one of its fields ({fields})")
    text = record[text_key]
    if not isinstance(text, str):
        raise ConfigError(
            f"{location}: field {text_key!r} is not a string: set data.text_key to the field with the text"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{location}: field {text_key!r} contains an unpaired surrogate: correct or remove the line"
        ) from error
    return text
