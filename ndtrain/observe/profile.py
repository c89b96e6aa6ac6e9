"""Breaks down the time of a step by kind of work.

On CPU every instant is attributed to the innermost operator of the step's thread. An operator that computes (a matmul)
also gets the time of the operators that it calls. Time outside of operators is Python's. On a GPU every instant is
attributed to the running kernel. A collective gets only the time while no other kernel runs: its exposed time. While no
kernel runs, the GPU waits for the host. On either device the times add up to the step time.
"""

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from ndtrain.mesh.flight_recorder import RECORDER, CollectiveRecord
from ndtrain.observe.kernel_kinds import COMPUTE, HOST, kind_of

TOP = 12  # number of operators shown below the kinds
STEP = r"step( \d+)?"  # name of a step's annotation
NO_KERNEL = "no kernel"  # on a GPU: waiting for the host


class TimeSpent(NamedTuple):
    """Time and calls of a kind or an operator, per step."""

    ms: float
    calls: float


@dataclass(frozen=True)
class Table:
    """The time of a step by kind and by operator, as the mean of `steps` steps.

    Attributes:
        device: cpu | cuda.
        step_ms: time of a profiled step.
        plain_ms: time of an unprofiled step in between; None if not measured.
        kinds: kind -> time, the longest first; the times add up to `step_ms`.
        operators: name -> (kind, time), the longest first; the times add up to `step_ms`.
        communication_ms: time in which a message was in flight, from its launch to the end of the wait for it,
            overlapped or not.
    """

    device: str
    steps: int
    step_ms: float
    plain_ms: float | None
    kinds: dict[str, TimeSpent]
    operators: dict[str, tuple[str, TimeSpent]]
    communication_ms: float

    def share(self, *kinds: str) -> float:
        """Return the share of these kinds in the profiled step, 0 to 1."""
        return sum(self.kinds[kind].ms for kind in kinds if kind in self.kinds) / self.step_ms

    @property
    def kernel_share(self) -> float:
        """The share of computing operators in the profiled step. Copies are not included."""
        return self.share(*COMPUTE)

    def lines(self) -> list[str]:
        """Format the table as text: the kinds, the cost of the profiler, and the slowest operators."""
        lines = [f"{'':18}{'ms/step':>10} {'share':>7} {'calls':>9}"]
        lines += [self._row(kind, spent) for kind, spent in self.kinds.items()]
        lines.append(self._row("step, profiled", TimeSpent(self.step_ms, 1)))
        if self.plain_ms is not None:
            cost = self.step_ms - self.plain_ms
            lines.append(self._row("step, unprofiled", TimeSpent(self.plain_ms, 1)))
            of_it = f"about {cost:.1f} ms, {cost / self.step_ms:.1%}" if cost > 0 else "less than steps differ by"
            lines.append(f"of the profiled step the profiler itself: {of_it}")
        host = " + ".join(kind for kind in HOST if kind in self.kinds)
        lines.append(f"{' + '.join(COMPUTE)}: {self.kernel_share:.1%}; host ({host}): {self.share(*HOST):.1%}")
        exposed = self.share("communication") * self.step_ms
        if self.communication_ms or exposed:
            lines.append(f"communication: {self.communication_ms:.2f} ms under way, {exposed:.2f} ms exposed")
        top = list(self.operators.items())[:TOP]
        return [*lines, *(f"{self._row(kind, spent)}  {name}" for name, (kind, spent) in top)]

    def _row(self, name: str, spent: TimeSpent) -> str:
        return f"{name:18}{spent.ms:10.2f} {spent.ms / self.step_ms:7.1%} {spent.calls:9.1f}"

    def as_dict(self) -> dict[str, Any]:
        """Return the table as a dict for JSON."""
        kinds = {kind: spent._asdict() for kind, spent in self.kinds.items()}
        operators = {name: {"kind": kind, **spent._asdict()} for name, (kind, spent) in self.operators.items()}
        return asdict(self) | {"kinds": kinds, "operators": operators, "kernel_share": self.kernel_share}


# ----------------------------------------------------------------------------------------------------------- recording


def record(step: Callable[[], None], steps: int, device: torch.device) -> Table:
    """Profile `steps` steps, after a warm-up step. Each profiled step follows an unprofiled one.

    Each profiled step is a separate recording. In one long recording the accumulating events would fragment the freed
    memory, and every step would cause page faults.
    """
    step()
    plain, tally = 0.0, Tally(device)
    for _ in range(steps):
        plain += _seconds(step, device)
        with recording(device) as recorded, marked("step", device):
            step()
        tally.add(recorded.events())
    return tally.table(1e3 * plain / steps)


def name_fused_kernels() -> None:
    """Make recordings show each kernel of code that is compiled for a CPU from now on.

    Otherwise a kernel's time is attributed to the generated code that calls it.
    """
    from torch._inductor import config  # takes half a second to import

    config.cpp.enable_kernel_profile = True


def _seconds(step: Callable[[], None], device: torch.device) -> float:
    settle(device)
    began = time.perf_counter()
    step()
    settle(device)
    return time.perf_counter() - began


def settle(device: torch.device) -> None:
    """Wait for all work queued on a GPU. Do nothing on CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def recording(device: torch.device, **options: bool) -> Iterator[profile]:
    """Yield PyTorch's profiler, with the waits for collectives as annotations.

    The profiler's events are available after the block.

    Args:
        options: passed to `torch.profiler.profile`.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler prints to stderr
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    settle(device)
    with profile(activities=activities, **options) as profiler:
        RECORDER.mark = _wait
        try:
            yield profiler
        finally:
            RECORDER.mark = None
            settle(device)


def _wait(record: CollectiveRecord) -> AbstractContextManager:
    """Return the annotation of a wait for a collective, or for something else. The latter omits the step number."""
    if record.channel:
        return record_function(f"wait for {record.op} over {record.channel}")
    return record_function("waiting for " + re.sub(r" \d+", "", record.op))


@contextmanager
def marked(name: str, device: torch.device) -> Iterator[None]:
    """Annotate the block as a step (`step` or `step <number>`), including its work on a GPU."""
    with record_function(name):
        yield
        settle(device)


# ------------------------------------------------------------------------------------------------------------ counting


class _Slice(NamedTuple):
    """A time slice of an event, in microseconds of the profiler's clock."""

    name: str
    start: float
    end: float


class Tally:
    """Sums the times of the annotated steps of recordings."""

    def __init__(self, device: torch.device):
        self._device = device.type
        self._steps, self._us, self._in_flight_us = 0, 0.0, 0.0
        self._took: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()

    def add(self, events: Sequence[FunctionEvent]) -> None:
        """Add the events of one recording."""
        steps = [e for e in events if e.is_user_annotation and _on_cpu(e) and re.fullmatch(STEP, e.name)]
        self._steps += len(steps)
        self._us += sum(e.time_range.elapsed_us() for e in steps)
        for step in steps:
            within = [e for e in events if _overlap(e, step) > 0]
            spent = _of_gpu(within, step) if self._device == "cuda" else _of_cpu(within, step)
            for name, us in spent:
                self._took[name] += us
                self._calls[name] += 1
            self._in_flight_us += _union_us([_slice(e, step) for e in within if self._is_communication(e)])

    def _is_communication(self, e: FunctionEvent) -> bool:
        """Return True for a message: on CPU an event from its launch to the end of the wait, on a GPU its kernel."""
        if self._device == "cpu":
            return e.is_async and e.name.startswith("gloo:")
        return _is_kernel(e) and kind_of(e.name, "cuda") == "communication"

    def table(self, plain_ms: float | None = None) -> Table:
        """Return the mean over all steps added so far.

        Args:
            plain_ms: time of an unprofiled step; None if not measured.
        """
        each = lambda us, calls: TimeSpent(us / 1e3 / self._steps, calls / self._steps)
        kinds: dict[str, TimeSpent] = {}
        operators: dict[str, tuple[str, TimeSpent]] = {}
        for name, us in self._took.most_common():
            kind = kind_of(name, self._device)
            spent = each(us, self._calls[name])
            operators[name] = kind, spent
            before = kinds.get(kind, TimeSpent(0, 0))
            kinds[kind] = TimeSpent(before.ms + spent.ms, before.calls + spent.calls)
        kinds = dict(sorted(kinds.items(), key=lambda item: -item[1].ms))
        step_ms, in_flight_ms = (us / 1e3 / self._steps for us in (self._us, self._in_flight_us))
        return Table(self._device, self._steps, step_ms, plain_ms, kinds, operators, in_flight_ms)


def _on_cpu(e: FunctionEvent) -> bool:
    return e.device_type == DeviceType.CPU


def _is_kernel(e: FunctionEvent) -> bool:
    return not _on_cpu(e) and not e.is_user_annotation


def _overlap(e: FunctionEvent, step: FunctionEvent) -> float:
    """Return the microseconds of the event within the step. They are negative if the event is outside the step."""
    a, b = e.time_range, step.time_range
    return min(a.end, b.end) - max(a.start, b.start)


def _slice(e: FunctionEvent, step: FunctionEvent) -> _Slice:
    """Return the part of the event within the step."""
    a, b = e.time_range, step.time_range
    return _Slice(e.name, max(a.start, b.start), min(a.end, b.end))


def _of_cpu(events: Sequence[FunctionEvent], step: FunctionEvent) -> Iterator[tuple[str, float]]:
    """Yield (operator, microseconds) for the operators of the step's thread. The times add up to the step time.

    The time of an operator that computes includes the operators it calls. For all other operators it does not.
    """
    of_thread = [e for e in events if _on_cpu(e) and e.thread == step.thread and not e.is_async]
    parent = {id(e): e.cpu_parent for e in of_thread}
    computes = {id(e): kind_of(e.name, "cpu") in COMPUTE for e in of_thread}
    for e in of_thread:
        above = e.cpu_parent
        while above is not None and not computes.get(id(above)):
            above = parent.get(id(above))
        if above is None:
            yield "step" if e is step else e.name, e.cpu_time_total if computes[id(e)] else e.self_cpu_time_total


def _of_gpu(events: Sequence[FunctionEvent], step: FunctionEvent) -> Iterator[tuple[str, float]]:
    """Yield (kernel, microseconds). The times add up to the step time.

    Every instant is attributed to the running kernel that began first. A collective gets it only if no other kernel
    runs. While no kernel runs, the time is attributed to `NO_KERNEL`.
    """
    slices = [_slice(e, step) for e in events if _is_kernel(e)]
    attributed = [0.0] * len(slices)
    ends = [(s.start, i) for i, s in enumerate(slices)] + [(s.end, i) for i, s in enumerate(slices)]
    rank = lambda i: (kind_of(slices[i].name, "cuda") == "communication", slices[i].start)
    running: set[int] = set()
    before = step.time_range.start
    for at, i in sorted(ends):
        if running:
            attributed[min(running, key=rank)] += at - before
        running ^= {i}
        before = at
    yield from ((s.name, us) for s, us in zip(slices, attributed, strict=True))
    yield NO_KERNEL, step.time_range.elapsed_us() - sum(attributed)


def _union_us(slices: Sequence[_Slice]) -> float:
    """Return the microseconds in which at least one of the slices runs."""
    total, end = 0.0, float("-inf")
    for s in sorted(slices, key=lambda s: s.start):
        total += max(0.0, s.end - max(s.start, end))
        end = max(end, s.end)
    return total
