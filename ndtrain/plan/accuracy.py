"""The errors of predictions, source by source, and the known errors of predictions of published runs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ndtrain.plan.hardware import Hardware

WITHIN = 0.25  # a prediction with at most this error counts as near


@dataclass(frozen=True)
class Accuracy:
    """The errors of some rows. An error is predicted / measured - 1.

    Attributes:
        rows: number of rows.
        median: median of the absolute errors.
        quartiles: first and third quartile of the signed errors.
        worst: the signed error with the largest absolute value.
        within_25: share of rows with an absolute error of at most `WITHIN`.
        tau: Kendall's tau-b of the step times; None for fewer than three rows, or if the times are constant.
        memory_rows: number of rows with a measured memory.
        memory_median: median of the absolute errors of memory; None without such rows.
    """

    rows: int
    median: float
    quartiles: tuple[float, float]
    worst: float
    within_25: float
    tau: float | None
    memory_rows: int
    memory_median: float | None


def accuracy(
    measured: Sequence[float], predicted: Sequence[float], memory: Sequence[tuple[float, float]] = ()
) -> Accuracy:
    """Compute the errors of step times, and of pairs (measured, predicted) of memory."""
    errors = np.asarray(predicted) / np.asarray(measured) - 1
    memory_errors = [abs(predicted / measured - 1) for measured, predicted in memory]
    low, high = np.quantile(errors, [0.25, 0.75])
    return Accuracy(
        rows=len(errors),
        median=float(np.median(np.abs(errors))),
        quartiles=(float(low), float(high)),
        worst=float(errors[np.argmax(np.abs(errors))]),
        within_25=float(np.mean(np.abs(errors) <= WITHIN)),
        tau=kendall_tau(measured, predicted) if len(errors) > 2 else None,
        memory_rows=len(memory_errors),
        memory_median=float(np.median(memory_errors)) if memory_errors else None,
    )


def kendall_tau(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return Kendall's tau-b, which counts ties: 1 if both are in the same order, None if either is constant."""
    x, y = (np.sign(np.subtract.outer(v, v))[np.triu_indices(len(v), 1)] for v in (np.asarray(a), np.asarray(b)))
    scale = np.sqrt(np.sum(x != 0) * np.sum(y != 0))
    return float(np.sum(x * y) / scale) if scale else None


def folds(sources: Sequence[str], count: int = 5) -> list[set[str]]:
    """Split the sources into at most `count` groups of similar size: largest source first, into the smallest group."""
    rows = {source: sources.count(source) for source in dict.fromkeys(sources)}
    groups: list[set[str]] = [set() for _ in range(count)]
    for source in sorted(rows, key=lambda s: (-rows[s], s)):
        smallest = min(groups, key=lambda group: sum(rows[s] for s in group))
        smallest.add(source)
    return [group for group in groups if group]


# ------------------------------------------------------------------------------------------------------ published runs

# All rows of the five-fold cross-validation by source in docs/plan_accuracy.md. The rates that predicted a row were
# fitted without the row's source.
ERRORS = Accuracy(
    rows=457,
    median=0.079,
    quartiles=(-0.095, 0.038),
    worst=-0.668,
    within_25=0.915,
    tau=0.93,
    memory_rows=402,
    memory_median=0.087,
)


def applies_to(hardware: Hardware) -> bool:
    """Return True for GPUs whose rates come from their data sheets, as in the published runs."""
    return hardware.device == "cuda" and hardware.measured is None


def band(predicted: float) -> tuple[float, float]:
    """Return the range that contains the measured step time with probability `ERRORS.within_25`, in the same unit."""
    return predicted / (1 + WITHIN), predicted / (1 - WITHIN)


def note() -> str:
    """Return the accuracy in one line."""
    low, high = band(1.0)
    fast, slow = (1 / (1 + error) for error in reversed(ERRORS.quartiles))
    return (
        f"of {ERRORS.rows} published runs {ERRORS.within_25:.0%} took {low:.2f} to {high:.2f} times their predicted "
        f"time, half of them {fast:.2f} to {slow:.2f}; predicted memory was {ERRORS.memory_median:.0%} off (median)"
    )
