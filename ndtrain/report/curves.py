"""Reduces a curve to a bounded number of points that keep its lowest and highest values visible."""

from typing import NamedTuple

import numpy as np


class Curve(NamedTuple):
    """Points of a curve. Each point covers one step, or a bucket of consecutive steps.

    Attributes:
        x: the first step of each point.
        low, high, mean: of the values at the steps of each point.
    """

    x: np.ndarray
    low: np.ndarray
    high: np.ndarray
    mean: np.ndarray


def reduce_curve(steps: np.ndarray, values: np.ndarray, most: int) -> Curve:
    """Return the curve with at most `most` points.

    Args:
        steps: [N], in order.
        values: [N]; NaN and infinite values are left out.
    """
    finite = np.isfinite(values)
    steps, values = steps[finite], values[finite]
    if len(steps) <= most:
        return Curve(steps, values, values, values)
    starts = np.linspace(0, len(steps), most, endpoint=False).astype(int)
    counts = np.diff(np.append(starts, len(steps)))
    mean = np.add.reduceat(values, starts) / counts
    return Curve(steps[starts], np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts), mean)


def thin(steps: list[int], most: int) -> list[int]:
    """Return at most `most` of these steps, evenly chosen."""
    return steps if len(steps) <= most else [steps[i] for i in np.linspace(0, len(steps) - 1, most).astype(int)]
