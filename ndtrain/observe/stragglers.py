"""Detects stragglers: ranks that are busy longer in a step than the ranks with the same work."""

from collections.abc import Sequence

import numpy as np

from ndtrain.mesh.mesh import MeshSpec

WINDOW = 20  # number of steps of each median, and from one comparison to the next
FACTOR = 1.5  # a rank becomes slow above this ratio to its peers
RECOVERED = 1.2  # a slow rank recovers below this ratio
LEAST_S = 0.01  # smallest difference in seconds; below it, scheduler noise dominates


class Stragglers:
    """Compares the busy time of the ranks: the seconds of a step in which a rank does not wait for others. On a GPU
    this is the host's time. A slow device therefore does not show here; it only makes the other ranks wait.

    A rank is compared with the ranks of the same pp coord, which have the same layers.
    """

    def __init__(self, spec: MeshSpec):
        self.spec = spec
        self._groups = [np.array(ranks) for ranks in spec.groups(*(a for a in spec.order if a != "pp"))]
        self._slow = np.zeros(spec.world_size, dtype=bool)

    def compare(self, busy_s: Sequence[float]) -> list[str]:
        """Compare the ranks. Return a line for each rank that has become slow or has recovered.

        Args:
            busy_s: the median of the last `WINDOW` steps of each rank, in seconds.
        """
        usual = np.array(busy_s)
        others = np.empty_like(usual)
        for ranks in self._groups:
            others[ranks] = _medians_of_others(usual[ranks])
        slow = (usual > np.where(self._slow, RECOVERED, FACTOR) * others) & (usual - others > LEAST_S)
        changed = np.flatnonzero(slow != self._slow)
        self._slow = slow
        return [self._line(r, slow[r], usual[r], others[r]) for r in changed.tolist()]

    def _line(self, rank: int, slow: bool, seconds: float, others: float) -> str:
        state = "is slow" if slow else "is no longer slow"
        times = f"busy {seconds:.3g} s per step, its peers {others:.3g} s"
        return f"rank {rank} ({self.spec.where(rank)}) {state}: {times} (median of {WINDOW} steps)"


def _medians_of_others(values: np.ndarray) -> np.ndarray:
    """Return for each value the median of the others, or the value itself if it is the only one."""
    count = len(values) - 1
    if not count:
        return values
    order = np.argsort(values)
    places, ordered = np.argsort(order), values[order]
    without = lambda place: ordered[place + (place >= places)]  # the ordered values without each one in turn
    return (without((count - 1) // 2) + without(count // 2)) / 2
