"""The progress of long work on a corpus: a bar with the remaining time on a terminal, plain lines elsewhere."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

LINE_S = 10.0  # between plain lines
_REDRAW_S = 0.1  # between two drawings of the bar
_PATIENCE_S = 2.0  # before the first line of work of unknown length
_MIN_BAR = 4  # characters; rich draws no shorter bar


@dataclass
class TextProgress:
    """The amount of a corpus that is done.

    Attributes:
        total, done: bytes of text.
        reused: the bytes of `done` that an earlier run did.
        tokens: the number of tokens that this run made.
        started: `time.monotonic()` at the start of this run.
    """

    total: int
    done: int = 0
    reused: int = 0
    tokens: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def seconds_left(self) -> float | None:
        """Remaining seconds at the rate so far; None while the rate is unknown."""
        own = self.done - self.reused
        return self.seconds * max(0, self.total - self.done) / own if own else None

    def amount(self) -> str:
        return f"{self.done / 1e6:,.1f} of {self.total / 1e6:,.1f} MB"

    def percent(self) -> str:
        return f"{100 * self.done / max(self.total, 1):.0f} %"

    def rates(self, most: int = 3) -> str:
        """Return the number of tokens, their rate and the remaining time as text, as far as they are known.

        Args:
            most: how many of the three to include; the remaining time is left out last.
        """
        words = [f"{self.tokens:,} tokens", f"{self.tokens_per_s:,.0f} tokens/s"] if self.tokens else []
        if self.seconds_left is not None:
            words.append(f"left {timedelta(seconds=round(self.seconds_left))}")
        return "  ".join(words[len(words) - min(most, len(words)) :])

    def fitting(self, prefix: str, width: int) -> tuple[str, str]:
        """Return the texts before and after a bar that fit into a line of `width` columns."""
        full, short = f"{prefix}{self.amount()}", f"{prefix}{self.percent()}"
        layouts = [(full, self.rates(most)) for most in (3, 2, 1)] + [(short, self.rates(1)), (short, "")]
        fits = ((a, b) for a, b in layouts if len(a) + len(b) + 2 + _MIN_BAR <= width)
        return next(fits, (self.percent(), ""))


class ProgressDisplay:
    """Shows a `TextProgress`: as a bar on a terminal, as a plain line every `LINE_S` seconds elsewhere.

    Args:
        console: the output; None: stdout.
        title: the words that begin the bar and each plain line.
    """

    def __init__(self, console: Console | None = None, title: str = ""):
        self.progress: TextProgress | None = None  # the last one shown
        self._console = console or Console()
        self._title = title
        self._bar: Progress | None = None
        self._shown_at = float("-inf")  # when it was last drawn or printed

    def note(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, progress: TextProgress) -> None:
        """Show the progress, unless it was shown a moment ago."""
        now = time.monotonic()
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self.progress = progress
            if now - self._shown_at >= _REDRAW_S:
                self._shown_at = now
                self._draw(progress)
            return
        if self.progress is None:
            self._shown_at = now  # a short piece of work prints no line
        self.progress = progress
        if now - self._shown_at >= LINE_S:
            self._shown_at = now
            self.note(f"{self._prefix()}{progress.amount()}  {progress.rates()}".rstrip())

    def location(self) -> str:
        """Return the position of the work, for a message; "" if the work has not begun."""
        return f" at {self.progress.amount()}" if self.progress else ""

    def close(self) -> None:
        """Leave the bar on the screen and release the terminal."""
        if self._bar:
            self._draw(self.progress)
            self._bar.stop()
            self._bar = None

    def _prefix(self) -> str:
        return f"{self._title}  " if self._title else ""

    def _draw(self, progress: TextProgress) -> None:
        amount, rates = progress.fitting(self._prefix(), self._console.width)
        if self._bar is None:
            columns = [
                TextColumn("{task.fields[amount]}", markup=False),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[rates]}", markup=False),
            ]
            self._bar = Progress(*columns, console=self._console, auto_refresh=False, expand=True)
            self._task = self._bar.add_task("", total=progress.total, amount=amount, rates=rates)
            self._bar.start()
            self._console.show_cursor(True)  # rich hides it, and a killed process could not show it again
        self._bar.update(
            self._task,
            total=progress.total,
            completed=progress.done,
            amount=amount,
            rates=rates,
            refresh=True,
        )


@contextmanager
def progress_on_stderr(title: str, total: int) -> Iterator[Callable[[int, int], None]]:
    """Yield `advance(size, tokens)`, which adds to the bytes and tokens that are done and shows the progress on stderr.

    The work continues if its terminal is closed.

    Args:
        title: the words that begin the bar and each plain line.
        total: approximate number of bytes of text.
    """
    progress = TextProgress(total)
    display = ProgressDisplay(Console(stderr=True), title)

    def advance(size: int, tokens: int) -> None:
        progress.done += size
        progress.total = max(progress.total, progress.done)
        progress.tokens += tokens
        with suppress(OSError):
            display.show(progress)

    try:
        advance(0, 0)
        yield advance
        progress.total = progress.done  # `total` was an estimate
    finally:
        with suppress(OSError):
            display.close()


@contextmanager
def elapsed_on_stderr(title: str) -> Iterator[Callable[[], None]]:
    """Yield `begin()`. Once it is called, print the elapsed time to stderr at intervals until the block ends.

    This is for library calls that report no progress. Short work prints nothing.

    Args:
        title: the words that begin each line.
    """
    begun, ended = threading.Event(), threading.Event()

    def report() -> None:
        begun.wait()
        began, pause = time.monotonic(), _PATIENCE_S
        while not ended.wait(pause):
            with suppress(OSError):
                print(f"{title}: {time.monotonic() - began:.0f} s so far", file=sys.stderr, flush=True)
            pause = LINE_S

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield begun.set
    finally:
        ended.set()
        begun.set()
        thread.join()
