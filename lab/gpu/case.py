"""One case of `bench gpu`, in a process of its own. An error or a lack of memory becomes a row and does not end the
suite."""

import gc
import os
import time
from collections import Counter
from dataclasses import asdict, replace
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from lab.gpu import baselines
from lab.gpu.estimate import PROFILED
from lab.gpu.longest import longest
from lab.gpu.parity import compare_with_cpu
from lab.gpu.suite import Case, Suite, config_of
from ndtrain.config import Config, ConfigError, resolve
from ndtrain.engine.memory_check import least_bytes
from ndtrain.measure.ranks import TIMED_OUT, RankFailed, rank_device, run_ranks
from ndtrain.measure.training import DifferentWork, QueuedSteps, batches_of, ours
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.observe import peak_memory_bytes, reset_peak_memory
from ndtrain.observe.profile import record

# CUDA runtime calls that make the host wait for the device. On a CPU: the operators that would make such calls
WAITS = {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"}
WAITING_OPERATORS = {f"aten::{op}" for op in ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal")}
_STEADY = "steady steps"


def run_case(case: Case, suite: Suite, device: str, limit_s: float) -> dict[str, Any]:
    """Run a case and return its row: `status` (measured, out of memory, timed out, WRONG, failed), `why`, `seconds` and
    figures."""
    began = time.monotonic()
    try:
        cfg = config_of(case)
        for peer in set(case.implementations) - {"ours"}:
            baselines.check(peer, cfg)
        row = run_ranks(measure, 1, case, cfg, suite, device, limit_s=limit_s)
    except ConfigError as error:
        row = {"status": "failed", "why": str(error)}
    except RankFailed as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        row = {"status": "timed out" if TIMED_OUT in str(error) else "failed", "why": lines[-1]}
    return {"kind": case.kind, **row, "seconds": round(time.monotonic() - began, 1)}


def measure(rank: int, case: Case, cfg: Config, suite: Suite, device: str) -> dict[str, Any]:
    """Measure a case, in its own process."""
    mesh = Mesh(MeshSpec.of(cfg.mesh), rank, rank_device(rank, device))
    shape = {"train": asdict(cfg.train), "microbatches": cfg.microbatches}
    if needed := lacking(cfg, mesh.device):
        return {"status": "out of memory", "why": needed, "config": shape}
    try:
        return {"status": "measured", **KINDS[case.kind](case, cfg, suite, mesh), "config": shape}
    except DifferentWork as error:
        return {"status": "WRONG", "why": str(error), "config": shape}
    except RuntimeError as error:
        if not lacks_memory(error):
            raise
        return {"status": "out of memory", "why": str(error).splitlines()[0], "config": shape}


def lacking(cfg: Config, device: torch.device) -> str:
    """Return the reason why the state cannot fit, computed before anything is allocated. Return "" if it can fit, or on
    a CPU."""
    if device.type != "cuda":
        return ""
    needed, memory = least_bytes(cfg, 0)[0], torch.cuda.mem_get_info(device)[1]
    sizes = f"the state alone needs {needed / 2**30:.1f} GiB, but this GPU has {memory / 2**30:.1f}"
    return sizes if needed > memory else ""


def lacks_memory(error: RuntimeError) -> bool:
    """Return True if the error is PyTorch's out-of-memory error, or comes from a library with its own allocator."""
    return isinstance(error, torch.OutOfMemoryError) or "ALLOC_FAILED" in str(error)


def _timed(case: Case, cfg: Config, suite: Suite, mesh: Mesh) -> dict[str, Any]:
    return baselines.timed_peers(cfg, mesh, case.implementations, replace(suite, rounds=case.rounds or suite.rounds))


def _losses(case: Case, cfg: Config, suite: Suite, mesh: Mesh) -> dict[str, Any]:
    """Return the losses of `case.steps` steps, each on different tokens."""
    own = ours(cfg, mesh)
    reads = [own.launch(batches_of(cfg, mesh, step)) for step in range(case.steps)]
    return {"losses": [read().loss for read in reads]}


def _parity(case: Case, cfg: Config, suite: Suite, mesh: Mesh) -> dict[str, Any]:
    return compare_with_cpu(cfg, mesh, case.steps)


def _profile(case: Case, cfg: Config, suite: Suite, mesh: Mesh) -> dict[str, Any]:
    """Profile a warm step, and return where its time goes."""
    step = QueuedSteps(ours(cfg, mesh), [batches_of(cfg, mesh, 0)], mesh.device)
    for _ in range(1 + suite.warmup):
        step()
    step.finish()
    table = record(lambda: (step(), step.finish()), steps=PROFILED, device=mesh.device)
    return {"lines": table.lines(), "table": table.as_dict()}


# ----------------------------------------------------------------------------------------------- host waits


def _syncs(case: Case, cfg: Config, suite: Suite, mesh: Mesh) -> dict[str, Any]:
    """Count the calls that make the host wait, in warm steps whose results are not read."""
    step = QueuedSteps(ours(cfg, mesh), [batches_of(cfg, mesh, 0)], mesh.device)
    for _ in range(1 + suite.warmup):
        step()
    step.finish()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it logs to stderr
    on_gpu = mesh.device.type == "cuda"
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with profile(activities=kinds) as trace, record_function(_STEADY):
        for _ in range(suite.steps):
            step()
    step.finish()
    return {"waits": waits(trace.events(), WAITS if on_gpu else WAITING_OPERATORS), "steps": suite.steps}


def waits(events: list[FunctionEvent], names: set[str]) -> dict[str, int]:
    """Count the events of these names that began during the steady steps. (The profiler itself waits when it ends.)"""
    span = next(e.time_range for e in events if e.name == _STEADY and e.device_type == DeviceType.CPU)
    inside = (e for e in events if e.name in names and span.start <= e.time_range.start < span.end)
    return dict(Counter(e.name for e in inside if not _in_fused_kernel(e)))


def _in_fused_kernel(event: FunctionEvent) -> bool:
    """Return True if the event belongs to the fused update. Its CPU kernel reads scalars; its GPU kernel does not."""
    while event is not None and not event.name.startswith("aten::_fused"):
        event = event.cpu_parent
    return event is not None


# -------------------------------------------------------------------------------------------- the longest sequence


def _longest(case: Case, cfg: Config, suite: Suite, mesh: Mesh) -> dict[str, Any]:
    peaks: dict[int, int | None] = {}

    def peak(length: int) -> int | None:
        at = cfg.unfrozen()
        at.train.seq_len = length
        at.model.max_position_embeddings = max(length, at.model.max_position_embeddings)
        peaks[length] = _peak(resolve(at, 1), mesh)
        gc.collect()
        if mesh.device.type == "cuda":
            torch.cuda.empty_cache()
        return peaks[length]

    memory = torch.cuda.mem_get_info(mesh.device)[1] if mesh.device.type == "cuda" else None
    tokens = longest(peak, case.start, case.most, case.grain, memory)
    return {"tokens": tokens, "searched_to": case.most, "peaks": peaks}


def _peak(cfg: Config, mesh: Mesh) -> int | None:
    """Return the peak bytes of one step from scratch, or None if it runs out of memory."""
    reset_peak_memory(mesh.device)
    try:
        step = QueuedSteps(ours(cfg, mesh), [batches_of(cfg, mesh, 0)], mesh.device)
        step()
        step.finish()
    except RuntimeError as error:
        if not lacks_memory(error):
            raise
        return None
    return peak_memory_bytes(mesh.device)


KINDS = {
    "timed": _timed,
    "losses": _losses,
    "parity": _parity,
    "profile": _profile,
    "longest": _longest,
    "syncs": _syncs,
}
