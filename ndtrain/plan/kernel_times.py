"""Times the operators of real training steps, one by one, as the kernels that the planner knows."""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ndtrain.config import Config
from ndtrain.engine.train_step import TrainingStep
from ndtrain.measure.ranks import rank_device
from ndtrain.measure.rounds import max_over_ranks
from ndtrain.measure.training import batches_of
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.parallel.build import build_stages, initialise
from ndtrain.plan.events import Kernel
from ndtrain.plan.operators import access_of, is_free, kernel_of

WARM_UP = 1  # untimed steps of a case
LEAST_S = 1e-7  # a clock may read 0 for shorter kernels


class Clock:
    """Measures this thread's work in seconds. On a CPU it counts the time on a core, so that other programs matter only
    if they slow memory down. On a GPU it measures the time between two events of the stream."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"

    def now(self) -> Any:
        if not self._cuda:
            return time.thread_time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        if not self._cuda:
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1e3


class KernelTimes(TorchDispatchMode):
    """Times each operator inside it.

    Attributes:
        spans: kernel -> (start, end) of each of its runs.
    """

    def __init__(self, clock: Clock):
        super().__init__()
        self.clock = clock
        self.spans: dict[Kernel, list[tuple[Any, Any]]] = defaultdict(list)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if is_free(func):
            return func(*args, **kwargs)
        start = self.clock.now()
        out = func(*args, **kwargs)
        span = start, self.clock.now()
        self.spans[kernel_of(func, args, kwargs, access_of(func, args, kwargs, out))].append(span)
        return out

    def seconds(self) -> dict[Kernel, list[float]]:
        return {k: [max(LEAST_S, self.clock.between(*s)) for s in spans] for k, spans in self.spans.items()}


@dataclass
class CaseTimes:
    """The times of a training step on one rank.

    Attributes:
        steps: number of timed steps.
        passes_kernels, update_kernels: kernel -> seconds of each run, in forward and backward, and in the update.
        passes, updates: seconds of each forward and backward, and of each update, without `KernelTimes`.
        steps_s: wall time of each step on the slowest rank, in seconds, without `KernelTimes`.
    """

    steps: int
    passes_kernels: dict[Kernel, list[float]] = field(default_factory=dict)
    update_kernels: dict[Kernel, list[float]] = field(default_factory=dict)
    passes: list[float] = field(default_factory=list)
    updates: list[float] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)


def fastest(launches: Sequence[CaseTimes]) -> CaseTimes:
    """Return the times of the launch with the fastest step. The speed of a launch depends on where threads and memory
    are placed, and other programs can only make it slower."""
    return min(launches, key=lambda times: min(times.steps_s))


def time_case(cfg: Config, mesh: Mesh, steps: int) -> CaseTimes:
    """Time a configuration's steps, alternately operator by operator and as a whole."""
    stages = build_stages(cfg, mesh)
    initialise(stages, cfg.run.seed)
    step, batches, clock = TrainingStep(cfg, mesh, stages), batches_of(cfg, mesh, 0), Clock(mesh.device)
    times, of_passes, of_updates = CaseTimes(steps), KernelTimes(clock), KernelTimes(clock)
    for i in range(WARM_UP):
        step.run(i + 1, batches).wait()
    for i in range(WARM_UP + 1, WARM_UP + 2 * steps, 2):
        with of_passes:
            loss = step.forward_backward(i, batches)
        with of_updates:
            step.update(i, loss).wait()
        if dist.is_initialized():
            dist.barrier()  # otherwise the time of a step includes the wait for a rank that begins later
        began, start = time.perf_counter(), clock.now()
        loss = step.forward_backward(i + 1, batches)
        middle = clock.now()
        step.update(i + 1, loss).wait()
        end = clock.now()
        times.passes.append(clock.between(start, middle))
        times.updates.append(clock.between(middle, end))
        times.steps_s.append(max_over_ranks(time.perf_counter() - began))
    times.passes_kernels, times.update_kernels = of_passes.seconds(), of_updates.seconds()
    return times


def time_cases(rank: int, cfgs: Sequence[Config], steps: int, device: str) -> list[CaseTimes]:
    """Time several configurations one after another. This runs in the process of each rank."""
    own = rank_device(rank, device)
    return [time_case(cfg, Mesh(MeshSpec.of(cfg.mesh), rank, own), steps) for cfg in cfgs]
