"""Parameter groups: a parameter's name and shape choose the factor of its learning rate and its weight decay."""

from typing import NamedTuple

from ndtrain.config import OptimConfig
from ndtrain.config.name_patterns import factor_of
from ndtrain.config.registry import get
from ndtrain.config.schema import resolved
from ndtrain.mesh.sharding import FlatLayout, TensorLayout
from ndtrain.optim import Optimizer


class ParamGroup(NamedTuple):
    """The settings that all tensors of a group share.

    Attributes:
        lr_mult: the factor of the learning rate.
        weight_decay: 0 for vectors.
    """

    lr_mult: float
    weight_decay: float


def param_group(cfg: OptimConfig, tensor: TensorLayout) -> ParamGroup:
    """Return the group of a tensor.

    muP (`optim.mup_width`) divides the learning rate of a tensor by a power of the width. Its weight decay is
    multiplied by this power, so that a step decays weights by the same fraction at every width.
    """
    of_width = _factor_of_width(cfg, tensor)
    decay = cfg.weight_decay * factor_of(cfg.wd_mult, tensor.name) / of_width if len(tensor.dims) > 1 else 0.0
    return ParamGroup(factor_of(cfg.lr_mult, tensor.name) * of_width, decay)


def _factor_of_width(cfg: OptimConfig, tensor: TensorLayout) -> float:
    if cfg.mup_width is None or not (tensor.hidden or tensor.readout):
        return 1.0
    optimizer: type[Optimizer] = get("optimizer", cfg.name)
    return cfg.mup_width ** -(resolved(optimizer.width_power(cfg)) if tensor.hidden else 1)


def groups_of_shard(cfg: OptimConfig, layout: FlatLayout) -> list[tuple[ParamGroup, slice]]:
    """Return the elements of this rank's part of a flat buffer by groups, as slices that count from its start. A slice
    has tensors that the optimizer updates alike."""
    optimizer: type[Optimizer] = get("optimizer", cfg.name)
    alike = layout.grouped(*layout.own, lambda t: (optimizer.kind_of(t), param_group(cfg, t)))
    return [(group, at) for (_, group), at in alike]
