"""Where a step's time goes, by kind of work.

On CPU an instant belongs to the innermost operator that the step's thread is in, or, where one that computes calls
others, to that one; what no operator accounts for is Python. On a GPU it belongs to the kernel that runs, to a
collective's only while no other does, which is what of it is exposed; while none runs, the GPU waits for the host.
Either way the kinds add up to the step.
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

from ndtrain.distributed.flight_recorder import RECORDER, CollectiveRecord
from ndtrain.profiling.kinds import COMPUTE, HOST, kind_of

TOP = 12  # operators shown below the kinds
STEP = r"step( \d+)?"  # how steps are marked
NO_KERNEL = "no kernel"  # on a GPU: waiting for the host


class Spent(NamedTuple):
    """What a kind or an operator took of a step."""

    ms: float
    calls: float


@dataclass(frozen=True)
class Table:
    """Where the time of a step went, as the mean of `steps` steps.

    Attributes:
        device: cpu | cuda.
        step_ms: a step with the profiler on.
        plain_ms: a step between these without it; None where there was none.
        kinds: in falling order; their times add up to `step_ms`.
        operators: name -> (its kind, what it took), in falling order; likewise.
        communication_ms: how long messages were under way, until waited for, whatever else ran meanwhile.
    """

    device: str
    steps: int
    step_ms: float
    plain_ms: float | None
    kinds: dict[str, Spent]
    operators: dict[str, tuple[str, Spent]]
    communication_ms: float

    def share(self, *kinds: str) -> float:
        """Of the profiled step, 0 to 1."""
        return sum(self.kinds[kind].ms for kind in kinds if kind in self.kinds) / self.step_ms

    @property
    def kernel_share(self) -> float:
        """Of the profiled step: in what computes, and so not in copies."""
        return self.share(*COMPUTE)

    def lines(self) -> list[str]:
        """The kinds, what the profiler itself costs, and the operators that took most."""
        found = [f"{'':18}{'ms/step':>10} {'share':>7} {'calls':>9}"]
        found += [self._row(kind, spent) for kind, spent in self.kinds.items()]
        found.append(self._row("step, profiled", Spent(self.step_ms, 1)))
        if self.plain_ms is not None:
            cost = self.step_ms - self.plain_ms
            found.append(self._row("step, unprofiled", Spent(self.plain_ms, 1)))
            of_it = f"about {cost:.1f} ms, {cost / self.step_ms:.1%}" if cost > 0 else "less than steps differ by"
            found.append(f"of the profiled step the profiler itself: {of_it}")
        host = " + ".join(kind for kind in HOST if kind in self.kinds)
        found.append(f"{' + '.join(COMPUTE)}: {self.kernel_share:.1%}; host ({host}): {self.share(*HOST):.1%}")
        exposed = self.share("communication") * self.step_ms
        if self.communication_ms or exposed:
            found.append(f"communication: {self.communication_ms:.2f} ms under way, {exposed:.2f} ms exposed")
        top = list(self.operators.items())[:TOP]
        return [*found, *(f"{self._row(kind, spent)}  {name}" for name, (kind, spent) in top)]

    def _row(self, name: str, spent: Spent) -> str:
        return f"{name:18}{spent.ms:10.2f} {spent.ms / self.step_ms:7.1%} {spent.calls:9.1f}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        kinds = {kind: spent._asdict() for kind, spent in self.kinds.items()}
        operators = {name: {"kind": kind, **spent._asdict()} for name, (kind, spent) in self.operators.items()}
        return asdict(self) | {"kinds": kinds, "operators": operators, "kernel_share": self.kernel_share}


# ----------------------------------------------------------------------------------------------------------- recording


def record(step: Callable[[], None], steps: int, device: torch.device) -> Table:
    """Profiles `steps` steps, each after one that is not; one step goes before them all.

    Each is a recording of its own: events that pile up lie between freed tensors, so that memory kept for the next
    step no longer fits it, and every step would fault in new pages.
    """
    step()
    plain, tally = 0.0, Tally(device)
    for _ in range(steps):
        plain += _seconds(step, device)
        with recording(device) as found, marked("step", device):
            step()
        tally.add(found.events())
    return tally.table(1e3 * plain / steps)


def name_fused_kernels() -> None:
    """What is compiled for a CPU from now on shows in recordings kernel by kernel. Otherwise its time is that of the
    generated code which calls it."""
    from torch._inductor import config  # takes half a second to import

    config.cpp.enable_kernel_profile = True


def _seconds(step: Callable[[], None], device: torch.device) -> float:
    settle(device)
    began = time.perf_counter()
    step()
    settle(device)
    return time.perf_counter() - began


def settle(device: torch.device) -> None:
    """Waits for all that a GPU was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def recording(device: torch.device, **options: bool) -> Iterator[profile]:
    """PyTorch's profiler, in which the waits for collectives show too. Its events can be asked for at the end.

    Args:
        options: of `torch.profiler.profile`.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it chats on stderr otherwise
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    settle(device)
    with profile(activities=activities, **options) as found:
        RECORDER.mark = _wait
        try:
            yield found
        finally:
            RECORDER.mark = None
            settle(device)


def _wait(record: CollectiveRecord) -> AbstractContextManager:
    if record.channel:
        return record_function(f"wait for {record.op} over {record.channel}")
    return record_function("waiting for " + re.sub(r" \d+", "", record.op))  # not for others; one name for all steps


@contextmanager
def marked(name: str, device: torch.device) -> Iterator[None]:
    """A step in a recording, called `step` or `step <number>`, to the end of all that it asked a GPU for."""
    with record_function(name):
        yield
        settle(device)


# ------------------------------------------------------------------------------------------------------------ counting


class _Slice(NamedTuple):
    """Something that ran, in microseconds of the profiler's clock."""

    name: str
    start: float
    end: float


class Tally:
    """Adds up what recordings say of the steps marked in them."""

    def __init__(self, device: torch.device):
        self._device = device.type
        self._steps, self._us, self._under_way = 0, 0.0, 0.0
        self._took: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()

    def add(self, events: Sequence[FunctionEvent]) -> None:
        """The events of one recording."""
        steps = [e for e in events if e.is_user_annotation and _on_cpu(e) and re.fullmatch(STEP, e.name)]
        self._steps += len(steps)
        self._us += sum(e.time_range.elapsed_us() for e in steps)
        for step in steps:
            within = [e for e in events if _overlap(e, step) > 0]
            spent = _of_gpu(within, step) if self._device == "cuda" else _of_cpu(within, step)
            for name, us in spent:
                self._took[name] += us
                self._calls[name] += 1
            self._under_way += _union_us([_slice(e, step) for e in within if self._carries(e)])

    def _carries(self, e: FunctionEvent) -> bool:
        """A message, from its launch until it is waited for; on a GPU its kernel."""
        if self._device == "cpu":
            return e.is_async and e.name.startswith("gloo:")
        return _is_kernel(e) and kind_of(e.name, "cuda") == "communication"

    def table(self, plain_ms: float | None = None) -> Table:
        """The mean of all steps so far."""
        each = lambda us, calls: Spent(us / 1e3 / self._steps, calls / self._steps)
        kinds: dict[str, Spent] = {}
        operators: dict[str, tuple[str, Spent]] = {}
        for name, us in self._took.most_common():
            kind = kind_of(name, self._device)
            spent = each(us, self._calls[name])
            operators[name] = kind, spent
            before = kinds.get(kind, Spent(0, 0))
            kinds[kind] = Spent(before.ms + spent.ms, before.calls + spent.calls)
        kinds = dict(sorted(kinds.items(), key=lambda item: -item[1].ms))
        step_ms, under_way = (us / 1e3 / self._steps for us in (self._us, self._under_way))
        return Table(self._device, self._steps, step_ms, plain_ms, kinds, operators, under_way)


def _on_cpu(e: FunctionEvent) -> bool:
    return e.device_type == DeviceType.CPU


def _is_kernel(e: FunctionEvent) -> bool:
    return not _on_cpu(e) and not e.is_user_annotation


def _overlap(e: FunctionEvent, step: FunctionEvent) -> float:
    a, b = e.time_range, step.time_range
    return min(a.end, b.end) - max(a.start, b.start)


def _slice(e: FunctionEvent, step: FunctionEvent) -> _Slice:
    """As much of it as lies in the step."""
    a, b = e.time_range, step.time_range
    return _Slice(e.name, max(a.start, b.start), min(a.end, b.end))


def _of_cpu(events: Sequence[FunctionEvent], step: FunctionEvent) -> Iterator[tuple[str, float]]:
    """(operator, microseconds) of the step's thread, less what it called, if it does not compute. Their sum is the
    step's time."""
    mine = [e for e in events if _on_cpu(e) and e.thread == step.thread and not e.is_async]
    calls = {id(e): e.cpu_parent for e in mine}
    whole = {id(e): kind_of(e.name, "cpu") in COMPUTE for e in mine}
    for e in mine:
        above = e.cpu_parent
        while above is not None and not whole.get(id(above)):
            above = calls.get(id(above))
        if above is None:
            yield "step" if e is step else e.name, e.cpu_time_total if whole[id(e)] else e.self_cpu_time_total


def _of_gpu(events: Sequence[FunctionEvent], step: FunctionEvent) -> Iterator[tuple[str, float]]:
    """(kernel, microseconds), every instant given to one of those that run, and while none does to the host. Their sum
    is the step's time."""
    slices = [_slice(e, step) for e in events if _is_kernel(e)]
    owned = [0.0] * len(slices)
    ends = [(s.start, i) for i, s in enumerate(slices)] + [(s.end, i) for i, s in enumerate(slices)]
    rank = lambda i: (kind_of(slices[i].name, "cuda") == "communication", slices[i].start)
    running: set[int] = set()
    before = step.time_range.start
    for at, i in sorted(ends):
        if running:
            owned[min(running, key=rank)] += at - before
        running ^= {i}
        before = at
    yield from ((s.name, us) for s, us in zip(slices, owned, strict=True))
    yield NO_KERNEL, step.time_range.elapsed_us() - sum(owned)


def _union_us(slices: Sequence[_Slice]) -> float:
    total, end = 0.0, float("-inf")
    for s in sorted(slices, key=lambda s: s.start):
        total += max(0.0, s.end - max(s.start, end))
        end = max(end, s.end)
    return total
