"""Figures of the steps that islands have finished: rates, gaps, and whether all islands agree."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from lab.islands.watch import Finished
from ndtrain.measure.rounds import quartiles


def first_finishes(finished: Iterable[Finished]) -> dict[int, float]:
    """Return step -> the time at which the first island finished it."""
    times: dict[int, float] = {}
    for row in finished:
        times[row.step] = min(row.at, times.get(row.step, row.at))
    return dict(sorted(times.items()))


def rate(finished: Iterable[Finished], begin: float, end: float) -> dict[str, float]:
    """Return the steps that the group finished from `begin` to `end`, and the longest and the usual time of a step."""
    times = sorted(at for at in first_finishes(finished).values() if begin <= at <= end)
    if len(times) < 2:
        return {"steps": len(times), "seconds": end - begin, "steps_per_s": len(times) / (end - begin)}
    gaps = [b - a for a, b in pairwise(times)]
    usual = quartiles(gaps)
    edges = {"longest_gap_s": max(*gaps, times[0] - begin, end - times[-1]), "median_gap_s": usual["median"]}
    return {"steps": len(times), "seconds": end - begin, "steps_per_s": len(times) / (end - begin), **edges}


def disagreements(finished: Iterable[Finished]) -> list[int]:
    """Return the steps that did not have the same loss and gradient norm, to the last bit, wherever they were done."""
    values: dict[int, set] = defaultdict(set)
    for row in finished:
        values[row.step].add((row.loss, row.grad_norm))
    return sorted(step for step, own in values.items() if len(own) > 1)


def repeated(finished: Iterable[Finished]) -> list[tuple[str, int]]:
    """Return (island, step) of each step that an island has finished more than once."""
    seen: set[tuple[str, int]] = set()
    again = []
    for row in finished:
        if (row.island, row.step) in seen:
            again.append((row.island, row.step))
        seen.add((row.island, row.step))
    return again


def next_step_after(finished: Iterable[Finished], islands: Sequence[str], moment: float) -> float | None:
    """Return the seconds from a moment to the next finished step of some islands. Return None if there is none."""
    return min((row.at - moment for row in finished if row.island in islands and row.at > moment), default=None)


def growth(samples: Sequence[tuple[float, float]], settled_s: float) -> dict[str, float] | None:
    """Return the first and the last value of (time, value), and the slope per hour of the line through them.

    Args:
        settled_s: values earlier than this are left out.
    """
    kept = [(at - samples[0][0], value) for at, value in samples if at - samples[0][0] >= settled_s]
    if len(kept) < 3:
        return None
    n, of_t, of_v = len(kept), sum(t for t, _ in kept), sum(v for _, v in kept)
    spread = sum((t - of_t / n) ** 2 for t, _ in kept)
    slope = sum((t - of_t / n) * (v - of_v / n) for t, v in kept) / spread
    return {"first": kept[0][1], "last": kept[-1][1], "per_hour": slope * 3600}


def rounded(value: Any, digits: int = 4) -> Any:
    """Round all floats in a nested value to significant digits, as a JSON file needs no more."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: rounded(x, digits) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(x, digits) for x in value]
    return value
