"""Pipeline schedules as tables: for every pp rank, the order of its actions. This package does not use torch.

The table determines the placement of stages on ranks, the messages, the live activations and the bubble.
"""

from ndtrain.schedule.build import NAMES, build, default_chunks, forwards, stage_ranks
from ndtrain.schedule.check import check
from ndtrain.schedule.simulate import COST, Span, Timeline, most_alive, simulate
from ndtrain.schedule.table import (
    Action,
    IllegalSchedule,
    Message,
    Schedule,
    ScheduleError,
    Table,
    links,
    sends,
)

__all__ = [
    "COST",
    "NAMES",
    "Action",
    "IllegalSchedule",
    "Message",
    "Schedule",
    "ScheduleError",
    "Span",
    "Table",
    "Timeline",
    "build",
    "check",
    "default_chunks",
    "forwards",
    "links",
    "most_alive",
    "sends",
    "simulate",
    "stage_ranks",
]
