"""The interface of a format of token files: find the files that a setting names, and open one of them."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ndtrain.config import ConfigError, DataConfig
from ndtrain.data.corpora import matching_files


class FormatError(ConfigError):
    """A file that does not follow its format. The message names the file and the fault."""


@dataclass(frozen=True)
class TokenFile:
    """One opened file of token ids.

    Attributes:
        path: the file that holds the ids.
        tokens: the ids, [n], memory-mapped, unsigned integers.
        parts: all files that are read: the ids and, if present, the index and the metadata.
        document_ends: returns the offset after the last token of each document, int64 [documents], ascending. The
            last one is n. It raises FormatError if the index contradicts the ids. None: there is no index.
        eos_id: the token that separates documents by the convention of the format; None: there is no convention.
    """

    path: Path
    tokens: np.ndarray
    parts: tuple[Path, ...]
    document_ends: Callable[[], np.ndarray] | None = None
    eos_id: int | None = None


class TokenFormat(ABC):
    """A format of token files. `data=<name>` selects it.

    Attributes:
        pattern: the glob pattern of its token files.
    """

    name: str
    pattern: str

    def files(self, setting: str, key: str) -> list[Path]:
        """Return the token files that a setting names: a file, a folder or a glob.

        Args:
            key: the name of the setting, for errors.

        Raises:
            ConfigError: there is no such file.
        """
        root, names = matching_files(setting, self.pattern, key)
        paths = [root / name for name in names]
        if len(paths) == 1 and paths[0].name == Path(setting).name:
            return paths  # a file that is named explicitly may have any name
        own = [path for path in paths if path.match(self.pattern)]
        if not own:
            raise ConfigError(f"{key}={setting}: no file matches {self.pattern}, and data={self.name} reads no others")
        return own

    @abstractmethod
    def open(self, path: Path, data: DataConfig) -> TokenFile:
        """Open a token file. Read only headers and sizes.

        Raises:
            FormatError: the file has another format, is damaged or is cut short.
            OSError: the file cannot be read.
        """


def map_ids(path: Path, dtype: np.dtype, offset: int = 0) -> np.ndarray:
    """Return the ids after the first `offset` bytes of a file, memory-mapped.

    Raises:
        FormatError: the file ends within an id.
    """
    size = path.stat().st_size - offset
    if size == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    if size % dtype.itemsize:
        raise FormatError(
            f"{path}: {size} bytes of tokens are not a multiple of {dtype.itemsize}: the file is cut short"
        )
    return np.memmap(path, dtype, mode="r", offset=offset)
