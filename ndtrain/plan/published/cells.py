"""Reads the cells of a row of a table of measurements. What cannot be read is a ConfigError, which refuses the row."""

import math
from collections.abc import Mapping

from ndtrain.config import ConfigError

Row = Mapping[str, str]  # column -> text; a column may be missing

_EMPTY = {"", "-", "?", "n/a", "na", "nan", "none", "null", "unknown"}


def text(row: Row, column: str) -> str:
    """The cell without surrounding blanks; "" where it says nothing."""
    cell = (row.get(column) or "").strip()
    return "" if cell.lower() in _EMPTY else cell


def number(row: Row, column: str) -> float | None:
    """A positive number, as 8, 1,024 or 3.5e3; None where the cell says nothing.

    Raises:
        ConfigError: it says something else.
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
    """A whole number from 1; `default` where the cell says nothing.

    Raises:
        ConfigError: it is none, or it is missing and there is no default.
    """
    value = number(row, column)
    if value is None:
        if default is None:
            raise ConfigError(f"{column} is missing: the row cannot be priced without it")
        return default
    if value != int(value):
        raise ConfigError(f"{column}={text(row, column)}: must be a whole number")
    return int(value)


def size_of(row: Row, column: str, default: int) -> int:
    """A count of which 0 says that there is none of it, as 1 does.

    Raises:
        ConfigError: it is no whole number.
    """
    return 1 if text(row, column) in ("0", "0.0") else count(row, column, default)
