"""The goals of `bench gpu` on one GPU, as a table, with the function that computes each figure from the results."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from lab.gpu.suite import WHAT

Rows = Mapping[str, Mapping[str, Any]]  # case -> its row
Figure = Callable[[Rows], float | None]
WINDOW = 20  # steps whose mean losses are compared


@dataclass(frozen=True)
class Goal:
    """A figure that has to reach, or not to exceed, a bound.

    Attributes:
        figure: computes its value; None if a case that it needs is not measured.
        shown: the format of a printed value.
        profile: the case that profiles the step, shown if the goal is not reached.
    """

    text: str
    figure: Figure
    bound: float
    at_most: bool = False
    shown: str = "{:.3f}"
    profile: str = ""

    def outcome(self, rows: Rows) -> tuple[str, str]:
        """Return (measured value, "ahead" or "behind"), or "not measured" for both."""
        value = self.figure(rows)
        if value is None:
            return "not measured", "not measured"
        met = value <= self.bound if self.at_most else value >= self.bound
        return self.shown.format(value), "ahead" if met else "behind"


def measured(rows: Rows, *names: str) -> list[Mapping[str, Any]] | None:
    """Return these rows, or None if one is not measured or comes from a CPU. The goals are for GPUs."""
    chosen = [rows.get(name, {}) for name in names]
    done = all(row.get("status") == "measured" and row.get("device") != "cpu" for row in chosen)
    return chosen if done else None


def from_rows(of: Callable[..., float | None], *names: str) -> Figure:
    """Return a figure that applies `of` to these cases' rows. It is None if one of them is not measured."""

    def figure(rows: Rows) -> float | None:
        chosen = measured(rows, *names)
        return of(*chosen) if chosen else None

    return figure


def best(of: Callable[[Mapping[str, Any]], float], *names: str) -> Figure:
    """Return a figure: the highest value of `of` among the measured cases."""

    def figure(rows: Rows) -> float | None:
        return max((of(row) for name in names for row in measured(rows, name) or []), default=None)

    return figure


def _mfu(row: Mapping[str, Any]) -> float:
    return row["sides"]["ours"]["mfu"]


def _tokens_per_s(row: Mapping[str, Any]) -> float:
    return row["sides"]["ours"]["tokens_per_s"]


def gain(fast: str, base: str) -> Figure:
    """Return a figure: tokens per second of `fast` over `base`. It is None if the two have different commits: they come
    from two sessions then, whose machines may differ."""

    ratio = lambda a, b: _tokens_per_s(a) / _tokens_per_s(b) if a["commit"] == b["commit"] else None
    return from_rows(ratio, fast, base)


def least_ratio(peer: str, *names: str) -> Figure:
    """Return a figure: the lowest median of the peer's time over ours, among the measured cases."""

    def figure(rows: Rows) -> float | None:
        ratios = (row["ratios"][peer]["median"] for name in names for row in measured(rows, name) or [])
        return min(ratios, default=None)

    return figure


def loss_deviation(case: str, base: str) -> Figure:
    """Return a figure: the largest relative difference of the two cases' mean losses over any `WINDOW` steps."""
    return from_rows(lambda a, b: deviation(a["losses"], b["losses"]), case, base)


def deviation(losses: Sequence[float], expected: Sequence[float]) -> float:
    mean = lambda x: np.convolve(x, np.full(WINDOW, 1 / WINDOW), mode="valid")
    return float(np.max(np.abs(mean(losses) / mean(expected) - 1)))


def waits_in_step(name: str) -> Figure:
    return from_rows(lambda row: sum(row["waits"].values()) / row["steps"], name)


def fall(row: Mapping[str, Any]) -> float:
    return row["losses"][-1] / row["losses"][0]


PERCENT, SMALL = "{:.1%}", "{:.1e}"
_PAIRED = {"native": ("8192", "8192 selective"), "transformers": ("8192",)}
RIGHT = (
    Goal("last of 40 losses over the first, 1B", from_rows(fall, "1b 4096 trains"), 0.8, at_most=True),
    *(
        Goal(f"{what} off the CPU's, {words}", from_rows(itemgetter(what), f"small parity {words}"), bound, True, SMALL)
        for words, bounds in (("fp32", (1e-5, 1e-4)), ("packed", (1e-5, 1e-4)), ("bf16", (5e-3, 5e-2)),
                              ("bf16 compiled", (5e-3, 5e-2)))
        for what, bound in zip(("loss", "gradient"), bounds, strict=True)
    ),
)  # fmt: skip


def _against(shape: str) -> tuple[Goal, ...]:
    return tuple(
        Goal(
            f"tokens/s over {peer} at {WHAT[shape]}, the lowest",
            least_ratio(peer, *(f"{shape} {words} against {peer}" for words in _PAIRED[peer])),
            bound,
        )
        for peer, bound in (("native", 1.1), ("transformers", 1.2))
    )


def speed(shape: str, share: float) -> tuple[Goal, ...]:
    """Return the goals for MFU. The best recompute mode counts."""
    at = {8192: [f"{shape} 8192", *(f"{shape} 8192 {mode}" for mode in ("selective", "full", "budget"))]}
    at[4096] = [f"{shape} 4096"]
    profile = f"{shape} 8192 profile"
    return tuple(
        Goal(f"MFU at {WHAT[shape]}, {n:,} tokens, bf16", best(_mfu, *names), share, shown=PERCENT, profile=profile)
        for n, names in at.items()
    )


def large(shape: str) -> tuple[Goal, ...]:
    """Return the goals for 8B, or for the shape that replaces 8B."""
    return (
        *speed(shape, 0.62),
        Goal(
            f"tokens/s of fp8 over bf16 at {WHAT[shape]}, one commit",
            gain(f"{shape} 8192 fp8", f"{shape} 8192"),
            1.25,
            profile=f"{shape} 8192 fp8 profile",
        ),
        Goal(
            f"loss of fp8 off bf16's at {WHAT[shape]}, means of {WINDOW} of 50 steps",
            loss_deviation(f"{shape} 2048 losses fp8", f"{shape} 2048 losses bf16"),
            0.005,
            at_most=True,
            shown="{:.2%}",
        ),
    )


PUBLIC_BEST = Goal(
    "tokens/s at 8B, 8,192 tokens (public best on one H200)",
    best(_tokens_per_s, *(f"8b 8192{mode}" for mode in ("", " selective", " full", " budget"))),
    10471,
    shown="{:,.0f}",
    profile="8b 8192 profile",
)
WAITS = Goal("host waits in a steady step", waits_in_step("1b 4096 host waits"), 0, at_most=True, shown="{:g}")


def goals(shape: str = "8b", paired: str = "8b8") -> tuple[Goal, ...]:
    """Return the goals in the order of the suite's cases.

    Args:
        shape: the shape that replaces 8B on this device. If it is smaller than 8B, it has rows of its own, in addition
            to those for 8B.
        paired: the shape at which ours alternates with its peers.
    """
    shapes = dict.fromkeys(("8b", shape))
    return (
        *RIGHT,
        *(goal for name in shapes for goal in large(name)[:2]),
        PUBLIC_BEST,
        *speed("1b", 0.60),
        *_against(paired),
        *_against("1b"),
        *(goal for name in shapes for goal in large(name)[2:]),
        WAITS,
    )


GOALS = goals()
