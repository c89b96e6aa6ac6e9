"""Watches the run folders of islands, and records when each step was finished."""

import json
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

_PAUSE_S = 0.01
_LOGGED = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) rank \d+ [A-Z]+ (.*)$")


class Finished(NamedTuple):
    """A step that an island has finished.

    Attributes:
        at: seconds of `time.time`, up to 0.02 s late.
    """

    at: float
    island: str
    step: int
    loss: float | None
    grad_norm: float | None


class RowReader:
    """Reads the new rows of a metrics.jsonl. A restarted island rewrites the file without its newest rows.

    Args:
        path: the file, which may not exist yet.
    """

    def __init__(self, path: Path):
        self._path, self._at, self._file = path, 0, 0
        self._seen: set[bytes] = set()

    def read(self) -> list[dict]:
        """Return the rows that were written since the last call."""
        try:
            with self._path.open("rb") as file:
                known = os.fstat(file.fileno())
                if known.st_ino != self._file or known.st_size < self._at:
                    self._file, self._at = known.st_ino, 0
                file.seek(self._at)
                content = file.read()
        except FileNotFoundError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self._at += len(whole)
        lines = [line for line in whole.splitlines() if line not in self._seen]
        self._seen.update(lines)
        return [json.loads(line) for line in lines]


class Watcher:
    """A thread that records the steps of islands until the end of the `with` block.

    Args:
        folders: island -> its run folder.

    Attributes:
        finished: all finished steps, in the order in which they were seen.
    """

    def __init__(self, folders: Mapping[str, Path]):
        self._readers = {name: RowReader(folder / "metrics.jsonl") for name, folder in folders.items()}
        self.finished: list[Finished] = []
        self._last: dict[str, Finished] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Watcher":
        self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        self._ended.set()
        self._thread.join()

    def step(self, island: str) -> int:
        """Return the last step that an island has finished, or 0."""
        return self._last[island].step if island in self._last else 0

    def last(self, island: str) -> float:
        """Return the time of the last step of an island, or 0."""
        return self._last[island].at if island in self._last else 0.0

    def _run(self) -> None:
        while not self._ended.is_set():
            for name, reader in self._readers.items():
                rows, now = reader.read(), time.time()
                for row in rows:
                    self._last[name] = Finished(now, name, row["step"], row["loss"], row["grad_norm"])
                    self.finished.append(self._last[name])
            time.sleep(_PAUSE_S)


def wait_until(condition: Callable[[], object], seconds: float) -> bool:
    """Wait until a condition is true. Return False if it is still false after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(_PAUSE_S)
    return True


def logged(folder: Path) -> list[tuple[float, str]]:
    """Return (time, line) of each line for the user that an island has logged."""
    path = folder / "logs" / "rank-0.log"
    matches = (_LOGGED.match(line) for line in path.read_text().splitlines()) if path.exists() else ()
    when = lambda text: datetime.strptime(text, "%Y-%m-%d %H:%M:%S,%f").timestamp()
    return [(when(match[1]), match[2]) for match in matches if match]
