"""Corpora read with the library `datasets`: from the Hugging Face hub, `save_to_disk`, or local data files."""

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
from ndtrain.data.documents import Corpus, Document, text_chunks

_VERSION = 1  # of the documents made from a given dataset; a new version invalidates every cache entry
_ROWS = 1000  # read at a time
_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow", ".csv": "csv"}
_ON_HUB = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_SHARDS = 128  # into which a saved dataset is divided for streaming, so that their order can be shuffled


@dataclass(frozen=True)
class RowRange:
    """Consecutive rows of a split.

    Attributes:
        split: the split's name.
        dataset: a `datasets.Dataset` of these rows, with only the text column.
        first: the number of the first row within the split.
        held_out: as in `Document`.
    """

    split: str
    dataset: Any
    first: int = 0
    held_out: bool | None = None


@dataclass(frozen=True)
class DatasetCorpus(Corpus):
    """Rows of a dataset whose column `text_key` holds the text. A row with a null text is not a document."""

    setting: str
    text_key: str
    ranges: tuple[RowRange, ...]
    validation: float

    def key(self) -> str:
        """Return a digest of the settings and of the fingerprints that `datasets` computes."""
        fingerprints = [(r.dataset._fingerprint, r.held_out) for r in self.ranges]
        return digest(_VERSION, self.text_key, self.validation, fingerprints)

    def documents(self) -> Iterator[Document]:
        for rows in self.ranges:
            number = rows.first
            for batch in iterate_rows(rows.dataset.iter(_ROWS), self.setting):
                for text in batch[self.text_key]:
                    if text is not None:
                        _check_text(text, self.text_key, f"{self.setting}: row {number} of split {rows.split}")
                        yield Document(f"{rows.split}:{number}", text_chunks(io.StringIO(text).read), rows.held_out)
                    number += 1

    def size(self) -> int:
        return sum(r.dataset.data.nbytes for r in self.ranges if not r.held_out)

    def partition(self, size: int) -> Iterator[tuple["DatasetCorpus", int]]:
        for rows in self.ranges:
            count, length = len(rows.dataset), rows.dataset.data.nbytes
            step = max(1, count * size // max(length, 1))
            for start in range(0, count, step):
                end = min(start + step, count)
                part = replace(rows, dataset=rows.dataset.select(range(start, end)), first=rows.first + start)
                yield replace(self, ranges=(part,)), length * end // count - length * start // count

    def describe(self) -> str:
        return f"{self.setting}: {sum(len(r.dataset) for r in self.ranges):,} rows"


@dataclass(frozen=True)
class StreamingSample(Corpus):
    """The first documents of a split of a streaming dataset.

    They are the sample for training a tokenizer or, if `held_out`, the validation split.

    Attributes:
        split: the key of `data` that names the split.
        limit: the approximate total number of characters of the documents.
    """

    data: DataConfig
    split: str
    limit: int
    held_out: bool = False
    validation: float = 0.0

    @property
    def setting(self) -> str:
        return f"data.path={self.data.path}"

    def key(self) -> str:
        """Return a digest of the settings and, for local files, of their names, sizes and modification times."""
        identity = streaming_identity(self.data, self.split)
        return digest(_VERSION, identity, _file_stats(self.data.path), self.limit, self.held_out)

    def documents(self) -> Iterator[Document]:
        left = self.limit
        for number, row in enumerate(iterate_rows(open_streaming_dataset(self.data, self.split), self.setting)):
            text = row_text(row, self.data, number)
            yield Document(f"{self.split}:{number}", text_chunks(io.StringIO(text).read), self.held_out)
            left -= len(text)
            if left <= 0:
                return

    def size(self) -> int:
        return self.limit

    def partition(self, size: int) -> Iterator[tuple["StreamingSample", int]]:
        raise ConfigError("data.streaming=true: a streaming dataset cannot be partitioned: set data.streaming=false")

    def describe(self) -> str:
        return f"{self.setting}: the beginning of split {getattr(self.data, self.split)}"


# ---------------------------------------------------------------------------------------------------- opening a dataset


def open_dataset_corpus(data: DataConfig) -> DatasetCorpus:
    """Open the corpus of `data=hf`. The library downloads and prepares the dataset if needed.

    Training uses the documents of `data.split`. Validation uses `data.eval_split` or, if this is not set, the fraction
    `data.validation` of the documents of `data.split`.

    Raises:
        ConfigError: `datasets` is missing or cannot open the dataset, or there is no such split or column.
    """
    splits = _open_splits(data, streaming=False)
    ranges = [RowRange(data.split, _text_column(data, _named_split(data, "split", splits)))]
    fraction = data.validation
    if data.eval_split is not None:
        held_out = _text_column(data, _named_split(data, "eval_split", splits))
        ranges = [replace(ranges[0], held_out=False), RowRange(data.eval_split, held_out, held_out=True)]
        fraction = 0.0
    return DatasetCorpus(f"data.path={data.path}", data.text_key, tuple(ranges), fraction)


def open_streaming_dataset(data: DataConfig, key: str = "split") -> Any:
    """Open a split as a `datasets.IterableDataset` with only the text column.

    Args:
        key: the key of `data` that names the split.

    Raises:
        ConfigError: `datasets` is missing or cannot open the dataset, or there is no such split or column.
    """
    return _text_column(data, _named_split(data, key, _open_splits(data, streaming=True)))


def iterate_rows(rows: Iterable[Any], setting: str) -> Iterator[Any]:
    """Yield the rows of a dataset.

    Raises:
        ConfigError: the library raised an error. The message begins with `setting`.
    """
    try:
        yield from rows
    except Exception as error:  # errors of the library, the hub and the file system have no common class
        raise ConfigError(f"{setting}: cannot be read ({one_line(error)})") from error


def row_text(row: Mapping[str, Any], data: DataConfig, number: int) -> str:
    """Return the text of a row of a streaming dataset; "" if it is null.

    Raises:
        ConfigError: the row has no such column, or the column is not text.
    """
    if data.text_key not in row:
        raise ConfigError(_no_column(data, list(row)))
    text = row[data.text_key]
    if text is None:
        return ""
    _check_text(text, data.text_key, f"data.path={data.path}: row {number}")
    return text


def streaming_identity(data: DataConfig, key: str = "split") -> list[str | None]:
    """Return the settings that identify a streaming dataset, without its content."""
    return [data.path, data.subset, getattr(data, key), data.text_key]


def _open_splits(data: DataConfig, streaming: bool) -> Mapping[str, Any]:
    """Return split name -> `datasets.Dataset`, or `datasets.IterableDataset` if `streaming`."""
    library = _import_datasets()
    path = Path(data.path).expanduser()
    builder, files = _local_files(data.path, path)
    try:
        if any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
            return _saved_splits(library.load_from_disk(str(path)), streaming)
        if files is not None:
            return library.load_dataset(builder, data_files=files, streaming=streaming)
        return library.load_dataset(str(path) if path.exists() else data.path, data.subset, streaming=streaming)
    except Exception as error:  # errors of the library, the hub and the file system have no common class
        raise ConfigError(
            f"data.path={data.path}: datasets cannot open it ({one_line(error)}): give local files, or a hub name that "
            "this machine can reach (data.subset chooses among its configurations)"
        ) from error


def _import_datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError("data=hf needs the package datasets: pip install 'ndtrain[hf]'") from error
    if world_from_env()[1] > 0 or not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return datasets


def _local_files(setting: str, path: Path) -> tuple[str | None, str | None]:
    """Return (the library's builder, the file or glob) for `data.path`, or (None, None) for a folder or a hub name."""
    magic = glob.has_magic(setting)
    local = path.is_file() or magic or Path(setting).suffix in _BUILDERS or not _ON_HUB.fullmatch(setting)
    if path.is_dir() or not local:
        return None, None
    if not magic and not path.is_file():
        raise ConfigError(
            f"data.path={setting}: no such file or folder: give an existing one, or the name of a dataset on the hub"
        )
    name = path.name.removesuffix(".gz").removesuffix(".zst")
    builder = next((b for suffix, b in _BUILDERS.items() if name.endswith(suffix)), None)
    if builder is None:
        raise ConfigError(
            f"data.path={setting}: data=hf reads files that end in {', '.join(_BUILDERS)}: "
            "choose data=text for plain text"
        )
    return builder, str(path)


def _saved_splits(saved: Any, streaming: bool) -> Mapping[str, Any]:
    """Return the splits of a dataset that `save_to_disk` wrote: a DatasetDict, or one Dataset."""
    splits = dict(saved) if isinstance(saved, dict) else {str(saved.split or "train"): saved}
    if not streaming:
        return splits
    return {name: split.to_iterable_dataset(max(1, min(_SHARDS, len(split)))) for name, split in splits.items()}


def _named_split(data: DataConfig, key: str, splits: Mapping[str, Any]) -> Any:
    name = getattr(data, key)
    if name not in splits:
        raise ConfigError(
            f"data.{key}={name}: data.path={data.path} has no such split: choose one of {', '.join(map(str, splits))}"
        )
    return splits[name]


def _text_column(data: DataConfig, split: Any) -> Any:
    columns = split.column_names
    if columns is None:  # a streaming dataset may not know its columns before a row is read
        return split
    if data.text_key not in columns:
        raise ConfigError(_no_column(data, columns))
    return split.select_columns([data.text_key])


def _no_column(data: DataConfig, columns: list[str]) -> str:
    return (
        f"data.path={data.path}: no column {data.text_key!r}: set data.text_key to one of its columns "
        f"({', '.join(columns) or 'none'})"
    )


def _check_text(text: Any, text_key: str, location: str) -> None:
    if not isinstance(text, str):
        raise ConfigError(
            f"{location}: column {text_key!r} is not a string: set data.text_key to the column with the text"
        )


def one_line(error: BaseException) -> str:
    """Return the type and message of a library's error in one line of bounded length."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}{'...' * (len(text) > 300)}"


def _file_stats(setting: str) -> list[tuple[str, int, int]]:
    """Return (name, bytes, modification time in ns) of every local file that `data.path` names."""
    path = Path(setting).expanduser()
    if glob.has_magic(setting):
        files = [Path(p) for p in glob.glob(str(path), recursive=True)]
    else:
        files = [path] if path.is_file() else list(path.rglob("*"))
    return sorted((str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in files if p.is_file())
