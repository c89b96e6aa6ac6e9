"""AdamW on this rank's shards, and an average of the weights."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ndtrain.config import OptimConfig
from ndtrain.distributed.mesh import Mesh
from ndtrain.optim.adamw import Piece, RoundedAdamW
from ndtrain.optim.grad_stats import GradStats, GradStatsReducer
from ndtrain.optim.offload import OffloadCopier
from ndtrain.parallel.fsdp import ShardedUnits, Unit


class Optimizer:
    """AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101) over the shards of all units, and with `optim.ema` an
    exponential average of the weights.

    Each unit's shard is at most two tensors, matrices (decayed) and vectors (not): slices of the flat buffers. All are
    updated together, or where the state is offloaded unit by unit on the host.

    Attributes:
        judge: makes the verdict on a step's gradients.
        skipped: how many steps have been, a scalar beside the state. The bias of the moments is corrected for those
            made.
    """

    def __init__(self, units: ShardedUnits, cfg: OptimConfig, mesh: Mesh):
        self.cfg, self.reduce_stats = cfg, GradStatsReducer(units, mesh)
        self.skipped = torch.zeros((), dtype=torch.float32, device=units.state_device)
        every = list(units.units.values())
        self._averaged = [(u.ema, u.master) for u in every if u.ema is not None and u.ema.numel()]
        self._copier = OffloadCopier(units) if units.offload else None
        if self._copier:
            shards = [([u], [g]) for u, g in zip(every, self._copier.gradients, strict=True)]
        else:
            shards = [(every, [u.grad for u in every])]
        self._shards = [_adamw(us, units.index, grads, cfg) for us, grads in shards]

    def step(self, step: int, lr: float, stats: GradStats) -> None:
        """Clips and makes update number `step` (from 1); where something was not finite, changes nothing. Offloaded, it
        waits for the gradients, and so for the verdict."""
        skip = (~stats.finite).float().to(self.skipped.device)
        grad_scale = None  # what the gradients are divided by
        if self.cfg.clip is not None:
            grad_scale = ((stats.norm + 1e-6) / self.cfg.clip).clamp(min=1).to(skip.device)
        made = step - 1 - self.skipped
        update = lambda i: _update(self._shards[i], step, made, lr, skip, grad_scale)
        self._copier.run(update) if self._copier else update(0)
        self.skipped += skip
        if self._averaged:
            part = (1 - self.cfg.ema) * (1 - skip.to(self._averaged[0][0].dtype))
            for average, weight in self._averaged:
                average.lerp_(weight, part)


def _adamw(units: Sequence[Unit], index: int, grads: Sequence[Tensor], cfg: OptimConfig) -> torch.optim.Optimizer:
    """Over the shards of some units, whose gradients come in `grads`."""
    decayed, plain, state, pieces = [], [], {}, {}
    for unit, grad in zip(units, grads, strict=True):
        start, stop = unit.layout.bounds(index)
        cut = unit.layout.decayed_in(start, stop)
        for kind, span in ((decayed, slice(0, cut)), (plain, slice(cut, stop - start))):
            weight = unit.master[span]
            if not weight.numel():
                continue
            weight.grad = grad[span]
            kind.append(weight)
            state[weight] = {
                "step": torch.zeros((), dtype=torch.float32, device=weight.device),
                "exp_avg": unit.exp_avg[span],
                "exp_avg_sq": unit.exp_avg_sq[span],
            }
            pieces[weight] = _pieces(unit, start + span.start, start + span.stop)
    by_group = [{"params": decayed, "weight_decay": cfg.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    groups, common = [g for g in by_group if g["params"]], {"lr": cfg.lr, "betas": tuple(cfg.betas), "eps": cfg.eps}
    if cfg.state_dtype == "bf16":
        adamw = RoundedAdamW(groups, pieces, **common)
    else:
        adamw = torch.optim.AdamW(groups, **common, fused=True)
    adamw.state.update(state)
    return adamw


def _pieces(unit: Unit, start: int, stop: int) -> list[Piece]:
    """The tensors of the flat buffer's elements [start, stop)."""
    found = unit.layout.tensors_in(start, stop)
    return [Piece(slice(a - start, b - start), t, a - unit.layout.offsets[t.name]) for t, a, b in found]


def _update(
    adamw: torch.optim.Optimizer, step: int, made: Tensor, lr: float, skip: Tensor, grad_scale: Tensor | None
) -> None:
    """One update of some shards, of which `made` were made before; none where `skip` is 1."""
    adamw.found_inf = skip  # as GradScaler hands it to the fused kernel, which then does not update
    for group in adamw.param_groups:
        group |= {"lr": lr, "number": step}
    weights = [w for group in adamw.param_groups for w in group["params"]]
    if (
        grad_scale is not None and weights[0].dtype == torch.float32
    ):  # again as GradScaler does: one pass over them less
        adamw.grad_scale = grad_scale.float()
    elif grad_scale is not None:  # that kernel takes an fp32 scale only
        torch._foreach_div_([w.grad for w in weights], [grad_scale] * len(weights))
    steps = [adamw.state[w]["step"] for w in weights]
    torch._foreach_copy_(steps, [made] * len(steps))  # the optimizer counts this one itself
    adamw.step()
