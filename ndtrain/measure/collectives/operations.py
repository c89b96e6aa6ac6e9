"""The collectives: how to call each, its expected result, and which of its bytes count."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ndtrain.measure.collectives.cases import Case, Form, Setting
from ndtrain.mesh import collectives
from ndtrain.mesh.collectives import gather_single, scatter_single

ROOT = 0  # of broadcast, scatter, gather and reduce: a rank of the group

TWO_STEPS = "reduce_scatter + all_gather"
FACTORS: dict[str, Callable[[int], float]] = {
    "1": lambda n: 1.0,
    "(n-1)/n": lambda n: (n - 1) / n,
    "2(n-1)/n": lambda n: 2 * (n - 1) / n,
}

Prepare = Callable[[Setting], Case]


@dataclass(frozen=True)
class Operation:
    """A collective, and the text that `bench collectives` prints about it.

    Attributes:
        does: its effect, for a reader who does not know it.
        counted: the tensor of S bytes.
        formula: key in `FACTORS`: bytes that the busiest link end must carry, as a multiple of S.
            busbw = factor x S / time.
        why: the reason for the factor.
        prepare: makes its tensors on this rank.
    """

    name: str
    does: str
    counted: str
    formula: str
    why: str
    prepare: Prepare

    def factor(self, n: int) -> float:
        return FACTORS[self.formula](n)


OPERATIONS: dict[str, Operation] = {}


def _operation(name: str, counted: str, formula: str, why: str) -> Callable[[Prepare], Prepare]:
    """Add an operation to `OPERATIONS`. The docstring of `prepare` is the description that users see."""

    def add(prepare: Prepare) -> Prepare:
        OPERATIONS[name] = Operation(name, prepare.__doc__, counted, formula, why, prepare)
        return prepare

    return add


@_operation("broadcast", "the root's tensor", "1", "each byte leaves the root once, and enters each other rank once")
def _broadcast(s: Setting) -> Case:
    """Send the tensor of the root, the first rank, to everyone."""
    x, root = s.full(), s.me == ROOT
    form = Form(lambda: dist.broadcast(x, group=s.group, group_src=ROOT), x)
    given, blank = ([(x, s.mine)], []) if root else ([], [x])
    return Case({"torch": form}, [(s.patterns[ROOT], 0)], given, blank)


@_operation("scatter", "the root's tensor", "(n-1)/n", "the root keeps its own piece and sends the others")
def _scatter(s: Setting) -> Case:
    """Cut the root's tensor into pieces; rank i gets piece i."""
    out, given = s.piece(), [(s.full(), s.mine)] if s.me == ROOT else []
    pieces = s.pieces(given[0][0]) if given else None
    form = Form(lambda: dist.scatter(out, pieces, group=s.group, group_src=ROOT), out)
    return Case({"torch": form}, [(s.patterns[ROOT], s.me * s.share)], given, [out])


@_operation("gather", "what the root gets", "(n-1)/n", "the root receives every piece but its own")
def _gather(s: Setting) -> Case:
    """Concatenate everyone's pieces on the root."""
    x, blank = s.piece(), [s.full()] if s.me == ROOT else []
    pieces = s.pieces(blank[0]) if blank else None
    form = Form(lambda: dist.gather(x, pieces, group=s.group, group_dst=ROOT), *blank or [x])
    return Case({"torch": form}, [(p, 0) for p in s.patterns if blank], [(x, s.mine)], blank)


@_operation(
    "reduce", "each rank's tensor", "1", "sums travel along a chain: each rank passes its tensor's size on once"
)
def _reduce(s: Setting) -> Case:
    """Sum everyone's tensors on the root, element by element."""
    x = s.full()
    form = Form(lambda: dist.reduce(x, group=s.group, group_dst=ROOT), x)
    return Case({"torch": form}, [(s.total, 0)] if s.me == ROOT else [], [(x, s.mine)])


@_operation("all_gather", "what each rank gets", "(n-1)/n", "a rank receives every piece but its own")
def _all_gather(s: Setting) -> Case:
    """Concatenate everyone's pieces on every rank."""
    x, out = s.piece(), s.full()
    forms = {
        "torch": Form(lambda: gather_single(out, x, group=s.group), out),
        "ours": Form(lambda: collectives.all_gather(out, x, s.group).wait(), out),
    }
    return Case(forms, [(p, 0) for p in s.patterns], [(x, s.mine)], [out])


@_operation("reduce_scatter", "each rank's tensor", "(n-1)/n", "a rank sends the pieces that it does not keep")
def _reduce_scatter(s: Setting) -> Case:
    """Sum the tensors, element by element; rank i gets piece i of the sum."""
    x, out = s.full(), s.piece()
    forms = {
        "torch": Form(lambda: scatter_single(out, x, group=s.group), out),
        "ours": Form(lambda: collectives.reduce_scatter(x, s.group).wait(), s.pieces(x)[s.me]),
    }
    return Case(forms, [(s.total, s.me * s.share)], [(x, s.mine)], [out])


@_operation("all_reduce", "each rank's tensor", "2(n-1)/n", "a reduce_scatter, then an all_gather")
def _all_reduce(s: Setting) -> Case:
    """Sum everyone's tensors on every rank, element by element."""
    x = s.full()
    forms = {
        "torch": Form(lambda: dist.all_reduce(x, group=s.group), x),
        "ours": Form(lambda: collectives.all_reduce(x, s.group).wait(), x),
    }
    return Case(forms, [(s.total, 0)], [(x, s.mine)])


@_operation(TWO_STEPS, "each rank's tensor", "2(n-1)/n", "the same bytes as all_reduce, which it equals")
def _two_steps(s: Setting) -> Case:
    """Run an all_reduce in two steps: sum and keep one piece, then collect the others' pieces."""
    x, piece = s.full(), s.piece()
    own = s.pieces(x)[s.me]

    def plain() -> None:
        scatter_single(piece, x, group=s.group)
        gather_single(x, piece, group=s.group)

    def ours() -> None:
        collectives.reduce_scatter(x, s.group).wait()
        collectives.all_gather(x, own, s.group).wait()

    return Case({"torch": Form(plain, x), "ours": Form(ours, x)}, [(s.total, 0)], [(x, s.mine)], [piece])


@_operation("all_to_all", "each rank's tensor", "(n-1)/n", "a rank sends every piece but its own")
def _all_to_all(s: Setting) -> Case:
    """Rank r sends its piece i to rank i, where it becomes piece r."""
    x, out = s.full(), s.full()
    sends, receives = s.pieces(x), s.pieces(out)
    forms = {
        "torch": Form(lambda: dist.all_to_all_single(out, x, group=s.group), out),
        "ours": Form(lambda: collectives.all_to_all(sends, receives, s.group, range(s.n)).wait(), out),
    }
    return Case(forms, [(p, s.me * s.share) for p in s.patterns], [(x, s.mine)], [out])


@_operation("send/recv", "each rank's tensor", "1", "a rank sends all its bytes once, and receives the same number")
def _send_receive(s: Setting) -> Case:
    """Send each rank's tensor to the next rank and receive the previous rank's tensor: a ring."""
    x, out = s.full(), s.full()
    to, source = (s.me + 1) % s.n, (s.me - 1) % s.n

    def plain() -> None:
        ends = ((dist.isend, x, to), (dist.irecv, out, source))
        works = dist.batch_isend_irecv([dist.P2POp(op, t, group=s.group, group_peer=peer) for op, t, peer in ends])
        for work in works:
            work.wait()

    forms = {
        "torch": Form(plain, out),
        "ours": Form(lambda: collectives.shift(x, out, s.group, to, source).wait(), out),
    }
    return Case(forms, [(s.patterns[source], 0)], [(x, s.mine)], [out])


def equals_all_reduce(s: Setting) -> dict[str, bool]:
    """Return, for each form, True if a reduce_scatter and an all_gather give the same bits as PyTorch's all_reduce."""
    whole, steps = _all_reduce(s).once("torch"), OPERATIONS[TWO_STEPS].prepare(s)
    return {name: torch.equal(whole.view(torch.int32), steps.once(name).view(torch.int32)) for name in steps.forms}
