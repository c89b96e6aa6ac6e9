"""The number of sequences of each step: the same in all steps, or raised in stages by `train.batch_ramp`."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchSizes:
    """The number of sequences in the global batch of each step. Steps are counted from 0.

    Attributes:
        last: the sequences per step after the ramp.
        ramp: the stages of the ramp: (sequences per step, number of steps).
    """

    last: int
    ramp: tuple[tuple[int, int], ...] = ()

    @property
    def all(self) -> tuple[int, ...]:
        """Each size once, in ascending order."""
        return tuple(sorted({self.last, *(sequences for sequences, _ in self.ramp)}))

    @property
    def ramp_steps(self) -> int:
        """The number of steps of the ramp."""
        return sum(steps for _, steps in self.ramp)

    def at(self, step: int) -> int:
        """Return the number of sequences of a step."""
        for sequences, steps in self.ramp:
            if step < steps:
                return sequences
            step -= steps
        return self.last

    def before(self, step: int) -> int:
        """Return the number of sequences of all steps before `step`."""
        total = 0
        for sequences, steps in self.ramp:
            total += sequences * min(step, steps)
            step = max(0, step - steps)
        return total + self.last * step

    def steps_for(self, sequences: float) -> int:
        """Return the least number of steps, at least 1, that have this many sequences in all."""
        done = 0
        for size, steps in (*self.ramp, (self.last, math.inf)):
            wanted = math.ceil(sequences / size * (1 - 1e-12))
            if wanted <= steps:
                return max(1, done + wanted)
            sequences, done = sequences - size * steps, done + int(steps)
        raise AssertionError("the last stage has no end")
