"""Reads the cells of a row of a table of measurements. An unreadable cell raises ConfigError: the row is refused."""

import math
from collections.abc import Mapping

from ndtrain.config import ConfigError

Row = Mapping[str, str]  # column -> text; a column may be missing

_EMPTY = {"", "-", "?", "n/a", "na", "nan", "none", "null", "unknown"}


def text(row: Row, column: str) -> str:
    """Return the cell without surrounding blanks, or "" if it has no value."""
    cell = (row.get(column) or "").strip()
    return "" if cell.lower() in _EMPTY else cell


def number(row: Row, column: str) -> float | None:
    """Read a positive number, such as 8, 1,024 or 3.5e3. Return None if the cell has no value.

    Raises:
        ConfigError: the cell holds something else.
    """
    cell = text(row, column)
    if not cell:
        return None
    try:
        value = float(cell.replace(",", "").replace("_", ""))
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(f"{column}={cell}: must be a positive number")
    return value


def count(row: Row, column: str, default: int | None = None) -> int:
    """Read a whole number from 1. Return `default` if the cell has no value.

    Raises:
        ConfigError: the cell holds something else, or it has no value and there is no default.
    """
    value = number(row, column)
    if value is None:
        if default is None:
            raise ConfigError(f"{column} is missing: the row cannot be predicted without it")
        return default
    if value != int(value):
        raise ConfigError(f"{column}={text(row, column)}: must be a whole number")
    return int(value)


def size_of(row: Row, column: str, default: int) -> int:
    """Read the size of a mesh axis or a similar count. 0 means the same as 1: it is not used.

    Raises:
        ConfigError: the cell is not a whole number.
    """
    return 1 if text(row, column) in ("0", "0.0") else count(row, column, default)
