"""What `bench gpu` aims for on one H200, as a table, and how each figure comes from the rows of the results."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Rows = Mapping[str, Mapping[str, Any]]  # case -> its row
WINDOW = 20  # steps whose mean loss is compared


@dataclass(frozen=True)
class Goal:
    """A figure that is to reach, or not to exceed, a bound.

    Attributes:
        figure: its value; None where a case that it needs is not measured.
        shown: how a value is printed.
    """

    text: str
    figure: Callable[[Rows], float | None]
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
    found = [rows.get(name, {}) for name in names]
    return found if all(row.get("status") == "measured" for row in found) else None


def best_mfu(*names: str) -> Callable[[Rows], float | None]:
    """The highest of those cases that are measured."""

    def figure(rows: Rows) -> float | None:
        found = [row["sides"]["ours"]["mfu"] for name in names for row in measured(rows, name) or []]
        return max(found, default=None)

    return figure


def tokens_per_s(name: str) -> Callable[[Rows], float | None]:
    def figure(rows: Rows) -> float | None:
        found = measured(rows, name)
        return found[0]["sides"]["ours"]["tokens_per_s"] if found else None

    return figure


def gain(fast: str, base: str) -> Callable[[Rows], float | None]:
    """Tokens a second of one case over those of another."""

    def figure(rows: Rows) -> float | None:
        a, b = tokens_per_s(fast)(rows), tokens_per_s(base)(rows)
        return None if a is None or b is None else a / b

    return figure


def least_ratio(peer: str, *names: str) -> Callable[[Rows], float | None]:
    """Of the cases in which ours and `peer` took turns the lowest median of the peer's time over ours."""

    def figure(rows: Rows) -> float | None:
        found = measured(rows, *names)
        return min(row["ratios"][peer]["median"] for row in found) if found else None

    return figure


def loss_deviation(case: str, base: str) -> Callable[[Rows], float | None]:
    """How far the mean loss of any `WINDOW` steps is from the other case's, at most, relative."""

    def figure(rows: Rows) -> float | None:
        found = measured(rows, case, base)
        return deviation(*(row["losses"] for row in found)) if found else None

    return figure


def deviation(losses: Sequence[float], expected: Sequence[float]) -> float:
    mean = lambda x: np.convolve(x, np.full(WINDOW, 1 / WINDOW), mode="valid")
    return float(np.max(np.abs(mean(losses) / mean(expected) - 1)))


def waits_a_step(name: str) -> Callable[[Rows], float | None]:
    def figure(rows: Rows) -> float | None:
        found = measured(rows, name)
        return sum(found[0]["waits"].values()) / found[0]["steps"] if found else None

    return figure


PERCENT = "{:.1%}"
_PAIRED = {"native": ("8192", "8192 selective"), "transformers": ("8192",)}
_pairs = lambda peer: [f"{shape} {words} against {peer}" for shape in ("1b", "8b8") for words in _PAIRED[peer]]
_again = lambda shape: [f"{shape} 8192 {mode}" for mode in ("full", "selective", "budget")]
GOALS = (
    Goal("MFU at 1B, bf16", best_mfu("1b 8192", "1b 4096", *_again("1b")), 0.60, shown=PERCENT),
    Goal("MFU at 8B, 8192 tokens, bf16", best_mfu("8b 8192", *_again("8b")), 0.62, shown=PERCENT),
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
    Goal("tokens/s at 8B, full recompute", tokens_per_s("8b 8192 full"), 10471, shown="{:,.0f}"),
    Goal("host waits in a steady step", waits_a_step("1b 4096 host waits"), 0, at_most=True, shown="{:g}"),
)
