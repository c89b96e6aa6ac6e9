"""metrics.jsonl: one JSON object per line, one line per step."""

import errno
import json
import math
import os
from io import FileIO
from pathlib import Path
from typing import Any


class JsonlWriter:
    """Appends rows to a file. Each row is in the file when `write` returns.

    The constructor first drops the rows after `resume_step`, since the run repeats those steps. It also drops lines
    that a kill left incomplete. The file then contains exactly one line per step.

    Args:
        resume_step: 0 drops all rows. None: the rows from the first written step on are dropped when it is written. An
            island does not know before where it will go on.

    Raises:
        OSError: the file cannot be read, rewritten or opened.
    """

    def __init__(self, path: Path, resume_step: int | None):
        self._path, self._waiting, self._must_cut = path, b"", resume_step is None
        if resume_step is not None:
            _keep_until(path, resume_step)
        self._file = self._open()

    def _open(self) -> FileIO:
        return open(self._path, "ab", buffering=0)

    def write(self, row: dict[str, Any]) -> None:
        """Append `row`, a flat dict of numbers, strings and None. NaN and infinities become null, since JSON lacks
        them.

        A failed write leaves no incomplete line. The row is written together with the next one.

        Raises:
            OSError: the disk is full, or the file cannot be written.
        """
        if self._must_cut:
            self._file.close()
            _keep_until(self._path, row["step"] - 1)
            self._file, self._must_cut = self._open(), False
        self._waiting += _line(row)
        size = os.fstat(self._file.fileno()).st_size
        written = self._file.write(self._waiting)
        if written < len(self._waiting):
            self._file.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)
        self._waiting = b""

    def close(self) -> None:
        self._file.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl in order, one per step. If a step was logged twice, the later row counts.

    Incomplete lines and lines that are not rows are skipped. A missing file has no rows.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    rows = {}
    for line in content.splitlines():
        if row := _row(line):
            rows[row["step"]] = row
    return list(rows.values())


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps({key: _plain(value) for key, value in row.items()}, allow_nan=False).encode() + b"\n"


def _plain(value: Any) -> Any:
    """Convert a number of any library to a Python number. Return None if it is not finite."""
    if value is None or isinstance(value, int | str):
        return value
    value = float(value)
    return value if math.isfinite(value) else None


def _keep_until(path: Path, step: int) -> None:
    """Rewrite the file without the rows after `step`. Writes a temporary file, then renames it."""
    if not path.exists():
        return
    before = path.read_bytes()
    rows = {}
    for line in before.splitlines(keepends=True):
        at = _step_of(line)
        if at is not None and at <= step:
            rows[at] = line
    after = b"".join(rows.values())
    if after == before:
        return
    part = path.with_name(path.name + ".part")
    part.write_bytes(after)
    part.replace(path)


def _step_of(line: bytes) -> int | None:
    """Return the step of a complete line. Return None if the line is incomplete or not a row."""
    row = _row(line) if line.endswith(b"\n") else None
    return row["step"] if row else None


def _row(line: bytes) -> dict[str, Any] | None:
    """Return the row in a line, or None if the line is not a JSON object with an integer "step"."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None
