"""The memory of a rank in a training step, from its program and its pieces."""

from collections.abc import Mapping

import torch

from ndtrain.config import Config
from ndtrain.config.schema import resolved
from ndtrain.parallel.build import DTYPES
from ndtrain.plan.events import Piece
from ndtrain.plan.pieces import Variant
from ndtrain.plan.program import Gather, Open, RankProgram, Reduce, Reshard, Run, Send, StepProgram, UnitFacts
from ndtrain.plan.simulate import Sizes


def peak_bytes(program: StepProgram, rank: RankProgram, pieces: Mapping[Variant, Piece], sizes: Sizes) -> int:
    """The most that tensors of a rank take at one time."""
    walk = _Memory(program.units, sizes)
    for turn in rank.turns:
        walk.now += sizes.message * len(turn.receives)
        for op in turn.ops:
            match op:
                case Run():
                    for variant in op.variants:
                        walk.run(pieces[variant])
                case Gather() | Reshard():
                    walk.weights(op)
                case Open():
                    walk.open(op.unit)
                case Reduce():
                    walk.reduce(op.unit)
                case Send():
                    walk.now -= sizes.message
    return walk.peak + sum(state_bytes(program.units[name], program, sizes) for name in rank.units)


def state_bytes(u: UnitFacts, program: StepProgram, sizes: Sizes) -> int:
    """Bytes of a unit that a rank holds between steps, on the device: what `unit.allocate` allocates."""
    plan, residency = program.plan, u.residency
    weights = 0 if residency.reshard_after_forward else u.numel * sizes.compute
    master = 0 if residency.shares_master or plan.offload else u.shard * sizes.master
    source = u.shard * sizes.compute if plan.offload and residency.reshard_after_forward else 0
    gradients = (u.numel if residency.holds_full_grad else u.shard) * sizes.master
    of_state = sum((spec.dtype or plan.master).itemsize for spec in plan.spec) + (sizes.master if plan.ema else 0)
    return weights + master + source + gradients + (0 if plan.offload else u.shard * of_state)


def context_bytes(cfg: Config) -> int:
    """Bytes of the rotary tables (`model.rope.rope_table`): one for the run, or one for each microbatch where positions
    differ."""
    t, pack = cfg.train, cfg.data.pack
    if cfg.model.alibi:
        return 0
    positions = t.seq_len // cfg.mesh.cp * (resolved(t.micro_batch) if pack else 1)
    width = torch.promote_types(DTYPES[cfg.precision.compute], torch.float32).itemsize
    angles = resolved(cfg.model.head_dim) // 2
    return positions * 3 * angles * width * (cfg.microbatches if pack or cfg.mesh.cp > 1 else 1)


class _Memory:
    """Follows what a step holds beside the state.

    Attributes:
        now, peak: bytes.
        opened: units with an unsharded gradient.
        reducing: bytes of the gradient whose reduction is in progress.
    """

    def __init__(self, units: Mapping[str, UnitFacts], sizes: Sizes):
        self.units, self.sizes = units, sizes
        self.now = self.peak = self.reducing = 0
        self.opened: set[str] = set()

    def run(self, piece: Piece) -> None:
        self.peak = max(self.peak, self.now + piece.peak_bytes)
        self.now += piece.kept_bytes

    def weights(self, op: Gather | Reshard) -> None:
        u = self.units[op.unit]
        if u.residency.reshard_after_forward:
            self.now += (1 if isinstance(op, Gather) else -1) * u.numel * self.sizes.compute
            self.peak = max(self.peak, self.now)

    def open(self, name: str) -> None:
        if name not in self.opened:
            self.opened.add(name)
            self.now += self.units[name].numel * self.sizes.master
            self.peak = max(self.peak, self.now)

    def reduce(self, name: str) -> None:
        """The gradient is held until the next unit's reduction has begun."""
        self.now -= self.reducing
        self.reducing = 0
        if name in self.opened:
            self.opened.remove(name)
            self.reducing = self.units[name].numel * self.sizes.master
