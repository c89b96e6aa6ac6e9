"""The text of plans: tables, numbers, and the progress of a long plan."""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO, TypeVar

T = TypeVar("T")
EVERY_S = 10.0  # seconds between two lines if the output is not a terminal
_REDRAW_S = 0.1  # seconds between two drawings on a terminal


def table(rows: Iterable[Sequence[str]]) -> str:
    """Format columns aligned to the right, the first one to the left."""
    rows = list(rows)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )


_PREFIXES = ["", "k", "M", "G", "T", "P", "E", "Z"]


def si(number: float, unit: str) -> str:
    """Format a number with three digits and a decimal prefix: 27.9 GB."""
    for prefix in _PREFIXES:
        if abs(number) < 999.5:
            return f"{number:.3g} {prefix}{unit}"
        number /= 1000
    return f"{number * 1000:.0f} {_PREFIXES[-1]}{unit}"


class Progress:
    """Shows the progress of a plan on stderr: on a terminal one line that is rewritten, elsewhere a line from time to
    time.

    Args:
        stream: the output; None: stderr.
        every_s: the shortest time between two lines if the output is not a terminal.
    """

    def __init__(self, stream: TextIO | None = None, every_s: float = EVERY_S):
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._every_s = _REDRAW_S if self._live else every_s
        self._began = time.monotonic()
        self._shown_at = self._began if not self._live else float("-inf")
        self._width = 0

    def count(self, items: Iterable[T], what: str, total: int) -> Iterator[T]:
        """Yield the items, and show the number of items so far: `what: 3 of 68, 12 s`."""
        for number, item in enumerate(items, 1):
            self.show(f"{what}: {number} of {total}, {time.monotonic() - self._began:.0f} s")
            yield item
        self.clear()

    def show(self, text: str) -> None:
        """Show a line, unless the last one is too recent."""
        now = time.monotonic()
        if now - self._shown_at < self._every_s:
            return
        self._shown_at = now
        if self._live:
            print(f"\r{text.ljust(self._width)}", end="", file=self._stream, flush=True)
            self._width = len(text)
        else:
            print(text, file=self._stream, flush=True)

    def clear(self) -> None:
        """Remove the line from a terminal."""
        if self._live and self._width:
            print(f"\r{' ' * self._width}\r", end="", file=self._stream, flush=True)
            self._width = 0
