"""Tables as CSV files: one row a rank, cells `<stage><F|B|I|W><microbatch>`, the format in which PyTorch's pipeline
schedules keep theirs."""

import csv
import re
from os import PathLike

from ndtrain.schedule.check import check
from ndtrain.schedule.table import Action, IllegalSchedule, ScheduleError, Table

Path = str | PathLike[str]


def write(table: Table, path: Path) -> None:
    """Writes a table that `read` returns as it was."""
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([f"{a.stage}{a.kind}{a.microbatch}" for a in row] for row in table)


def read(path: Path, pp: int, microbatches: int, chunks: int | None = None) -> Table:
    """The table in a file, proved to run. Empty cells and rows are passed over.

    Raises:
        ScheduleError: naming file, row and column: no such file, a malformed cell, other numbers of ranks,
            microbatches or chunks than given.
        IllegalSchedule: likewise: an action twice, missing or out of order, a stage on two ranks.
    """
    rows = _cells(path)
    if len(rows) != pp:
        raise ScheduleError(f"{path}: {len(rows)} rows of actions, but pp={pp} needs one a rank")
    table = [[action for *_, action in row] for row in rows]
    held = 1 + max(a.microbatch for row in table for a in row)
    if held != microbatches:
        raise ScheduleError(f"{path}: holds {held} microbatches, but the configuration makes {microbatches}")
    stages = 1 + max(a.stage for row in table for a in row)
    if chunks is not None and stages != pp * chunks:
        raise ScheduleError(f"{path}: holds {stages} stages, but pp={pp} and {chunks} chunks a rank make {pp * chunks}")
    try:
        check(table, microbatches, stages)
    except IllegalSchedule as error:
        where = ""
        if error.rank is not None:
            row, column, _ = rows[error.rank][error.index]
            where = f", row {row}, column {column}"
        raise IllegalSchedule(f"{path}{where}: {error}", error.rank, error.index) from None
    return table


def _cells(path: Path) -> list[list[tuple[int, int, Action]]]:
    """(row, column, action) of the cells that are not empty, by rank; rows and columns count from 1."""
    try:
        with open(path, newline="") as file:
            lines = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ScheduleError(f"{path}: cannot be read as a schedule: {error}") from None
    rows = [
        [(row, column, _action(cell.strip(), path, row, column)) for column, cell in enumerate(line, 1) if cell.strip()]
        for row, line in enumerate(lines, 1)
    ]
    return [row for row in rows if row]


def _action(cell: str, path: Path, row: int, column: int) -> Action:
    match = re.fullmatch(r"(\d{1,9})([FBIW])(\d{1,9})", cell, re.ASCII)
    if not match:
        raise ScheduleError(
            f"{path}, row {row}, column {column}: {cell!r} is no action; cells are <stage><F|B|I|W><microbatch>: 0F3"
        )
    return Action(match[2], int(match[3]), int(match[1]))
