"""What lies between ranks: their connections, their clocks, and the collectives over each axis."""

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ndtrain.config import Config
from ndtrain.distributed import collectives
from ndtrain.distributed.mesh import Mesh, MeshSpec
from ndtrain.distributed.sharding import SHARD_AXES, even_split
from ndtrain.preflight.rank_context import Found, RankContext
from ndtrain.preflight.report import Ranks, Row, Status, few, worst
from ndtrain.runtime import rendezvous

ROUNDS = 5  # of looking at the clock
# seconds apart: beyond them it has failed, is worth a warning. torchrun takes a host for dead that is 15 s off
CLOCK_S = (10.0, 1.0)
TIMED = 1 << 20  # bytes of the all_reduce that is timed
EACH = 1 << 14  # elements a rank, in a collective that is checked
TIMES = 3


def axes_of(spec: MeshSpec) -> list[tuple[str, ...]]:
    """Whose groups training sends over: each axis with more than one rank, and those of the shards together."""
    single = [(a,) for a in spec.order if spec.size(a) > 1]
    return single + [SHARD_AXES] * all(spec.size(a) > 1 for a in SHARD_AXES)


# ----------------------------------------------------------------------------------------------- connections and clocks


def connect(context: RankContext) -> Found:
    """The process groups of a run."""
    began = time.perf_counter()
    backend = "nccl" if context.device.type == "cuda" else "gloo"
    rendezvous.join(backend, context.rank, context.spec.world_size, context.deadline_s, context.device)
    context.mesh = Mesh(context.spec, context.rank, context.device)
    for axes in axes_of(context.spec):
        context.mesh.group(*axes)
    _ = context.mesh.background
    return {"backend": backend, "seconds": time.perf_counter() - began}


def judge_connections(found: dict[int, Found], ranks: Ranks, cfg: Config) -> list[Row]:
    seconds = max(f["seconds"] for f in found.values())
    return [Row("connections", Status.OK, f"{len(found)} ranks over {found[0]['backend']} in {seconds:.1f} s")]


def now() -> float:
    return time.time()


def probe_clock(context: RankContext) -> Found:
    """The time, each round at the moment when all ranks have met."""
    times = []
    for _ in range(ROUNDS):
        collectives.all_reduce(torch.zeros(1), context.mesh.background).wait()
        times.append(now())
    return {"times": times}


def judge_clocks(found: dict[int, Found], ranks: Ranks, cfg: Config) -> list[Row]:
    """A clock's distance from the median one; the median of the rounds, in each of which some rank may come late."""
    middles = [statistics.median_low(times) for times in zip(*(f["times"] for f in found.values()), strict=True)]
    off = {r: statistics.median(t - m for t, m in zip(f["times"], middles, strict=True)) for r, f in found.items()}
    failed, warned = CLOCK_S
    odd = sorted((r for r in off if abs(off[r]) > warned), key=lambda r: -abs(off[r]))
    status = worst(Status.FAILED if abs(off[r]) > failed else Status.WARNING for r in odd)
    notes = few([f"{off[r]:+.1f} s off: {ranks.one(r)}" for r in odd])
    figure = f"{max(off.values()) - min(off.values()):.3f} s apart at most"
    return [Row("clocks", status, figure, notes)]


# ---------------------------------------------------------------------------------------------------------- collectives
# Every rank of a group has the same whole numbers, and adds one of its own to them: sums are exact in fp32.


def _own(rank: int) -> int:
    return rank % 16


def _owns(n: int) -> Tensor:
    return torch.tensor([_own(r) for r in range(n)], dtype=torch.float32)


def _numbers(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.float32) % 97


def _sum(n: int) -> Tensor:
    """Over n ranks."""
    return n * _numbers(n * EACH) + _owns(n).sum()


Operation = Callable[[dist.ProcessGroup, int, int, torch.device], tuple[Tensor, Tensor]]


def _all_reduce(group: dist.ProcessGroup, n: int, me: int, device: torch.device) -> tuple[Tensor, Tensor]:
    full = (_numbers(n * EACH) + _own(me)).to(device)
    collectives.all_reduce(full, group).wait()
    return full, _sum(n)


def _reduce_scatter(group: dist.ProcessGroup, n: int, me: int, device: torch.device) -> tuple[Tensor, Tensor]:
    full, own = (_numbers(n * EACH) + _own(me)).to(device), slice(*even_split(n * EACH, n, me))
    collectives.reduce_scatter(full, group).wait()
    return full[own], _sum(n)[own]


def _all_gather(group: dist.ProcessGroup, n: int, me: int, device: torch.device) -> tuple[Tensor, Tensor]:
    out = torch.zeros(n * EACH, device=device)
    collectives.all_gather(out, (_numbers(EACH) + _own(me)).to(device), group).wait()
    return out, (_numbers(EACH) + _owns(n)[:, None]).view(-1)


def _all_to_all(group: dist.ProcessGroup, n: int, me: int, device: torch.device) -> tuple[Tensor, Tensor]:
    sends = (_numbers(EACH) + 16 * _owns(n)[:, None] + _own(me)).to(device)
    receives = torch.zeros_like(sends)
    collectives.all_to_all(list(sends), list(receives), group, range(n)).wait()
    return receives, _numbers(EACH) + _owns(n)[:, None] + 16 * _own(me)


def _shift(group: dist.ProcessGroup, n: int, me: int, device: torch.device) -> tuple[Tensor, Tensor]:
    out, before = torch.zeros(EACH, device=device), (me - 1) % n
    collectives.shift((_numbers(EACH) + _own(me)).to(device), out, group, (me + 1) % n, before).wait()
    return out, _numbers(EACH) + _own(before)


OPERATIONS: dict[str, Operation] = {  # what each gives, and what it must give
    "all_reduce": _all_reduce, "reduce_scatter": _reduce_scatter, "all_gather": _all_gather, "all_to_all": _all_to_all,
    "send and receive": _shift,
}  # fmt: skip


def probe_collectives(context: RankContext) -> Found:
    """{axes: {wrong: operations that gave something else, seconds: of an all_reduce}}"""
    found = {}
    for axes in axes_of(context.spec):
        group = context.mesh.group(*axes)
        wrong = [
            name
            for name, work in OPERATIONS.items()
            if not _right(context, *work(group, group.size(), group.rank(), context.device))
        ]
        found[" x ".join(axes)] = {"wrong": wrong, "seconds": _time_all_reduce(context, group)}
    return found


def _right(context: RankContext, got: Tensor, expected: Tensor) -> bool:
    context.settle()
    return torch.equal(got.cpu(), expected)


def _time_all_reduce(context: RankContext, group: dist.ProcessGroup) -> float:
    """Seconds of the shortest of a few."""
    full, shortest = torch.zeros(TIMED // 4, device=context.device), float("inf")
    for _ in range(TIMES):
        began = time.perf_counter()
        collectives.all_reduce(full, group).wait()
        context.settle()
        shortest = min(shortest, time.perf_counter() - began)
    return shortest


def judge_collectives(found: dict[int, Found], ranks: Ranks, cfg: Config) -> list[Row]:
    return [_judge_axes(axes, {r: f[axes] for r, f in found.items()}, ranks) for axes in found[0]]


def _judge_axes(axes: str, found: dict[int, Found], ranks: Ranks) -> Row:
    wrong = {r: f"wrong results of {', '.join(f['wrong'])}" for r, f in found.items() if f["wrong"]}
    seconds = max(f["seconds"] for f in found.values())
    figure = f"{', '.join(OPERATIONS)} right; all_reduce of {TIMED >> 20} MiB in {1e3 * seconds:.3g} ms"
    status = Status.FAILED if wrong else Status.OK
    return Row(f"collectives over {axes}", status, "" if wrong else figure, ranks.grouped(wrong))
