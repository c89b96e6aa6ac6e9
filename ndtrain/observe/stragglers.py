"""Detects stragglers: ranks that are busy longer in a step than the ranks with the same work."""

from collections import deque
from collections.abc import Sequence
from statistics import median

from ndtrain.mesh.mesh import MeshSpec

WINDOW = 20  # number of steps of each median
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
        self._peers = spec.groups(*(a for a in spec.order if a != "pp"))
        self._seen: deque[Sequence[float]] = deque(maxlen=WINDOW)
        self._slow: set[int] = set()

    def update(self, busy_s: Sequence[float]) -> list[str]:
        """Add a step. Return a line for each rank that has become slow or has recovered.

        Args:
            busy_s: seconds, by rank.
        """
        self._seen.append(busy_s)
        if len(self._seen) < WINDOW:
            return []
        usual = [median(step[r] for step in self._seen) for r in range(self.spec.world_size)]
        changes = []
        for peers in self._peers:
            for r in peers:
                others = median([usual[p] for p in peers if p != r] or [usual[r]])
                factor = RECOVERED if r in self._slow else FACTOR
                slow = usual[r] > factor * others and usual[r] - others > LEAST_S
                if slow != (r in self._slow):
                    changes.append(self._line(r, slow, usual[r], others))
                    self._slow ^= {r}
        return changes

    def _line(self, rank: int, slow: bool, seconds: float, others: float) -> str:
        state = "is slow" if slow else "is no longer slow"
        times = f"busy {seconds:.3g} s per step, its peers {others:.3g} s"
        return f"rank {rank} ({self.spec.where(rank)}) {state}: {times} (median of {WINDOW} steps)"
