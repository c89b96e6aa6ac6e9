"""The timeline of one step on all ranks, compared with the schedule's simulator for the same durations."""

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, count
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch.distributed as dist

from ndtrain.engine.executor import ActionTiming
from ndtrain.engine.train_step import TrainingStep
from ndtrain.mesh.json_messages import gather_json
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.schedule import Schedule, Span, Timeline, simulate
from ndtrain.schedule.draw import panel, timeline_svg
from ndtrain.schedule.table import Action, sends, show

ROWS = ("actions", "waiting")  # rows of each rank in the Chrome trace


@dataclass(frozen=True)
class Trace:
    """The recorded timeline of a step.

    Attributes:
        spans: global rank -> its actions in order, in seconds since the barrier before the step.
        folder: the folder in the run folder that it is written to.
    """

    step: int
    mesh: MeshSpec
    schedule: Schedule
    spans: list[list[Span]]
    folder: str = "trace"

    def __str__(self) -> str:
        return f"trace of step {self.step}"

    @cached_property
    def measured(self) -> Timeline:
        """The timeline of rank 0's pipeline: the ranks that differ from rank 0 only along pp."""
        return Timeline(self.schedule, [self.spans[rank] for rank in self._lines[0]])

    @cached_property
    def predicted(self) -> Timeline:
        """The simulated timeline of the same ranks.

        Each action takes the mean time of its kind on its stage, and messages take no time.
        """
        took: dict[tuple[str, int], list[float]] = defaultdict(list)
        for action, start, end in chain(*self.measured.spans):
            took[action.kind, action.stage].append(end - start)
        mean = {of: fmean(times) for of, times in took.items()}
        return simulate(self.schedule, lambda action: mean[action.kind, action.stage])

    def summary(self) -> str:
        """Return one line. A makespan lasts from the first action of the pipeline to the end of the last."""
        measured, predicted = self.measured.makespan, self.predicted.makespan
        return (
            f"traced step {self.step}: makespan measured {1e3 * measured:.3g} ms, predicted {1e3 * predicted:.3g} ms "
            f"({100 * abs(measured / predicted - 1):.1f} % off), bubble {100 * self.measured.bubble:.0f} %"
        )

    def write(self, folder: Path) -> None:
        """Write step-00000003.json, for Perfetto and chrome://tracing, and step-00000003.svg.

        Raises:
            OSError: the files cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"step-{self.step:08d}"
        path.with_suffix(".json").write_text(json.dumps({"traceEvents": list(self._events())}))
        path.with_suffix(".svg").write_text(self._picture())

    @property
    def _lines(self) -> list[list[int]]:
        """The ranks of each pipeline, in the order of their pp coordinates."""
        return self.mesh.groups("pp")

    def _picture(self) -> str:
        both = {f"step {self.step} measured": self.measured, "predicted from its mean times": self.predicted}
        panels = [panel(_in_ms(t), f"{title}: makespan {1e3 * t.makespan:.3g} ms") for title, t in both.items()]
        return timeline_svg(panels, unit="ms")

    def _events(self) -> Iterator[dict[str, Any]]:
        """Yield the events in the Trace Event Format, with one process per rank."""
        for rank, spans in enumerate(self.spans):
            yield _about(rank, 0, "process_name", {"name": self._name(rank)})
            yield _about(rank, 0, "process_sort_index", {"sort_index": rank})
            for row, name in enumerate(ROWS):
                yield _about(rank, row, "thread_name", {"name": name})
            before = 0.0
            for action, start, end in spans:
                yield _slice(rank, 1, f"wait for {show(action)}", "wait", before, start)
                about = {"microbatch": action.microbatch, "stage": action.stage}
                yield _slice(rank, 0, show(action), action.kind, start, end, about)
                before = end
        numbers = count()
        for line in self._lines:
            yield from self._arrows(line, numbers)

    def _arrows(self, line: list[int], numbers: Iterator[int]) -> Iterator[dict[str, Any]]:
        """Yield the two flow events of each message between the ranks of a pipeline."""
        takers = {
            (a.kind == "F", a.microbatch, a.stage): (rank, start)
            for rank in line
            for a, start, _ in self.spans[rank]
            if a.kind != "W"
        }
        for rank in line:
            for action, start, end in self.spans[rank]:
                message = sends(action)
                taker = message and takers.get((message.kind == "F", message.microbatch, message.stage))
                if taker and taker[0] != rank:
                    both = {"name": "message", "cat": message.kind, "id": next(numbers), "tid": 0}
                    sent = min(end, taker[1])  # the message may leave before its action ends
                    yield both | {"ph": "s", "pid": rank, "ts": 1e6 * (start + 0.99 * (sent - start))}
                    yield both | {"ph": "f", "bp": "e", "pid": taker[0], "ts": 1e6 * taker[1]}

    def _name(self, rank: int) -> str:
        at = self.mesh.where(rank)
        return f"rank {rank}: {at}" if at else "rank 0"


class _Log(NamedTuple):
    """The record of one rank: its clock, the time when it left the barrier before the step, and its actions."""

    clock: str
    zero: float
    took: list[ActionTiming]

    @classmethod
    def from_json(cls, value: Any) -> "_Log":
        """Create a log from a rank's message. JSON represents named tuples as lists.

        Raises:
            ValueError: the message is not a log.
        """
        match value:
            case [str(clock), float(zero), list(took)]:
                return cls(clock, zero, [_timing_from_json(timing) for timing in took])
        raise ValueError("a rank sent a message that is not a step log")


def _timing_from_json(value: Any) -> ActionTiming:
    match value:
        case [[str(kind), int(microbatch), int(stage)], float(began), float(ended)]:
            return ActionTiming(Action(kind, microbatch, stage), began, ended)
    raise ValueError("a rank sent a message that is not an action time")


class Tracer:
    """Records one step, from its creation to `finish`. All ranks create one, which starts with a barrier.

    It does not change any result. On a GPU the host waits for each action.
    """

    def __init__(self, train_step: TrainingStep, mesh: Mesh):
        self._train_step, self._mesh = train_step, mesh
        if mesh.world is not None:
            dist.barrier(mesh.world)
        self._log = _Log(_clock(mesh.rank), time.perf_counter(), [])
        train_step.timings = self._log.took

    def finish(self, step: int) -> Trace | None:
        """Return the trace of the step on rank 0, and None on other ranks. Call this on every rank."""
        self._train_step.timings = None
        mesh = self._mesh
        logs = [self._log]
        if mesh.world is not None:
            gathered = gather_json(self._log, mesh.world, mesh.device)
            if gathered is None:
                return None
            logs = [_Log.from_json(log) for log in gathered]
        return Trace(step, mesh.spec, self._train_step.executor.pipeline.schedule, _aligned(logs))


def _clock(rank: int) -> str:
    """Return the name of this rank's clock. Processes under one kernel share a clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return f"rank {rank}"


def _aligned(logs: list[_Log]) -> list[list[Span]]:
    """Return the spans of all ranks with their clocks set to 0 at the barrier.

    Ranks that share a clock also share its zero: the time when the first of them left the barrier. The times of these
    ranks then do not depend on how soon the others woke.
    """
    zeros: dict[str, float] = {}
    for log in logs:
        zeros[log.clock] = min(log.zero, zeros.get(log.clock, log.zero))
    return [
        [Span(a, began - zeros[log.clock], ended - zeros[log.clock]) for a, began, ended in log.took] for log in logs
    ]


def _in_ms(timeline: Timeline) -> Timeline:
    return Timeline(timeline.schedule, [[Span(a, 1e3 * s, 1e3 * e) for a, s, e in row] for row in timeline.spans])


def _about(rank: int, row: int, what: str, values: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": row, "name": what, "args": values}


def _slice(
    rank: int, row: int, name: str, kind: str, start: float, end: float, about: dict[str, int] | None = None
) -> dict[str, Any]:
    """Return a complete event. `start` and `end` are in seconds, the times of the format in microseconds."""
    times = {"ts": 1e6 * start, "dur": 1e6 * (end - start)}
    return {"ph": "X", "pid": rank, "tid": row, "name": name, "cat": kind, "args": about or {}} | times
