"""The table of a schedule: the order of actions on every pipeline rank, and the messages that follow from it."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple


class Action(NamedTuple):
    """One pass of one microbatch through one stage.

    Kinds: F forward, B full backward, or its two halves: I (input gradient) and W (weight gradient).
    """

    kind: str
    microbatch: int
    stage: int


class Message(NamedTuple):
    """A message between two ranks. Kinds: F an activation, B a gradient. `stage` is the stage that receives it."""

    kind: str
    microbatch: int
    stage: int

    @property
    def source(self) -> int:
        """The stage that sends the message."""
        return self.stage - 1 if self.kind == "F" else self.stage + 1


Table = list[list[Action]]  # per pp rank, in order


class ScheduleError(ValueError):
    """A schedule that cannot be built or read. The message is one line."""


class IllegalSchedule(ScheduleError):
    """A table that cannot run. The message names the first offending action.

    Attributes:
        rank, index: its place, `table[rank][index]`; None if the action is missing.
    """

    def __init__(self, text: str, rank: int | None = None, index: int | None = None):
        super().__init__(text)
        self.rank, self.index = rank, index


@dataclass(frozen=True, eq=False)
class Schedule:
    """A checked table. Schedules compare by identity.

    Attributes:
        rank_of: stage -> pp rank.
    """

    name: str
    table: Table
    microbatches: int
    rank_of: tuple[int, ...]

    @property
    def pp(self) -> int:
        return len(self.table)

    @property
    def stages(self) -> int:
        return len(self.rank_of)

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a rank, in ascending order."""
        return [stage for stage, r in enumerate(self.rank_of) if r == rank]

    @cached_property
    def splits_backward(self) -> bool:
        """True if any backward is split into input gradient and weight gradient."""
        return any(a.kind in "IW" for row in self.table for a in row)

    @cached_property
    def messages(self) -> dict[tuple[int, int], list[Message]]:
        """(source, target) -> the messages from one pp rank to another, in order. The keys are the pairs in `links`.

        An F sends an activation, a B or I a gradient. Data that stays on its rank needs no message.
        """
        pairs: dict[tuple[int, int], list[Message]] = {pair: [] for pair in links(self)}
        for source, row in enumerate(self.table):
            for message in map(sends, row):
                if message and 0 <= message.stage < self.stages and self.rank_of[message.stage] != source:
                    pairs[source, self.rank_of[message.stage]].append(message)
        return pairs


def links(schedule: Schedule) -> list[tuple[int, int]]:
    """Return the pairs (source, target) of pp ranks that exchange messages, in ascending order."""
    forward = {(a, b) for a, b in pairwise(schedule.rank_of) if a != b}
    trains = any(a.kind in "BI" for row in schedule.table for a in row)
    return sorted(forward | {(b, a) for a, b in forward if trains})


def sends(a: Action) -> Message | None:
    """Return the message that carries an action's result: to the next stage (F) or to the previous stage (B, I).

    Return None for W. The stage may not exist: then the caller has to ignore the message.
    """
    if a.kind == "W":
        return None
    return Message("F", a.microbatch, a.stage + 1) if a.kind == "F" else Message("B", a.microbatch, a.stage - 1)


def show(a: Action) -> str:
    """Format an action for error messages."""
    return f"{a.kind}(microbatch {a.microbatch}, stage {a.stage})"
