"""The optimizer over this rank's shards, and an average of the weights."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ndtrain.config import OptimConfig
from ndtrain.config.registry import get
from ndtrain.mesh.mesh import Mesh
from ndtrain.optim import Optimizer, OptimTensor, TensorSlice, Update
from ndtrain.parallel.fsdp import ShardedUnits
from ndtrain.parallel.grad_stats import GradStats, GradStatsReducer
from ndtrain.parallel.offload import OffloadCopier
from ndtrain.parallel.param_groups import groups_of_shard, param_group
from ndtrain.parallel.unit import Unit
from ndtrain.parallel.whole_tensors import WholeTensors


class ShardedOptimizer:
    """Updates the shards of all units, and with `optim.ema` an exponential average of the weights.

    An elementwise optimizer gets each unit's shard as few slices of the flat buffers, each of one parameter group.
    Without `optim.lr_mult` and `wd_mult` there are two groups: matrices (decayed) and vectors (not). All slices are
    updated together. If the state is offloaded, they are updated unit by unit on the host. An optimizer of whole
    tensors gets each tensor on the rank that owns it (`WholeTensors`).

    Attributes:
        reduce_stats: computes the statistics of a step's gradients.
        skipped: the number of steps that have been skipped, a scalar on the state's device. Bias correction of the
            moments counts only the updates made.
    """

    def __init__(self, units: ShardedUnits, cfg: OptimConfig, mesh: Mesh):
        self.cfg, self.units, self.reduce_stats = cfg, units, GradStatsReducer(units, mesh)
        self.skipped = torch.zeros((), dtype=torch.float32, device=units.state_device)
        kind: type[Optimizer] = get("optimizer", cfg.name)
        self._averaged = [(u.ema, u.master) for u in units.units.values() if u.ema is not None and u.ema.numel()]
        if kind.whole_tensors:
            self._update_all = _whole_update(kind(cfg), units.whole_tensors, cfg)
        elif units.offload:
            self._update_all = _offloaded_update(kind, units, cfg)
        else:
            self._update_all = _resident_update(kind(cfg), units, cfg)

    def step(self, step: int, lr: float, stats: GradStats) -> None:
        """Clip the gradients and make update number `step` (from 1). If something was not finite, change nothing. With
        offload the host waits for the gradients, and therefore for the statistics."""
        found_inf = (~stats.finite).float().to(self.skipped.device)
        grad_scale = None
        if self.cfg.clip is not None:
            grad_scale = ((stats.norm + 1e-6) / self.cfg.clip).clamp(min=1).to(found_inf.device)
        for hook in list(self.units.before_update):
            hook()
        self._update_all(Update(step, step - 1 - self.skipped, lr, found_inf, grad_scale))
        self.skipped += found_inf
        if self._averaged:
            part = (1 - self.cfg.ema) * (1 - found_inf.to(self._averaged[0][0].dtype))
            for average, weight in self._averaged:
                average.lerp_(weight, part)


def _resident_update(optimizer: Optimizer, units: ShardedUnits, cfg: OptimConfig) -> Callable[[Update], None]:
    tensors = [t for u in units.units.values() for t in _tensors(u, u.grad, cfg)]
    return lambda update: optimizer.step(tensors, update) if tensors else None  # a shard may be padding alone


def _offloaded_update(kind: type[Optimizer], units: ShardedUnits, cfg: OptimConfig) -> Callable[[Update], None]:
    copier = OffloadCopier(units)
    shards = [_tensors(u, grad, cfg) for u, grad in zip(units.units.values(), copier.gradients, strict=True)]
    optimizers = [kind(cfg) for _ in shards]
    return lambda update: copier.run(lambda i: optimizers[i].step(shards[i], update) if shards[i] else None)


def _whole_update(optimizer: Optimizer, whole: WholeTensors, cfg: OptimConfig) -> Callable[[Update], None]:
    groups = {t.name: param_group(cfg, t.name, len(t.shape)) for t in whole.tensors}

    def step(update: Update) -> None:
        def update_one(name: str, weight: Tensor, grad: Tensor, state: dict[str, Tensor]) -> None:
            tensor = OptimTensor(weight, grad, state, groups[name].weight_decay, lr_mult=groups[name].lr_mult)
            optimizer.step([tensor], update)

        whole.update_each(update_one)

    return step


def _tensors(unit: Unit, grad: Tensor, cfg: OptimConfig) -> Sequence[OptimTensor]:
    """Return the shard of a unit by parameter groups, with the gradient in `grad`."""
    start, _ = unit.layout.own
    made = []
    for group, span in groups_of_shard(cfg, unit.layout):
        state = {name: x[span] for name, x in unit.state.items()}
        slices = _slices(unit, start + span.start, start + span.stop)
        made.append(OptimTensor(unit.master[span], grad[span], state, group.weight_decay, slices, group.lr_mult))
    return made


def _slices(unit: Unit, start: int, stop: int) -> tuple[TensorSlice, ...]:
    """Return the tensors of the flat buffer's elements [start, stop)."""
    spans = unit.layout.tensors_in(start, stop)
    return tuple(TensorSlice(slice(a - start, b - start), t, a - unit.layout.offsets[t.name]) for t, a, b in spans)
