"""Pipeline schedules as plain tables: for every pp rank, the order of its actions. Nothing here knows a tensor.

Placement of stages on ranks, when gradients leave, what is alive and how long ranks wait all follow from the table.
"""

from ndtrain.schedule.build import NAMES, build, default_chunks, forwards
from ndtrain.schedule.check import check
from ndtrain.schedule.simulate import COST, Span, Timeline, simulate
from ndtrain.schedule.table import Action, IllegalSchedule, Message, Schedule, ScheduleError, Table, messages, sends

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
    "messages",
    "sends",
    "simulate",
]
