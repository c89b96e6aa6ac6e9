"""Parameter groups: a parameter's name and shape choose the factor of its learning rate and its weight decay."""

from typing import NamedTuple

from ndtrain.config import OptimConfig
from ndtrain.config.name_patterns import factor_of
from ndtrain.config.registry import get
from ndtrain.mesh.sharding import FlatLayout, TensorLayout, Tensors
from ndtrain.optim import Optimizer


class ParamGroup(NamedTuple):
    """The settings that all tensors of a group share.

    Attributes:
        kind: the tensors that the optimizer updates alike.
        lr_mult: the factor of the learning rate.
        weight_decay: 0 for vectors.
    """

    kind: Tensors
    lr_mult: float
    weight_decay: float


def param_group(cfg: OptimConfig, tensor: TensorLayout) -> ParamGroup:
    """Return the group of a tensor."""
    optimizer: type[Optimizer] = get("optimizer", cfg.name)
    decay = cfg.weight_decay * factor_of(cfg.wd_mult, tensor.name) if len(tensor.dims) > 1 else 0.0
    return ParamGroup(optimizer.kind_of(tensor), factor_of(cfg.lr_mult, tensor.name), decay)


def groups_of_shard(cfg: OptimConfig, layout: FlatLayout) -> list[tuple[ParamGroup, slice]]:
    """Return the elements of this rank's part of a flat buffer by groups, as slices that count from its start."""
    return layout.grouped(*layout.own, lambda t: param_group(cfg, t))
