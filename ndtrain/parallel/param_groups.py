"""Parameter groups: a parameter's name and shape choose the factor of its learning rate and its weight decay."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from ndtrain.arguments import near
from ndtrain.config import ConfigError, OptimConfig


class ParamGroup(NamedTuple):
    """What is the same for all tensors of a group.

    Attributes:
        lr_mult: the factor of the learning rate.
        weight_decay: 0 for vectors.
    """

    lr_mult: float
    weight_decay: float


def param_group(cfg: OptimConfig, name: str, ndim: int) -> ParamGroup:
    """The group of a tensor with so many dims."""
    decay = cfg.weight_decay * _factor(cfg.wd_mult, name) if ndim > 1 else 0.0
    return ParamGroup(_factor(cfg.lr_mult, name), decay)


def _factor(of_pattern: Mapping[str, float], name: str) -> float:
    """That of the last pattern that the name matches, so that an override goes before what a recipe says."""
    matching = [factor for pattern, factor in of_pattern.items() if fnmatchcase(name, pattern)]
    return matching[-1] if matching else 1.0


def check_patterns(cfg: OptimConfig, names: Iterable[str]) -> None:
    """Every pattern has to match the name of a parameter.

    Raises:
        ConfigError: one does not, as a misspelt one would not.
    """
    names = list(names)
    for key, of_pattern in (("lr_mult", cfg.lr_mult), ("wd_mult", cfg.wd_mult)):
        for pattern in of_pattern:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(
                    f"optim.{key}: no parameter's name matches {pattern}; {near(pattern, names)}"
                    f"names are as in a checkpoint, e.g. {names[-1]}"
                )
