"""The speed of each link between neighbours on an axis, first one way, then the other. Disjoint pairs run at once."""

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ndtrain.config import Config
from ndtrain.mesh import collectives
from ndtrain.preflight.network import axes_of
from ndtrain.preflight.rank_context import Findings, RankContext
from ndtrain.preflight.report import Ranks, Row, Status, few, listed, per_second, slow, usual_rate

MESSAGES = tuple(1 << k for k in (16, 19, 22, 25))  # bytes
TIMES = 2  # messages of each length
PASSES = 3  # over all links: the fastest counts, so that a busy moment of a host does not make a link look slow
ENOUGH_S = 0.025  # send no longer messages once one takes longer
SLOW = (1 / 3, 1 / 3)  # shares of the usual rate
LEAST = 1e8  # bytes/s between hosts: gigabit Ethernet; warn if a link is slower


class Link(NamedTuple):
    """One direction of a link between neighbours on an axis, with global ranks."""

    axis: str
    source: int
    to: int


def pairs_by_round(n: int) -> list[list[tuple[int, int]]]:
    """Return the pairs of neighbours on a ring of n ranks, in rounds. No rank is in two pairs of a round."""
    even = [(i, i + 1) for i in range(0, n - 1, 2)]
    odd = [(i, i + 1) for i in range(1, n - 1, 2)]
    last = [(n - 1, 0)] if n > 2 else []
    rounds = [even, odd + last] if n % 2 == 0 else [even, odd, last]
    return [pairs for pairs in rounds if pairs]


def probe_links(context: RankContext) -> Findings:
    """Return {links: [axis, source, bytes/s] of what this rank received, damaged: [axis, source]}."""
    best: dict[tuple[str, int], float] = {}
    damaged = set()
    for _ in range(PASSES):
        for (axis,) in (axes for axes in axes_of(context.spec) if len(axes) == 1):
            for source, rate, right in _rates(context, axis):
                best[axis, source] = max(rate, best.get((axis, source), 0.0))
                damaged |= set() if right else {(axis, source)}
    return {"links": [[*link, rate] for link, rate in best.items()], "damaged": sorted(damaged)}


def _rates(context: RankContext, axis: str) -> Iterator[tuple[int, float, bool]]:
    """Yield (global rank of a neighbour, bytes/s from it, True if all are intact). Measures one way, then the other."""
    group = context.mesh.group(axis)
    me, members = group.rank(), dist.get_process_group_ranks(group)
    for pairs in pairs_by_round(len(members)):
        for one, other in (pair for pair in pairs if me in pair):
            for source, to in ((one, other), (other, one)):
                if me == to:
                    yield members[source], *_receive(context, group, source)
                else:
                    _send(context, group, to)


def _receive(context: RankContext, group: dist.ProcessGroup, source: int) -> tuple[float, bool]:
    """Request messages of growing length until they take long enough. Return the best bytes/s for the last length, and
    True if the messages arrived undamaged."""
    rate, right = 0.0, True
    for size in MESSAGES:
        buffer, seconds = torch.zeros(size, dtype=torch.uint8, device=context.device), []
        for _ in range(TIMES):
            began = time.perf_counter()
            _message(context, collectives.send, torch.tensor([size], device=context.device), group, source)
            _message(context, collectives.receive, buffer, group, source)
            seconds.append(time.perf_counter() - began)
        right &= bool((buffer == _mark(source)).all())
        rate = size / min(seconds)
        if min(seconds) > ENOUGH_S:
            break
    _message(context, collectives.send, torch.tensor([0], device=context.device), group, source)
    return rate, right


def _send(context: RankContext, group: dist.ProcessGroup, to: int) -> None:
    """Send messages of the lengths that the receiver requests."""
    asked = torch.zeros(1, dtype=torch.int64, device=context.device)
    buffer = torch.full((max(MESSAGES),), _mark(group.rank()), dtype=torch.uint8, device=context.device)
    while True:
        _message(context, collectives.receive, asked, group, to)
        if not (size := int(asked)):
            return
        _message(context, collectives.send, buffer[:size], group, to)


def _mark(rank: int) -> int:
    """Return the byte that fills all messages from a rank."""
    return rank % 255 + 1


def _message(context: RankContext, way: Callable, x: Tensor, group: dist.ProcessGroup, peer: int) -> None:
    way(x, group, peer).wait()
    context.synchronize()


def check_links(by_rank: dict[int, Findings], ranks: Ranks, cfg: Config) -> list[Row]:
    """Return a row for each axis. Compares links within hosts with each other, and links between hosts with each
    other."""
    rates = {Link(axis, source, r): rate for r, f in by_rank.items() for axis, source, rate in f["links"]}
    damaged = [Link(axis, source, r) for r, f in by_rank.items() for axis, source in f["damaged"]]
    odd: dict[Link, str] = {}
    for near in (True, False):
        alike = {k: v for k, v in rates.items() if ranks.same_host(k.source, k.to) == near and k not in damaged}
        if alike:
            usual = usual_rate(alike.values())
            _, late = slow(alike, usual, *SLOW)
            odd |= {k: f"{per_second(rates[k])}, others {per_second(usual)}" for k in late}
    odd |= dict.fromkeys(damaged, "messages arrive damaged")
    return [_check_axis(axis, rates, odd, ranks) for axis in dict.fromkeys(k.axis for k in rates)]


def _check_axis(axis: str, rates: dict[Link, float], odd: dict[Link, str], ranks: Ranks) -> Row:
    mine, wrong = {k: v for k, v in rates.items() if k.axis == axis}, [k for k in odd if k.axis == axis]
    figures, notes = [], []
    for where, near in (("within hosts", True), ("between hosts", False)):
        of = {k: v for k, v in mine.items() if ranks.same_host(k.source, k.to) == near}
        if of:
            figures.append(f"{where} {per_second(min(of.values()))} to {per_second(max(of.values()))}")
        below = [k for k, v in of.items() if not near and v < LEAST and k not in odd]
        notes += [f"slower than gigabit Ethernet: {listed([_way(k, ranks) for k in below])}"] * bool(below)
    status = Status.FAILED if wrong else Status.WARNING if notes else Status.OK
    named = few([f"{odd[k]}: {_way(k, ranks)}" for k in wrong])
    return Row(f"links over {axis}", status, ", ".join(figures), (*_shared(wrong, ranks), *named, *notes))


def _way(link: Link, ranks: Ranks) -> str:
    return f"{ranks.one(link.source)} to {ranks.one(link.to)}"


def _shared(links: list[Link], ranks: Ranks) -> tuple[str, ...]:
    """Name the one rank, or else the one host, that all links share. Empty for a single pair of ranks."""
    ends = [{k.source, k.to} for k in links]
    if len({frozenset(e) for e in ends}) < 2:
        return ()
    common = set.intersection(*ends)
    hosts = set.intersection(*({ranks.hosts[r] for r in e} for e in ends))
    at = ranks.one(common.pop()) if len(common) == 1 else hosts.pop() if len(hosts) == 1 else ""
    return (f"all at {at}",) * bool(at)
