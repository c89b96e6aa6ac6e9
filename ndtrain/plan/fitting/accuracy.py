"""How far predictions are off, source by source."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WITHIN = 0.25  # the error up to which a prediction counts as near


@dataclass(frozen=True)
class Accuracy:
    """Of some rows. Errors are predicted / measured - 1.

    Attributes:
        rows: their number.
        median: of the errors' sizes.
        quartiles: of the errors, signed.
        worst: the error of the largest size.
        within_25: share of rows whose error is at most `WITHIN`.
        tau: Kendall's tau-b of the step times; None where there are fewer than two pairs to order.
        memory_rows, memory_median: as rows and median, of memory; None where no row has it.
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
    """Of step times, and of pairs (measured, predicted) of memory."""
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
    """Kendall's tau-b, which counts ties: 1 where both are in the same order. None where either is constant."""
    x, y = (np.sign(np.subtract.outer(v, v))[np.triu_indices(len(v), 1)] for v in (np.asarray(a), np.asarray(b)))
    scale = np.sqrt(np.sum(x != 0) * np.sum(y != 0))
    return float(np.sum(x * y) / scale) if scale else None


def folds(sources: Sequence[str], count: int = 5) -> list[set[str]]:
    """The sources in `count` groups of about as many rows: the largest source first, each into the smallest group."""
    rows = {source: sources.count(source) for source in dict.fromkeys(sources)}
    groups: list[set[str]] = [set() for _ in range(count)]
    for source in sorted(rows, key=lambda s: (-rows[s], s)):
        smallest = min(groups, key=lambda group: sum(rows[s] for s in group))
        smallest.add(source)
    return [group for group in groups if group]
