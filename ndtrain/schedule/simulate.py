"""Predicts a schedule's time, bubble and live activations from what its actions cost."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from ndtrain.schedule.check import in_order
from ndtrain.schedule.table import Action, Schedule

Cost = Mapping[str, float] | Callable[[Action], float]
COST: Mapping[str, float] = {"F": 1, "B": 2, "I": 1, "W": 1}  # a backward is two matmuls for each one of the forward


class Span(NamedTuple):
    """When an action runs, in the unit of its cost."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When every action of a schedule runs; predicted or measured."""

    schedule: Schedule
    spans: list[list[Span]]  # per pp rank, in order

    @cached_property
    def makespan(self) -> float:
        """From the first start to the last end."""
        spans = [s for row in self.spans for s in row]
        return max(s.end for s in spans) - min(s.start for s in spans)

    @cached_property
    def busy(self) -> list[float]:
        """Time that each rank computes."""
        return [sum(s.end - s.start for s in row) for row in self.spans]

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they wait: 1 - busy / (pp * makespan)."""
        return 1 - sum(self.busy) / (len(self.spans) * self.makespan)

    @cached_property
    def peak(self) -> list[int]:
        """The most activations alive on each rank, in activations of one microbatch on one stage: each lives from the
        start of its F to the end of its B or W."""
        return [_peak(row, "BW") for row in self.schedule.table]

    @cached_property
    def peak_input(self) -> list[int]:
        """Likewise for what the input gradient needs and the weight gradient does not (what attention and norms keep):
        it lives to the end of its B or I."""
        return [_peak(row, "BI") for row in self.schedule.table]

    @property
    def peak_shares(self) -> list[float]:
        """`peak` in activations of one microbatch on all stages of a rank: schedules with other chunks compare."""
        return [count / len(self.schedule.stages_of(rank)) for rank, count in enumerate(self.peak)]


def simulate(schedule: Schedule, cost: Cost = COST, latency: float = 0.0) -> Timeline:
    """Runs a schedule on paper: an action starts when its rank is free and what it needs is there.

    `cost` is the time of an action, by kind or by the action itself; `latency` what a message takes between two ranks,
    in the same unit. Messages do not wait for each other.
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


def _peak(row: list[Action], last: str) -> int:
    """The most activations alive at once, where actions of the kinds `last` end the life of one."""
    return max(accumulate((a.kind == "F") - (a.kind in last) for a in row))
