"""The memory of a rank in a training step, from its program and its pieces."""

from collections.abc import Mapping
from typing import NamedTuple

from ndtrain.parallel.owners import Round
from ndtrain.parallel.unit import state_bytes
from ndtrain.plan.events import Piece
from ndtrain.plan.simulate import Sizes
from ndtrain.program.build import UnitFacts
from ndtrain.program.ops import (
    AwaitScatter,
    AwaitWhole,
    Collect,
    ComputeWhole,
    Free,
    Gather,
    GatherWhole,
    Open,
    Run,
    ScatterWhole,
    Send,
)
from ndtrain.program.passes import Variant
from ndtrain.program.step import RankPlan, StepProgram


class RankMemory(NamedTuple):
    """Bytes of a rank's tensors.

    Attributes:
        state: tensors that exist between steps.
        step: peak of all other tensors during a step.
    """

    state: int
    step: int


def rank_memory(program: StepProgram, rank: RankPlan, pieces: Mapping[Variant, Piece], sizes: Sizes) -> RankMemory:
    """Return the memory of a rank's tensors by walking through its program."""
    walk = _Memory(program.units, sizes)
    for turn in rank.program.turns:
        walk.now += sizes.message * len(turn.posts)
        for op in turn.ops:
            match op:
                case Run():
                    walk.run(pieces[Variant.of(op, rank.kinds[op.layer])])
                case Gather() | Free():
                    walk.weights(op)
                case Open():
                    walk.open(op.unit)
                case Collect():
                    walk.collect(op.unit)
                case Send():
                    walk.now -= sizes.message
    contexts = sizes.context * program.schedule.microbatches
    state = sum(held_bytes(program.units[name], program, sizes) for name in rank.units)
    return RankMemory(state, max(walk.peak + contexts, update_peak(rank, program.plan.sent.itemsize)))


def update_peak(rank: RankPlan, sent: int) -> int:
    """Return the bytes that the owners of whole tensors need at most, on the rank that owns the largest ones.

    Args:
        sent: bytes of an element on its way to the owners and back.
    """
    now = peak = 0
    for op in rank.program.update:
        match op:
            case GatherWhole(number) | AwaitWhole(number):
                one = rank.rounds[number]
                # to the owner: the elements that this rank has, sent once, and what the owner receives
                moving = _sent_once(one) + (one.largest.numel if one.ranks > 1 else 0)
                if isinstance(op, GatherWhole):
                    now += sent * (moving + one.largest.numel)
                    peak = max(peak, now)
                else:
                    now -= sent * moving
            case ComputeWhole(number):
                largest = rank.rounds[number].largest
                peak = max(peak, now + largest.workspace)  # the directions then replace the gradients
            case ScatterWhole(number) | AwaitScatter(number):
                one = rank.rounds[number]
                # to all shards: the owner's elements for each replica, and the elements that this rank needs
                moving = one.largest.numel * one.replicas
                moving += one.numel * one.replicas // one.ranks if one.ranks > 1 else 0
                if isinstance(op, ScatterWhole):
                    now += sent * moving
                    peak = max(peak, now)
                else:
                    now -= sent * (moving + one.largest.numel)
    return peak


def _sent_once(one: Round) -> int:
    """Return the most elements that a rank sends to owners. Of ranks with the same shards, one sends an element."""
    return max(one.numel // one.ranks, one.largest.numel * one.replicas // one.ranks)


def held_bytes(u: UnitFacts, program: StepProgram, sizes: Sizes) -> int:
    """Return the bytes of a unit that a rank holds on its device between steps. Some published runs hold gradients in
    another precision than ndtrain."""
    held = state_bytes(program.plan, u.shards, u.numel, u.hidden)
    return held.on_device + held.gradient // program.plan.master.itemsize * (sizes.gradient - sizes.master)


class _Memory:
    """Follows the memory that a step needs in addition to the state.

    Attributes:
        now, peak: current and peak bytes.
    """

    def __init__(self, units: Mapping[str, UnitFacts], sizes: Sizes):
        self.units, self.sizes = units, sizes
        self.now = self.peak = 0

    def run(self, piece: Piece) -> None:
        self.peak = max(self.peak, self.now + piece.peak_bytes)
        self.now += piece.kept_bytes

    def weights(self, op: Gather | Free) -> None:
        u = self.units[op.unit]
        if u.residency.reshard_after_forward:
            self.now += (1 if isinstance(op, Gather) else -1) * u.numel * self.sizes.compute
            self.peak = max(self.peak, self.now)

    def open(self, name: str) -> None:
        u = self.units[name]
        if not u.residency.holds_full_grad:
            self.now += u.numel * self.sizes.master
            self.peak = max(self.peak, self.now)

    def collect(self, name: str) -> None:
        """Free the unsharded gradient after its reduction has read it."""
        u = self.units[name]
        if not u.residency.holds_full_grad:
            self.now -= u.numel * self.sizes.master
