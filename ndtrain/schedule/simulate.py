"""Predicts the time, bubble and live activations of a schedule from the cost of its actions."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from ndtrain.schedule.check import in_order
from ndtrain.schedule.table import Action, Schedule

Cost = Mapping[str, float] | Callable[[Action], float]
COST: Mapping[str, float] = {"F": 1, "B": 2, "I": 1, "W": 1}  # a backward has two matmuls per matmul of the forward


class Span(NamedTuple):
    """The start and the end of an action, in the unit of its cost."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The spans of all actions of a schedule, predicted or measured.

    Attributes:
        spans: per pp rank, in order.
    """

    schedule: Schedule
    spans: list[list[Span]]

    @cached_property
    def makespan(self) -> float:
        """Time from the first start to the last end."""
        spans = [s for row in self.spans for s in row]
        return max(s.end for s in spans) - min(s.start for s in spans)

    @cached_property
    def busy(self) -> list[float]:
        """Compute time of each rank."""
        return [sum(s.end - s.start for s in row) for row in self.spans]

    @property
    def bubble(self) -> float:
        """The idle share of the ranks' time: 1 - busy / (pp * makespan)."""
        return 1 - sum(self.busy) / (len(self.spans) * self.makespan)

    @cached_property
    def peak(self) -> list[int]:
        """The peak of live activations on each rank, in units of one microbatch on one stage. An activation lives from
        the start of its F to the end of its B or W."""
        return [most_alive(row, "F", "BW") for row in self.schedule.table]

    @cached_property
    def peak_input(self) -> list[int]:
        """Like `peak`, for the activations that only the input gradient needs (in attention and norms).

        Such an activation lives until the end of its B or I.
        """
        return [most_alive(row, "F", "BI") for row in self.schedule.table]

    @property
    def peak_shares(self) -> list[float]:
        """`peak` in units of one microbatch on all stages of a rank, to compare schedules with different chunks."""
        return [count / len(self.schedule.stages_of(rank)) for rank, count in enumerate(self.peak)]


def simulate(schedule: Schedule, cost: Cost = COST, latency: float = 0.0) -> Timeline:
    """Simulate a schedule. An action starts when its rank is free and the results it depends on have arrived.

    Args:
        cost: time of an action, either per kind or as a function of the action.
        latency: time of a message between two ranks, in the same unit. Messages do not delay each other.
    """
    price = cost if callable(cost) else lambda action: cost[action.kind]
    end: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in range(schedule.pp)]
    for rank, action, needed in in_order(schedule.table):
        arrivals = (end[n] + latency * (schedule.rank_of[n.stage] != rank) for n in needed)
        start = max([spans[rank][-1].end if spans[rank] else 0.0, *arrivals])
        end[action] = start + price(action)
        spans[rank].append(Span(action, start, end[action]))
    return Timeline(schedule, spans)


def most_alive(row: Iterable[Action], first: str, last: str) -> int:
    """Return the largest number of microbatches between an action of the kind `first` and one of the kinds `last`."""
    return max(accumulate((a.kind == first) - (a.kind in last) for a in row))
