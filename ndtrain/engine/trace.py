"""One step's timeline: what every rank did when, beside what the schedule's simulator makes of the same durations."""

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

from ndtrain.engine.executor import ActionTiming, Executor
from ndtrain.mesh.json_messages import gather_json
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.schedule import Schedule, Span, Timeline, simulate
from ndtrain.schedule.draw import panel, timeline_svg
from ndtrain.schedule.table import Action, sends, show

ROWS = ("actions", "waiting")  # of each rank in the Chrome trace


@dataclass(frozen=True)
class Trace:
    """A step as it ran.

    Attributes:
        spans: global rank -> its actions in order, in seconds after all ranks met, just before the step.
        folder: where in the run folder it is written to.
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
        """The ranks that differ from rank 0 along pp alone."""
        return Timeline(self.schedule, [self.spans[rank] for rank in self._lines[0]])

    @cached_property
    def predicted(self) -> Timeline:
        """The same ranks if each action took as long as its kind on its stage did on average, and messages no time."""
        took: dict[tuple[str, int], list[float]] = defaultdict(list)
        for action, start, end in chain(*self.measured.spans):
            took[action.kind, action.stage].append(end - start)
        mean = {of: fmean(times) for of, times in took.items()}
        return simulate(self.schedule, lambda action: mean[action.kind, action.stage])

    def summary(self) -> str:
        """One line. A makespan lasts from the line's first action to the end of its last."""
        measured, predicted = self.measured.makespan, self.predicted.makespan
        return (
            f"traced step {self.step}: makespan measured {1e3 * measured:.3g} ms, predicted {1e3 * predicted:.3g} ms "
            f"({100 * abs(measured / predicted - 1):.1f} % off), bubble {100 * self.measured.bubble:.0f} %"
        )

    def write(self, folder: Path) -> None:
        """step-00000003.json, which Perfetto and chrome://tracing open, and step-00000003.svg.

        Raises:
            OSError: they cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"step-{self.step:08d}"
        path.with_suffix(".json").write_text(json.dumps({"traceEvents": list(self._events())}))
        path.with_suffix(".svg").write_text(self._picture())

    @property
    def _lines(self) -> list[list[int]]:
        """The ranks of each pipeline, by pp coord."""
        return self.mesh.groups("pp")

    def _picture(self) -> str:
        both = {f"step {self.step} measured": self.measured, "predicted from its mean times": self.predicted}
        panels = [panel(_in_ms(t), f"{title}: makespan {1e3 * t.makespan:.3g} ms") for title, t in both.items()]
        return timeline_svg(panels, unit="ms")

    def _events(self) -> Iterator[dict[str, Any]]:
        """In the Trace Event Format: a process for each rank."""
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
        """A flow event for each message between the ranks of a pipeline."""
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
                    sent = min(end, taker[1])  # it may leave before its action ends
                    yield both | {"ph": "s", "pid": rank, "ts": 1e6 * (start + 0.99 * (sent - start))}
                    yield both | {"ph": "f", "bp": "e", "pid": taker[0], "ts": 1e6 * taker[1]}

    def _name(self, rank: int) -> str:
        at = self.mesh.where(rank)
        return f"rank {rank}: {at}" if at else "rank 0"


class _Log(NamedTuple):
    """What one rank saw: by which clock, when it left the barrier before the step, and its actions."""

    clock: str
    zero: float
    took: list[ActionTiming]

    @classmethod
    def from_json(cls, value: Any) -> "_Log":
        """What a rank has sent; JSON holds named tuples as lists.

        Raises:
            ValueError: it is something else.
        """
        match value:
            case [str(clock), float(zero), list(took)]:
                return cls(clock, zero, [_timing_from_json(timing) for timing in took])
        raise ValueError("what a rank has sent is no log of a step")


def _timing_from_json(value: Any) -> ActionTiming:
    match value:
        case [[str(kind), int(microbatch), int(stage)], float(began), float(ended)]:
            return ActionTiming(Action(kind, microbatch, stage), began, ended)
    raise ValueError("what a rank has sent is no time of an action")


class Tracer:
    """Records one step from now until `finish`, on all ranks at once: they meet first. Nothing that is computed depends
    on it; on a GPU the host waits for each action."""

    def __init__(self, executor: Executor, mesh: Mesh):
        self._executor, self._mesh = executor, mesh
        if mesh.world is not None:
            dist.barrier(mesh.world)
        self._log = _Log(_clock(mesh.rank), time.perf_counter(), [])
        executor.timings = self._log.took

    def finish(self, step: int) -> Trace | None:
        """On rank 0 the trace of the step, else None. Every rank calls this."""
        self._executor.timings = None
        mesh = self._mesh
        logs = [self._log]
        if mesh.world is not None:
            gathered = gather_json(self._log, mesh.world, mesh.device)
            if gathered is None:
                return None
            logs = [_Log.from_json(log) for log in gathered]
        return Trace(step, mesh.spec, self._executor.pipeline.schedule, _aligned(logs))


def _clock(rank: int) -> str:
    """Names the clock: processes under one kernel share it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return f"rank {rank}"


def _aligned(logs: list[_Log]) -> list[list[Span]]:
    """Clocks set to 0 at the barrier: each at the first that left it among the ranks that share the clock, so that
    between these nothing depends on how soon the others woke."""
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
    """`start` and `end` are seconds, the format's times microseconds."""
    times = {"ts": 1e6 * start, "dur": 1e6 * (end - start)}
    return {"ph": "X", "pid": rank, "tid": row, "name": name, "cat": kind, "args": about or {}} | times
