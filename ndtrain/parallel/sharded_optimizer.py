"""The optimizer over this rank's shards, and an average of the weights."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ndtrain.config import OptimConfig
from ndtrain.config.registry import get
from ndtrain.mesh.mesh import Mesh
from ndtrain.mesh.sharding import Tensors
from ndtrain.optim import Optimizer, OptimTensor, Update, WholeTensorOptimizer
from ndtrain.parallel.fsdp import ShardedUnits
from ndtrain.parallel.grad_stats import GradStats, GradStatsReducer
from ndtrain.parallel.offload import OffloadCopier
from ndtrain.parallel.param_groups import groups_of_shard
from ndtrain.parallel.qk_clip import QKClip
from ndtrain.parallel.unit import Unit, tensor_slices

Limit = Callable[[str], None]  # limits the attention logits by scaling the weights of a unit, given its name


class ShardedOptimizer:
    """Updates the shards of all units, and with `optim.ema` an exponential average of the weights.

    An elementwise optimizer gets each unit's shard as few slices of the flat buffers, each of one parameter group.
    Without `optim.lr_mult` and `wd_mult` there are two groups: matrices (decayed) and vectors (not). All slices are
    updated together. If the state is offloaded, they are updated unit by unit on the host.

    An optimizer that needs whole tensors has the parts of its update called one by one: `begin`, the rounds of the
    owners (`owners.py`), and `finish`.

    Attributes:
        reduce_stats: computes the statistics of a step's gradients.
        owners: the exchanges with the owners of whole tensors; None: there are none.
        owner: the optimizer that computes the directions of the tensors that this rank owns.
        skipped: the number of steps that have been skipped, a scalar on the state's device. Bias correction of the
            moments counts only the updates made.
    """

    def __init__(self, units: ShardedUnits, cfg: OptimConfig, mesh: Mesh, qk_clip: QKClip | None = None):
        self.cfg, self.units, self.reduce_stats = cfg, units, GradStatsReducer(units, mesh)
        self.skipped = torch.zeros((), dtype=torch.float32, device=units.state_device)
        kind: type[Optimizer] = get("optimizer", cfg.name)
        self._averaged = [(u.ema, u.master) for u in units.units.values() if u.ema is not None and u.ema.numel()]
        self._update: Update | None = None
        self.owners, self._qk_clip = units.owners, qk_clip
        self._shards = (_OnHost if units.offload else _OnDevice)(kind, units, cfg)
        self.owner = kind(cfg)

    def begin(self, step: int, lr: float, stats: GradStats) -> None:
        """Begin update number `step` (from 1), and prepare the gradients of whole tensors for their owners. If
        something was not finite, the update changes nothing.

        With offload the host waits for the gradients, and therefore for the statistics."""
        found_inf = (~stats.finite).float().to(self.skipped.device)
        grad_scale = None
        if self.cfg.clip is not None:
            grad_scale = ((stats.norm + 1e-6) / self.cfg.clip).clamp(min=1).to(found_inf.device)
        for hook in list(self.units.before_update):
            hook()
        self._update = Update(step, step - 1 - self.skipped, lr, found_inf, grad_scale)
        if self.owners is not None:
            self._shards.prepare(self._update)

    def compute(self, number: int) -> None:
        """Compute the directions of the whole tensors that this rank owns in a round."""
        assert self.owners is not None and isinstance(self.owner, WholeTensorOptimizer) and self._update is not None
        optimizer, update = self.owner, self._update
        self.owners.compute(number, lambda whole: optimizer.direction(whole, update))

    def finish(self) -> None:
        """Clip the gradients and update the weights, then limit the attention logits."""
        update, self._update = self._update, None
        limit = None
        if self._qk_clip is not None:
            limit = partial(self._qk_clip.scale, factor_LK=self._qk_clip.factors(update))
        self._shards.step(update, limit)
        self.skipped += update.found_inf
        if self._averaged:
            part = (1 - self.cfg.ema) * (1 - update.found_inf.to(self._averaged[0][0].dtype))
            for average, weight in self._averaged:
                average.lerp_(weight, part)


class _OnDevice:
    """Updates all shards together."""

    def __init__(self, kind: type[Optimizer], units: ShardedUnits, cfg: OptimConfig):
        self._optimizer, self._units = kind(cfg), list(units.units)
        self._tensors = [t for u in units.units.values() for t in _tensors(u, u.grad, cfg)]
        self._whole = [t for t in self._tensors if _is_whole(t, units.plan.whole)]

    def prepare(self, update: Update) -> None:
        self._optimizer.prepare(self._whole, update)

    def step(self, update: Update, limit: Limit | None) -> None:
        if self._tensors:  # a shard may be padding alone
            self._optimizer.step(self._tensors, update)
        for unit in self._units if limit else ():
            limit(unit)


class _OnHost:
    """Updates the shards unit by unit in host memory."""

    def __init__(self, kind: type[Optimizer], units: ShardedUnits, cfg: OptimConfig):
        self._copier, self._units = OffloadCopier(units), list(units.units)
        each = list(units.units.values())
        self._tensors = [_tensors(u, grad, cfg) for u, grad in zip(each, self._copier.gradients, strict=True)]
        self._whole = [[t for t in tensors if _is_whole(t, units.plan.whole)] for tensors in self._tensors]
        self._optimizers = [kind(cfg) for _ in self._tensors]

    def prepare(self, update: Update) -> None:
        self._copier.run_on_gradients(lambda i: self._whole[i] and self._optimizers[i].prepare(self._whole[i], update))

    def step(self, update: Update, limit: Limit | None) -> None:
        def of_unit(i: int) -> None:
            if self._tensors[i]:
                self._optimizers[i].step(self._tensors[i], update)
            if limit is not None:
                limit(self._units[i])

        self._copier.run(of_unit)


def _is_whole(t: OptimTensor, whole: Tensors | None) -> bool:
    return whole is not None and whole.has(t.hidden)


def _tensors(unit: Unit, grad: Tensor, cfg: OptimConfig) -> Sequence[OptimTensor]:
    """Return the shard of a unit by parameter groups, with the gradient in `grad`."""
    start, _ = unit.layout.own
    made = []
    for group, span in groups_of_shard(cfg, unit.layout):
        kinds = [name for name, at in unit.held.items() if at.start <= span.start and span.stop <= at.stop]
        state = {name: unit.part(name, span.start, span.stop - span.start) for name in kinds}
        slices = tensor_slices(unit, start + span.start, start + span.stop)
        made.append(OptimTensor(unit.master[span], grad[span], state, group.weight_decay, slices, group.lr_mult))
    return made
