"""Records of the protocol: settings, the memory on disk, orders to the ranks, and effects for the leader."""

from dataclasses import dataclass
from typing import NamedTuple

from ndtrain.islands.epoch import Epoch, Member, Span
from ndtrain.islands.messages import LOWEST, Ballot, Message


@dataclass(frozen=True)
class Rules:
    """The settings of a run.

    Attributes:
        batch: rows of a global batch.
        last: the last step.
        count: the expected number of islands.
        wait_s: seconds after which fewer may begin.
        beat_s: seconds between two signs of life.
        timeout_s: seconds without a sign of life after which an island counts as lost.
        ahead: steps from a planned change's proposal to its effect, so that nobody has to wait for it.
        learners_share: True if new members have a share of the first step of their epoch, and a lost member's rows are
            left out. Otherwise all rows of a step are computed.
        grace_s: seconds that the others' gradients are offered before a slower island should offer its own.
    """

    batch: int
    last: int
    count: int
    wait_s: float = 60.0
    beat_s: float = 0.5
    timeout_s: float = 10.0
    ahead: int = 2
    learners_share: bool = False
    grace_s: float = float("inf")


@dataclass(frozen=True)
class Saved:
    """The memory of an island for its next process. It is on disk before a message that depends on it is sent."""

    epoch: Epoch | None = None
    promised: Ballot = LOWEST
    accepted_ballot: Ballot = LOWEST
    accepted: Epoch | None = None


# --------------------------------------------------------------------------------------------------------------- orders


class Work(NamedTuple):
    """Compute rows of a step, offer their gradient, and read the gradients of the other sharers.

    Attributes:
        rows: the rows of this island. They may include rows that it has already computed in an earlier epoch.
        sharers: the members with a share of the step, in the order in which their gradients are added.
        teaches: True if new members read the state before this step. It must not change until they have.
    """

    step: int
    epoch: int
    rows: tuple[Span, ...]
    sharers: tuple[Member, ...]
    teaches: bool = False


class CatchUp(NamedTuple):
    """Read the summed gradient of a step that others have finished, and update the weights with it."""

    step: int
    epoch: int
    sources: tuple[Member, ...]


class Heal(NamedTuple):
    """Read weights and optimizer state after a step from others."""

    step: int
    epoch: int
    sources: tuple[Member, ...]


class Stop(NamedTuple):
    """Do nothing more. `reason` is empty at the planned end."""

    reason: str


Order = Work | CatchUp | Heal | Stop


# -------------------------------------------------------------------------------------------------------------- effects


class Send(NamedTuple):
    """Send a message to the leader at an address. It may be lost."""

    address: str
    message: Message


class Save(NamedTuple):
    """Write to disk."""

    saved: Saved


class Cancel(NamedTuple):
    """Make the ranks give up reading some gradients. Others, which may have been cancelled before, are read again.

    Attributes:
        epoch: gradients of this epoch and of earlier ones are given up.
        step: gradients of the epoch after it are given up from this step on; None: none of them.
    """

    epoch: int
    step: int | None = None

    def covers(self, epoch: int, step: int) -> bool:
        """Return True if gradients of this step and epoch are given up."""
        return epoch <= self.epoch or (self.step is not None and epoch == self.epoch + 1 and step >= self.step)


class Tell(NamedTuple):
    """Print a line for the user."""

    text: str


Effect = Send | Save | Cancel | Tell
