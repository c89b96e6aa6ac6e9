"""AdamW on this rank's shards, the global gradient norm from layouts, and learning-rate schedules."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ndtrain.collectives import all_gather_row
from ndtrain.config import OptimConfig
from ndtrain.layout import MODEL_AXES
from ndtrain.mesh import Mesh
from ndtrain.parallel.fsdp import ShardedUnits

# ------------------------------------------------------------------------------------------------- learning rate


def learning_rate(cfg: OptimConfig, step: int, total_steps: int) -> float:
    """The rate of the update that makes step `step` (from 1).

    Linear warmup to `lr` over `warmup` steps, then by `schedule` down to `min_lr` at `decay_steps`: constant, linear,
    cosine, or wsd (constant, then linear over the last fraction `wsd_decay`; Hu et al., 2024, arXiv:2404.06395).
    """
    if step <= cfg.warmup:
        return cfg.lr * step / cfg.warmup
    end = total_steps if cfg.decay_steps is None else cfg.decay_steps
    start = cfg.warmup if cfg.schedule != "wsd" else max(cfg.warmup, end - round(cfg.wsd_decay * end))
    done = min(1.0, max(0.0, (step - start) / max(1, end - start)))
    left = {
        "constant": 1.0,
        "linear": 1 - done,
        "wsd": 1 - done,
        "cosine": (1 + math.cos(math.pi * done)) / 2,
    }[cfg.schedule]
    return cfg.min_lr + (cfg.lr - cfg.min_lr) * left


# ------------------------------------------------------------------------------------------------------ the update


class Verdict(NamedTuple):
    """What the whole mesh makes of a step's gradients; the same bits on every rank, fp64 and on the device.

    Attributes:
        loss: summed over all ranks.
        norm: the 2-norm of the whole model's gradient, each element counted once.
        finite: whether every rank's loss and the norm are.
    """

    loss: Tensor
    norm: Tensor
    finite: Tensor


class Optimizer:
    """AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101) over the shards of all units, and with `optim.ema` an
    exponential average of the weights.

    Each unit's shard is at most two tensors, matrices (decayed) and vectors (not): slices of the flat buffers.

    Attributes:
        skipped: how many steps have been, a scalar on the device. The bias of the moments is corrected for those made.
    """

    def __init__(self, units: ShardedUnits, cfg: OptimConfig, mesh: Mesh):
        self.cfg, self.mesh, self.device = cfg, mesh, units.device
        self.skipped = torch.zeros((), dtype=torch.float32, device=units.device)
        # of replicas, whose shards are the same, one is asked: every rank then adds up the same numbers
        self._one_replica = torch.tensor(mesh.spec.groups(*MODEL_AXES)[0], device=units.device)
        self._averaged = [(u.ema, u.master) for u in units.units.values() if u.ema is not None and u.ema.numel()]
        self._steps: list[Tensor] = []
        self._counted = _counted(units)
        decayed, plain, state = [], [], {}
        for unit in units.units.values():
            cut = unit.layout.decayed_in(*unit.layout.bounds(units.index))
            for kind, span in ((decayed, slice(0, cut)), (plain, slice(cut, None))):
                weight = unit.master[span]
                if weight.numel():
                    weight.grad = unit.grad[span]
                    kind.append(weight)
                    self._steps.append(torch.zeros((), dtype=torch.float32, device=weight.device))
                    state[weight] = {
                        "step": self._steps[-1],
                        "exp_avg": unit.exp_avg[span],
                        "exp_avg_sq": unit.exp_avg_sq[span],
                    }
        self._weights = decayed + plain
        by_group = [{"params": decayed, "weight_decay": cfg.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(
            [g for g in by_group if g["params"]], lr=cfg.lr, betas=tuple(cfg.betas), eps=cfg.eps, fused=True
        )
        self._adamw.state.update(state)
        self._fuses_clip = bool(self._weights) and self._weights[0].dtype == torch.float32

    def judge(self, loss_share: Tensor) -> Verdict:
        """Asks every rank for its loss and for the norm of the gradients it owns."""
        mine = torch.zeros(2, dtype=torch.float64, device=self.device)
        for x in self._counted:
            mine[0] += _square_sum(x)
        mine[1] = loss_share
        rows, flight = all_gather_row(mine, self.mesh.world)
        flight.wait()
        loss, norm = rows[:, 1].sum(), rows[self._one_replica, 0].sum().sqrt()
        return Verdict(loss, norm, rows.isfinite().all())

    def step(self, step: int, lr: float, verdict: Verdict) -> None:
        """Clips and makes update number `step` (from 1); where something was not finite, changes nothing."""
        skip = (~verdict.finite).float()
        self._adamw.found_inf = skip  # as GradScaler hands it to the fused kernel, which then does not update
        if self.cfg.clip is not None:
            self._clip((verdict.norm + 1e-6) / self.cfg.clip)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        torch._foreach_zero_(self._steps)
        torch._foreach_add_(self._steps, step - 1 - self.skipped)  # the optimizer counts this one itself
        self._adamw.step()
        self.skipped += skip
        self._average(skip)

    def _clip(self, excess: Tensor) -> None:
        """Divides the gradients by `excess`, where that is more than 1."""
        excess = excess.clamp(min=1)
        if self._fuses_clip:  # again as GradScaler does: one pass over the gradients less
            self._adamw.grad_scale = excess.float()
        else:  # that kernel takes an fp32 scale only
            torch._foreach_div_([w.grad for w in self._weights], excess)

    def _average(self, skip: Tensor) -> None:
        if self._averaged:
            part = (1 - self.cfg.ema) * (1 - skip.to(self._averaged[0][0].dtype))
            for average, weight in self._averaged:
                average.lerp_(weight, part)


_ROW = 4096  # elements whose norm is taken in their own precision


def _counted(units: ShardedUnits) -> list[Tensor]:
    """The gradients that this rank counts in the norm, in few slices: all that it owns."""
    spans: list[tuple[int, int]] = []
    for unit in units.units.values():
        buffer, at = unit.grad_at
        for s in unit.layout.slices(*unit.layout.bounds(units.index), lambda t: t.owned):
            start, stop = at + s.start, at + s.stop
            if spans and spans[-1][1] == start:
                start = spans.pop()[0]
            spans.append((start, stop))
    return [buffer[start:stop] for start, stop in spans]


def _square_sum(x: Tensor) -> Tensor:
    """The sum of squares, fp64, from the norms of short rows: PyTorch's fp32 norm of 10 M elements is off by 5e-4 on
    CPU, which would make clipping depend on how the gradient is cut."""
    whole = len(x) // _ROW * _ROW
    rows = torch.linalg.vector_norm(x[:whole].view(-1, _ROW), dim=1).double().square().sum()
    return rows + x[whole:].double().square().sum()
