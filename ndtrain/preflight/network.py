"""Checks between ranks: their connections, their clocks, and the collectives over each axis."""

import statistics
import time

import torch
import torch.distributed as dist

from ndtrain.config import Config
from ndtrain.measure.collectives.cases import Pattern, Setting
from ndtrain.measure.collectives.operations import OPERATIONS
from ndtrain.mesh import collectives
from ndtrain.mesh.mesh import EP, Mesh, MeshSpec
from ndtrain.mesh.sharding import SHARD_AXES
from ndtrain.preflight.rank_context import Findings, RankContext
from ndtrain.preflight.report import Ranks, Row, Status, few, worst
from ndtrain.run import rendezvous

ROUNDS = 5  # of clock readings
# Seconds apart: fail beyond the first, warn beyond the second. torchrun considers a host dead if its clock is 15 s off
CLOCK_S = (10.0, 1.0)
TIMED = 1 << 20  # bytes of the all_reduce that is timed
EACH = 1 << 14  # elements per rank in a checked collective
TIMES = 3


def axes_of(spec: MeshSpec) -> list[tuple[str, ...]]:
    """Return the axes that training communicates over: each one with more than one rank, the shard axes together,
    and ep."""
    single = [(a,) for a in spec.order if spec.size(a) > 1]
    return single + [SHARD_AXES] * all(spec.size(a) > 1 for a in SHARD_AXES) + [(EP,)] * (spec.ep > 1)


# ----------------------------------------------------------------------------------------------- connections and clocks


def connect(context: RankContext) -> Findings:
    """Create the process groups of a run."""
    began = time.perf_counter()
    backend = rendezvous.backend_of(context.device.type)
    rendezvous.join(backend, context.rank, context.spec.world_size, context.deadline_s, context.device)
    context.mesh = Mesh(context.spec, context.rank, context.device)
    for axes in axes_of(context.spec):
        context.mesh.group(*axes)
    for group in (context.mesh.world, context.mesh.background):
        dist.barrier(group)  # gloo connects the ranks of these groups on use
    return {"backend": backend, "seconds": time.perf_counter() - began}


def check_connections(by_rank: dict[int, Findings], ranks: Ranks, cfg: Config) -> list[Row]:
    seconds = max(f["seconds"] for f in by_rank.values())
    return [Row("connections", Status.OK, f"{len(by_rank)} ranks over {by_rank[0]['backend']} in {seconds:.1f} s")]


def now() -> float:
    return time.time()


def probe_clock(context: RankContext) -> Findings:
    """Return the time in each round, read right after an all_reduce over all ranks."""
    times = []
    for _ in range(ROUNDS):
        collectives.all_reduce(torch.zeros(1), context.mesh.background).wait()
        times.append(now())
    return {"times": times}


def check_clocks(by_rank: dict[int, Findings], ranks: Ranks, cfg: Config) -> list[Row]:
    """Return a row on the clocks' offsets from the median clock. An offset is the median over the rounds, because a
    rank may be late in a single round."""
    middles = [statistics.median_low(times) for times in zip(*(f["times"] for f in by_rank.values()), strict=True)]
    off = {r: statistics.median(t - m for t, m in zip(f["times"], middles, strict=True)) for r, f in by_rank.items()}
    failed, warned = CLOCK_S
    odd = sorted((r for r in off if abs(off[r]) > warned), key=lambda r: -abs(off[r]))
    status = worst(Status.FAILED if abs(off[r]) > failed else Status.WARNING for r in odd)
    notes = few([f"{off[r]:+.1f} s off: {ranks.one(r)}" for r in odd])
    figure = f"{max(off.values()) - min(off.values()):.3f} s apart at most"
    return [Row("clocks", status, figure, notes)]


# ---------------------------------------------------------------------------------------------------------- collectives

CHECKED = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send/recv")  # the ones that training uses


def probe_collectives(context: RankContext) -> Findings:
    """Return {axes: {wrong: operations with a wrong result, seconds: time of an all_reduce}}."""
    by_axes = {}
    for axes in axes_of(context.spec):
        group = context.mesh.group(*axes)
        patterns = [_pattern(r) for r in range(group.size())]
        setting = Setting(group, group.size() * EACH, context.device, patterns)
        wrong = [name for name in CHECKED if not OPERATIONS[name].prepare(setting).right("ours")]
        by_axes[" x ".join(axes)] = {"wrong": wrong, "seconds": _time_all_reduce(context, group)}
    return by_axes


def _pattern(rank: int) -> Pattern:
    """Return integers offset by a number that depends on the rank. Their sums are exact in fp32."""
    return Pattern(torch.arange(97, dtype=torch.float32) + rank % 16)


def _time_all_reduce(context: RankContext, group: dist.ProcessGroup) -> float:
    """Return the seconds of the fastest of `TIMES` all_reduces."""
    full, shortest = torch.zeros(TIMED // 4, device=context.device), float("inf")
    for _ in range(TIMES):
        began = time.perf_counter()
        collectives.all_reduce(full, group).wait()
        context.synchronize()
        shortest = min(shortest, time.perf_counter() - began)
    return shortest


def check_collectives(by_rank: dict[int, Findings], ranks: Ranks, cfg: Config) -> list[Row]:
    return [_check_axes(axes, {r: f[axes] for r, f in by_rank.items()}, ranks) for axes in by_rank[0]]


def _check_axes(axes: str, by_rank: dict[int, Findings], ranks: Ranks) -> Row:
    wrong = {r: f"wrong results of {', '.join(f['wrong'])}" for r, f in by_rank.items() if f["wrong"]}
    seconds = max(f["seconds"] for f in by_rank.values())
    figure = f"{', '.join(CHECKED)} right; all_reduce of {TIMED >> 20} MiB in {1e3 * seconds:.3g} ms"
    status = Status.FAILED if wrong else Status.OK
    return Row(f"collectives over {axes}", status, "" if wrong else figure, ranks.grouped(wrong))
