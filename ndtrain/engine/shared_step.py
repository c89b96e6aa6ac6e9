"""Interface between the Trainer and the steps that islands compute together.

The Trainer imports only this file, so a run without islands does not load their modules.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor


class StepSum(NamedTuple):
    """The result of a shared step.

    Attributes:
        done: the number of steps that were finished before it. It jumps if the run has read a newer state.
        losses: this rank's share of the loss and of the objective's other sums. None: this run has no gradient for a
            step.
        stopped: why there is no further step. Empty at the planned end. None: there are further steps.
        restart: True if a restart helps, because it reads a checkpoint.
    """

    done: int
    losses: Tensor | None
    stopped: str | None = None
    restart: bool = False


class SharedStep(ABC):
    """Computes steps together with other runs.

    Create one on every rank, and call the same methods in the same order.

    Attributes:
        numbers: numbers of the last step that are logged.
    """

    numbers: dict[str, float]

    @abstractmethod
    def run(self, done: int) -> StepSum:
        """Compute the gradients of a step.

        Args:
            done: the number of finished steps.
        """

    @abstractmethod
    def after_update(self, done: int, signalled: bool) -> int:
        """Return the number of finished steps after an update.

        Args:
            signalled: True if `signal` was not 0 on some rank.
        """

    @abstractmethod
    def signal(self) -> float:
        """Return this rank's number among the signals of a step: not 0 if it has news for all ranks."""

    @abstractmethod
    def wait_for_the_others(self) -> None:
        """Serve this run's gradients until no other run needs them."""

    @abstractmethod
    def close(self) -> None:
        """Close all connections."""
