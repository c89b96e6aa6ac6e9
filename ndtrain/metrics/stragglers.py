"""Which ranks are slow: those that work longer at a step than the ranks with the same work."""

from collections import deque
from collections.abc import Sequence
from statistics import median

from ndtrain.distributed.mesh import MeshSpec

WINDOW = 20  # steps
FACTOR = 1.5  # times the others' seconds make a rank slow
RECOVERED = 1.2  # and so many no longer: between them it stays what it was
LEAST_S = 0.01  # shorter steps than this tell more of the machine's scheduler than of a rank


class Stragglers:
    """Watches how many seconds of each step every rank was busy, not waiting for others. (On a GPU these are the
    host's: a slow device makes the others wait, and does not show here.)

    Compared are the ranks of one pipeline coordinate, which hold the same layers.
    """

    def __init__(self, spec: MeshSpec):
        self.spec = spec
        self._peers = spec.groups(*(a for a in spec.order if a != "pp"))
        self._seen: deque[Sequence[float]] = deque(maxlen=WINDOW)
        self._slow: set[int] = set()

    def update(self, busy_s: Sequence[float]) -> list[str]:
        """Takes in a step (seconds, by rank) and returns what is new: a rank has become slow, or is no longer."""
        self._seen.append(busy_s)
        if len(self._seen) < WINDOW:
            return []
        usual = [median(step[r] for step in self._seen) for r in range(self.spec.world_size)]
        said = []
        for peers in self._peers:
            for r in peers:
                others = median([usual[p] for p in peers if p != r] or [usual[r]])
                factor = RECOVERED if r in self._slow else FACTOR
                slow = usual[r] > factor * others and usual[r] - others > LEAST_S
                if slow != (r in self._slow):
                    said.append(self._words(r, slow, usual[r], others))
                    self._slow ^= {r}
        return said

    def _words(self, rank: int, slow: bool, seconds: float, others: float) -> str:
        state = "is slow" if slow else "is no longer slow"
        times = f"busy {seconds:.3g} s a step, its peers {others:.3g} s"
        return f"rank {rank} ({self.spec.where(rank)}) {state}: {times} (median of {WINDOW} steps)"
