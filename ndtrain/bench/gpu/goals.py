"""The goals of `bench gpu` on one H200, as a table, and how each figure comes from the rows of the results."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Rows = Mapping[str, Mapping[str, Any]]  # case -> its row
Figure = Callable[[Rows], float | None]
WINDOW = 20  # steps whose mean loss is compared


@dataclass(frozen=True)
class Goal:
    """A figure that is to reach, or not to exceed, a bound.

    Attributes:
        figure: its value; None where a case that it needs is not measured.
        shown: how a value is printed.
    """

    text: str
    figure: Figure
    bound: float
    at_most: bool = False
    shown: str = "{:.3f}"

    def outcome(self, rows: Rows) -> tuple[str, str]:
        """(what was measured, met or missed), or "not measured" for both."""
        value = self.figure(rows)
        if value is None:
            return "not measured", "not measured"
        met = value <= self.bound if self.at_most else value >= self.bound
        return self.shown.format(value), "met" if met else "missed"


def measured(rows: Rows, *names: str) -> list[Mapping[str, Any]] | None:
    """These rows; None where one is not measured."""
    chosen = [rows.get(name, {}) for name in names]
    return chosen if all(row.get("status") == "measured" for row in chosen) else None


def from_rows(of: Callable[..., float], *names: str) -> Figure:
    """The figure that `of` makes of these cases' rows; None where one is not measured."""

    def figure(rows: Rows) -> float | None:
        chosen = measured(rows, *names)
        return of(*chosen) if chosen else None

    return figure


def best_mfu(*names: str) -> Figure:
    """The highest of those cases that are measured."""

    def figure(rows: Rows) -> float | None:
        shares = [row["sides"]["ours"]["mfu"] for name in names for row in measured(rows, name) or []]
        return max(shares, default=None)

    return figure


def _tokens_per_s(row: Mapping[str, Any]) -> float:
    return row["sides"]["ours"]["tokens_per_s"]


def gain(fast: str, base: str) -> Figure:
    """Tokens a second of one case over those of another."""
    return from_rows(lambda a, b: _tokens_per_s(a) / _tokens_per_s(b), fast, base)


def least_ratio(peer: str, *names: str) -> Figure:
    """Of cases that compare ours with `peer` the lowest median of the peer's time over ours."""
    return from_rows(lambda *rows: min(row["ratios"][peer]["median"] for row in rows), *names)


def loss_deviation(case: str, base: str) -> Figure:
    """How far the mean loss of any `WINDOW` steps is from the other case's, at most, relative."""
    return from_rows(lambda a, b: deviation(a["losses"], b["losses"]), case, base)


def deviation(losses: Sequence[float], expected: Sequence[float]) -> float:
    mean = lambda x: np.convolve(x, np.full(WINDOW, 1 / WINDOW), mode="valid")
    return float(np.max(np.abs(mean(losses) / mean(expected) - 1)))


def waits_in_step(name: str) -> Figure:
    return from_rows(lambda row: sum(row["waits"].values()) / row["steps"], name)


PERCENT = "{:.1%}"
_PAIRED = {"native": ("8192", "8192 selective"), "transformers": ("8192",)}
_pairs = lambda peer: [f"{shape} {words} against {peer}" for shape in ("1b", "8b8") for words in _PAIRED[peer]]
_recomputed = lambda shape: [f"{shape} 8192 {mode}" for mode in ("full", "selective", "budget")]
GOALS = (
    Goal("MFU at 1B, bf16", best_mfu("1b 8192", "1b 4096", *_recomputed("1b")), 0.60, shown=PERCENT),
    Goal("MFU at 8B, 8192 tokens, bf16", best_mfu("8b 8192", *_recomputed("8b")), 0.62, shown=PERCENT),
    *(
        Goal(f"tokens/s over {peer}, the lowest", least_ratio(peer, *_pairs(peer)), bound)
        for peer, bound in (("native", 1.1), ("transformers", 1.2))
    ),
    Goal("tokens/s of fp8 over bf16 at 8B", gain("8b 8192 fp8", "8b 8192"), 1.25),
    Goal(
        f"loss of fp8 off bf16's at 8B, means of {WINDOW} of 200 steps",
        loss_deviation("8b 8192 losses fp8", "8b 8192 losses bf16"),
        0.005,
        at_most=True,
        shown="{:.2%}",
    ),
    Goal("tokens/s at 8B, full recompute", from_rows(_tokens_per_s, "8b 8192 full"), 10471, shown="{:,.0f}"),
    Goal("host waits in a steady step", waits_in_step("1b 4096 host waits"), 0, at_most=True, shown="{:g}"),
)
