"""Corpora of the library `datasets`: datasets of the Hugging Face hub, saved ones, parquet, JSON and arrow files."""

import glob
import io
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ndtrain.config import ConfigError, DataConfig, world_from_env
from ndtrain.data.cache import digest
from ndtrain.data.documents import Corpus, Document, pieces

_VERSION = 1  # of what the code below makes of the same dataset: a change here outdates every cache entry
_ROWS = 1000  # read at a time
_READERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow", ".csv": "csv"}
_ON_HUB = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_SHARDS = 128  # that a saved dataset is read in, so that its order can be shuffled


@dataclass(frozen=True)
class Rows:
    """Neighbouring rows of a split, from row `first` on. `held_out`: as in `Document`."""

    split: str
    dataset: Any  # datasets.Dataset with the text column alone
    first: int = 0
    held_out: bool | None = None


@dataclass(frozen=True)
class DatasetCorpus(Corpus):
    """Rows of a dataset whose column `text_key` holds the text; a row without one (null) is no document."""

    setting: str
    text_key: str
    rows: tuple[Rows, ...]
    validation: float

    def key(self) -> str:
        """Digest of the settings and of the fingerprints that `datasets` keeps."""
        rows = [(r.dataset._fingerprint, r.held_out) for r in self.rows]
        return digest(_VERSION, self.text_key, self.validation, rows)

    def documents(self) -> Iterator[Document]:
        for rows in self.rows:
            number = rows.first
            for batch in read(rows.dataset.iter(_ROWS), self.setting):
                for text in batch[self.text_key]:
                    if text is not None:
                        _check_text(text, self.text_key, f"{self.setting}: row {number} of split {rows.split}")
                        yield Document(f"{rows.split}:{number}", pieces(io.StringIO(text).read), rows.held_out)
                    number += 1

    def size(self) -> int:
        return sum(r.dataset.data.nbytes for r in self.rows if not r.held_out)

    def cut(self, size: int) -> Iterator[tuple["DatasetCorpus", int]]:
        for rows in self.rows:
            count, length = len(rows.dataset), rows.dataset.data.nbytes
            step = max(1, count * size // max(length, 1))
            for start in range(0, count, step):
                end = min(start + step, count)
                piece = replace(rows, dataset=rows.dataset.select(range(start, end)), first=rows.first + start)
                yield replace(self, rows=(piece,)), length * end // count - length * start // count

    def describe(self) -> str:
        return f"{self.setting}: {sum(len(r.dataset) for r in self.rows):,} rows"


@dataclass(frozen=True)
class StreamedCorpus(Corpus):
    """The first documents of a split that is streamed, of about `limit` bytes together: what a tokenizer is trained on,
    or (`held_out`) the loss is validated on."""

    data: DataConfig
    split: str  # the key of `data` that names the split
    limit: int
    held_out: bool = False
    validation: float = 0.0

    @property
    def setting(self) -> str:
        return f"data.path={self.data.path}"

    def key(self) -> str:
        """Digest of the settings and, of local files, of their names, sizes and times of change."""
        return digest(_VERSION, stream_key(self.data, self.split), _stats(self.data.path), self.limit, self.held_out)

    def documents(self) -> Iterator[Document]:
        left = self.limit
        for number, row in enumerate(read(open_stream(self.data, self.split), self.setting)):
            text = text_of(row, self.data, number)
            yield Document(f"{self.split}:{number}", pieces(io.StringIO(text).read), self.held_out)
            left -= len(text)
            if left <= 0:
                return

    def size(self) -> int:
        return self.limit

    def cut(self, size: int) -> Iterator[tuple["StreamedCorpus", int]]:
        raise ConfigError("data.streaming=true: a stream cannot be cut into pieces: set it to false")

    def describe(self) -> str:
        return f"{self.setting}: the beginning of split {getattr(self.data, self.split)}"


# ------------------------------------------------------------------------------------------------------------ opening


def open_dataset_corpus(data: DataConfig) -> DatasetCorpus:
    """The corpus that `data=hf` names: the documents of `data.split`, and as validation those of `data.eval_split` or
    else the fraction `data.validation` of them. The library downloads and prepares what is not there yet.

    Raises:
        ConfigError: `datasets` is missing or cannot open it, no such split, or no such column.
    """
    found = _splits(data, streaming=False)
    rows = [Rows(data.split, _text_column(data, _split(data, "split", found)))]
    fraction = data.validation
    if data.eval_split is not None:
        held_out = _text_column(data, _split(data, "eval_split", found))
        rows = [replace(rows[0], held_out=False), Rows(data.eval_split, held_out, held_out=True)]
        fraction = 0.0
    return DatasetCorpus(f"data.path={data.path}", data.text_key, tuple(rows), fraction)


def open_stream(data: DataConfig, key: str = "split") -> Any:
    """`datasets.IterableDataset` of the split that the field `key` of `data` names, with the text column alone.

    Raises:
        ConfigError: `datasets` is missing or cannot open it, no such split, or no such column.
    """
    return _text_column(data, _split(data, key, _splits(data, streaming=True)))


def read(rows: Iterable[Any], setting: str) -> Iterator[Any]:
    """The rows of a dataset; what goes wrong on the way is an error of the data's.

    Raises:
        ConfigError: naming `setting`.
    """
    try:
        yield from rows
    except Exception as error:  # the library's own, the hub's, the file system's: no common class
        raise ConfigError(f"{setting}: cannot be read ({one_line(error)})") from error


def text_of(row: Mapping[str, Any], data: DataConfig, number: int) -> str:
    """The text of a streamed row; nothing where it is null.

    Raises:
        ConfigError: no such column, or one that holds no text.
    """
    if data.text_key not in row:
        raise ConfigError(_no_column(data, list(row)))
    text = row[data.text_key]
    if text is None:
        return ""
    _check_text(text, data.text_key, f"data.path={data.path}: row {number}")
    return text


def stream_key(data: DataConfig, key: str = "split") -> list[str | None]:
    """What names a stream, whatever it may hold."""
    return [data.path, data.subset, getattr(data, key), data.text_key]


def _splits(data: DataConfig, streaming: bool) -> Mapping[str, Any]:
    """Split name -> datasets.Dataset or IterableDataset."""
    library = _library()
    place = Path(data.path).expanduser()
    reader, files = _local_files(data.path, place)
    try:
        if any((place / name).is_file() for name in ("dataset_dict.json", "state.json")):
            return _saved(library.load_from_disk(str(place)), streaming)
        if files is not None:
            return library.load_dataset(reader, data_files=files, streaming=streaming)
        return library.load_dataset(str(place) if place.exists() else data.path, data.subset, streaming=streaming)
    except Exception as error:  # the library's own, the hub's, the file system's: no common class
        raise ConfigError(
            f"data.path={data.path}: datasets cannot open it ({one_line(error)}): give local files, or a hub name that "
            "this machine can reach (data.subset chooses among its configurations)"
        ) from error


def _library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError("data=hf needs the library datasets: pip install 'ndtrain[hf]'") from error
    if world_from_env()[1] > 0 or not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return datasets


def _local_files(path: str, place: Path) -> tuple[str | None, str | None]:
    """(the library's reader, the file or glob) that a path names; (None, None) for a folder or a hub name."""
    magic = glob.has_magic(path)
    if place.is_dir() or not (place.is_file() or magic or Path(path).suffix in _READERS or not _ON_HUB.fullmatch(path)):
        return None, None
    if not magic and not place.is_file():
        raise ConfigError(
            f"data.path={path}: no such file or folder: give an existing one, or the name of a dataset on the hub"
        )
    name = place.name.removesuffix(".gz").removesuffix(".zst")
    reader = next((r for suffix, r in _READERS.items() if name.endswith(suffix)), None)
    if reader is None:
        raise ConfigError(
            f"data.path={path}: data=hf reads files that end in {', '.join(_READERS)}: choose data=text for plain text"
        )
    return reader, str(place)


def _saved(found: Any, streaming: bool) -> Mapping[str, Any]:
    """The splits of what `save_to_disk` has written."""
    splits = dict(found) if isinstance(found, dict) else {str(found.split or "train"): found}
    if not streaming:
        return splits
    return {name: split.to_iterable_dataset(max(1, min(_SHARDS, len(split)))) for name, split in splits.items()}


def _split(data: DataConfig, key: str, found: Mapping[str, Any]) -> Any:
    name = getattr(data, key)
    if name not in found:
        raise ConfigError(
            f"data.{key}={name}: data.path={data.path} has no such split: choose one of {', '.join(map(str, found))}"
        )
    return found[name]


def _text_column(data: DataConfig, split: Any) -> Any:
    columns = split.column_names
    if columns is None:  # known once a row is read
        return split
    if data.text_key not in columns:
        raise ConfigError(_no_column(data, columns))
    return split.select_columns([data.text_key])


def _no_column(data: DataConfig, columns: list[str]) -> str:
    return (
        f"data.path={data.path}: no column {data.text_key!r}: set data.text_key to one of its columns "
        f"({', '.join(columns) or 'none'})"
    )


def _check_text(text: Any, text_key: str, place: str) -> None:
    if not isinstance(text, str):
        raise ConfigError(f"{place}: column {text_key!r} is not a string: set data.text_key to the one with the text")


def one_line(error: BaseException) -> str:
    """An error of a library's in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}{'...' * (len(text) > 300)}"


def _stats(path: str) -> list[tuple[str, int, int]]:
    place = Path(path).expanduser()
    if glob.has_magic(path):
        files = [Path(p) for p in glob.glob(str(place), recursive=True)]
    else:
        files = [place] if place.is_file() else list(place.rglob("*"))
    return sorted((str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in files if p.is_file())
