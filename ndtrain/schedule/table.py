"""What a schedule is: for every pipeline rank the order of its actions, and the messages that follow from it."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Action(NamedTuple):
    """One microbatch on one stage: F forward, B full backward, or its halves I (input gradient) and W (weight
    gradient)."""

    kind: str
    microbatch: int
    stage: int


class Message(NamedTuple):
    """What travels between two ranks: F an activation, B a gradient, for `stage`, the receiving one."""

    kind: str
    microbatch: int
    stage: int


Table = list[list[Action]]  # per pp rank, in order


class ScheduleError(ValueError):
    """A schedule that cannot be made or read; one line says why."""


class IllegalSchedule(ScheduleError):
    """A table that cannot run; names the first offending action, which stands at `table[rank][index]` (both None
    where it is missing)."""

    def __init__(self, text: str, rank: int | None = None, index: int | None = None):
        super().__init__(text)
        self.rank, self.index = rank, index


@dataclass(frozen=True)
class Schedule:
    """A table that `check` has proved, with its name and who holds which stage."""

    name: str
    table: Table
    microbatches: int
    rank_of: tuple[int, ...]  # stage -> pp rank

    @property
    def pp(self) -> int:
        return len(self.table)

    @property
    def stages(self) -> int:
        return len(self.rank_of)

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank holds, ascending."""
        return [stage for stage, holder in enumerate(self.rank_of) if holder == rank]

    @cached_property
    def splits_backward(self) -> bool:
        """Whether any backward is split into input and weight gradient."""
        return any(a.kind in "IW" for row in self.table for a in row)


def messages(schedule: Schedule, source: int, target: int) -> list[Message]:
    """All that pp rank `source` sends to `target`, in order: activations after F, gradients after B or I. What stays
    within a rank is no message."""
    if source == target:
        return []
    sent = [sends(a) for a in schedule.table[source]]
    last = schedule.stages
    return [m for m in sent if m and 0 <= m.stage < last and schedule.rank_of[m.stage] == target]


def sends(a: Action) -> Message | None:
    """What an action's result is for: the message to the next stage (F) or the one before it (B, I), which the last
    and the first stage have not."""
    if a.kind == "W":
        return None
    return Message("F", a.microbatch, a.stage + 1) if a.kind == "F" else Message("B", a.microbatch, a.stage - 1)


def show(a: Action) -> str:
    """An action as error messages name it."""
    return f"{a.kind}(microbatch {a.microbatch}, stage {a.stage})"
