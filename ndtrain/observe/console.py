"""The console output of rank 0: a progress bar on a terminal, plain lines elsewhere."""

import contextlib
import math
import os
import sys
import time
from collections import deque
from contextlib import AbstractContextManager
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn

_WINDOW = 20  # number of steps that rates are averaged over
_REFRESH_S = 0.1  # shortest time between two refreshes of the bar
_MIN_BAR = 4  # characters; rich draws no shorter bar
_LOAD = "moe/load_max_over_mean"


class Console:
    """Shows the progress of a run. In plain lines the loss is the mean since the previous line; in the bar it is the
    mean over the last `log_every` steps. Rates are averages over the last `_WINDOW` steps. They exclude the first step
    of the process, which compiles, warms up and fills caches.

    Args:
        total: the last step of this run.
        log_every: steps between plain lines; the bar is updated every step.
        stream: the output; None: stdout. A terminal that can move its cursor gets the progress bar.
    """

    def __init__(self, total: int, log_every: int, stream: TextIO | None = None):
        self._total = total
        self._log_every = log_every
        self._stream = stream or sys.stdout
        self._rows: deque[dict[str, Any]] = deque(maxlen=_WINDOW)
        self._losses: deque[float] = deque(maxlen=log_every)
        self._warm = False
        live = self._stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")
        self._bar = _Bar(total, self._stream) if live else None

    def update(self, row: dict[str, Any]) -> None:
        """Show the step of `row`, a row of metrics.jsonl."""
        if self._warm:
            self._rows.append(row)
        self._warm = True
        self._losses.append(row["loss"])
        step, loss = row["step"], f"loss {self._mean_loss():.4f}"
        if self._bar:
            with _ignore_output_errors():
                self._bar.update(step, [loss, *self._rates(step, ("tok/s", "MFU", "left"))])
        elif step % self._log_every == 0 or step == self._total:
            rates = self._rates(step, ("tok/s", "MFU", "s/step", "left"))
            self._print_figures([f"step {step}/{self._total}", loss, *_state(row), *rates])
            self._losses.clear()

    def note(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._bar:
            with _ignore_output_errors():
                self._bar.print(text)
        else:
            self._print(text)

    def warn(self, text: str) -> None:
        """Print a line marked as a warning."""
        self.note(f"warning: {text}")

    def close(self) -> None:
        """End the progress bar and leave it on the terminal as it is."""
        if self._bar:
            with _ignore_output_errors():
                self._bar.close()

    def _mean_loss(self) -> float:
        """Return the mean of the finite losses. The user has been warned about the steps without a finite loss."""
        finite = [loss for loss in self._losses if math.isfinite(loss)]
        return sum(finite) / len(finite) if finite else self._losses[-1]

    def _print_figures(self, figures: list[str]) -> None:
        """Print the figures in one line. On a terminal, drop figures that exceed its width."""
        width = _terminal_width(self._stream)
        self._print("  ".join(fitting(figures, width) if width else figures))

    def _rates(self, step: int, which: tuple[str, ...]) -> list[str]:
        """Return the averages named by `which` as text. Return an empty list before the second step."""
        if not self._rows:
            return []
        seconds = sum(row["step_time_s"] for row in self._rows)
        step_s = seconds / len(self._rows)
        rate, mfu = (sum(r[k] * r["step_time_s"] for r in self._rows) / seconds for k in ("tokens_per_s", "mfu"))
        shown = {
            "tok/s": f"{rate:,.0f} tok/s",
            "MFU": f"MFU {100 * mfu:.1f} %",
            "s/step": f"{step_s:.3g} s/step",
            "left": f"left {duration(step_s * (self._total - step))}",
        }
        return [shown[key] for key in which]

    def _print(self, text: str) -> None:
        with _ignore_output_errors():
            print(text, file=self._stream, flush=True)


def _ignore_output_errors() -> AbstractContextManager:
    """Ignore OSError: a full disk behind a redirected stdout or a closed terminal must not end the training."""
    return contextlib.suppress(OSError)


class _Bar:
    """rich's progress bar. The training thread draws it, at most every `_REFRESH_S` seconds."""

    def __init__(self, total: int, stream: TextIO):
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[stats]}", markup=False),
            console=RichConsole(file=stream),
            auto_refresh=False,
            expand=True,
        )
        self._task = self._progress.add_task("", total=total, stats="")
        self._total = total
        self._started = False
        self._drawn = float("-inf")

    def update(self, step: int, figures: list[str]) -> None:
        """Show the figures that fit the width of the terminal."""
        figures = fitting(figures, self._progress.console.width - len(f"step {step}/{self._total} ") - _MIN_BAR - 1)
        if not self._started:
            self._started = True
            self._progress.start()
            self._progress.console.show_cursor(True)  # rich hides it, and a killed process cannot restore it
        self._progress.update(self._task, completed=step, stats="  ".join(figures))
        now = time.monotonic()
        if now - self._drawn >= _REFRESH_S or step == self._total:
            self._progress.refresh()
            self._drawn = now

    def print(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._started:
            self._progress.stop()
            self._started = False


def _state(row: dict[str, Any]) -> list[str]:
    """Return gradient norm, learning rate and, if the model has experts, the maximum expert load over the mean, as
    text."""
    shown = [f"grad_norm {row['grad_norm']:.2f}"] if row["grad_norm"] is not None else []
    load = [f"load {row[_LOAD]:.2f}"] if row.get(_LOAD) is not None else []
    return [*shown, f"lr {row['lr']:.1e}", *load]


def _terminal_width(stream: TextIO) -> int:
    """Return the columns of the terminal behind a stream, or 0 if there is no terminal or its width is unknown."""
    try:
        return os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except (OSError, ValueError):
        return 0


_DISPENSABLE = (
    "load",
    "s/step",
    "lr",
    "grad_norm",
    "MFU",
    "tok/s",
    "left",
    "loss",
    "step",
)  # in the order in which a narrow line drops them


def fitting(figures: list[str], width: int) -> list[str]:
    """Return the figures that fit in a line of `width` columns. Drops others in the order of `_DISPENSABLE`."""
    shown = list(figures)
    for word in _DISPENSABLE:
        if len("  ".join(shown)) > width:
            shown = [figure for figure in shown if word not in figure.split()]
    return shown


def duration(seconds: float) -> str:
    """Return seconds as text with at most two units: 32s, 1m32s, 3h05m, 2d04h."""
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{s:02}s" if minutes else f"{s}s"
