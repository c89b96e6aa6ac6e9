"""Tables as CSV files: one row per rank, cells `<stage><F|B|I|W><microbatch>`. PyTorch's pipeline schedules use the
same format."""

import csv
import re
from os import PathLike

from ndtrain.schedule.check import check
from ndtrain.schedule.table import Action, IllegalSchedule, ScheduleError, Table

Path = str | PathLike[str]


def write(table: Table, path: Path) -> None:
    """Write a table to a file. `read` returns the same table."""
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([f"{a.stage}{a.kind}{a.microbatch}" for a in row] for row in table)


def read(path: Path, pp: int, microbatches: int, chunks: int | None = None) -> Table:
    """Read and check the table in a file. Empty cells and rows are skipped.

    Raises:
        ScheduleError: the file is missing, a cell is malformed, or the numbers of ranks, microbatches or chunks differ
            from the arguments. The message names file, row and column.
        IllegalSchedule: an action is repeated, missing or out of order, or a stage is on two ranks.
    """
    rows = _cells(path)
    if len(rows) != pp:
        raise ScheduleError(f"{path}: {len(rows)} rows of actions, but pp={pp} needs one per rank")
    table = [[action for *_, action in row] for row in rows]
    in_file = 1 + max(a.microbatch for row in table for a in row)
    if in_file != microbatches:
        raise ScheduleError(f"{path}: has {in_file} microbatches, but the configuration has {microbatches}")
    stages = 1 + max(a.stage for row in table for a in row)
    if chunks is not None and stages != pp * chunks:
        raise ScheduleError(f"{path}: has {stages} stages, but pp={pp} and {chunks} chunks per rank make {pp * chunks}")
    try:
        check(table, microbatches, stages)
    except IllegalSchedule as error:
        where = ""
        if error.rank is not None and error.index is not None:
            row, column, _ = rows[error.rank][error.index]
            where = f", row {row}, column {column}"
        raise IllegalSchedule(f"{path}{where}: {error}", error.rank, error.index) from None
    return table


def _cells(path: Path) -> list[list[tuple[int, int, Action]]]:
    """Return, per rank, (row, column, action) of each cell that is not empty. Rows and columns count from 1.

    Raises:
        ScheduleError: the file cannot be read, or a cell is malformed.
    """
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
            f"{path}, row {row}, column {column}: {cell!r} is not an action: write <stage><F|B|I|W><microbatch>, "
            "e.g. 0F3"
        )
    return Action(match[2], int(match[3]), int(match[1]))
