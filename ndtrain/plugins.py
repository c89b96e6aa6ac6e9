"""Decorators that add a user's parts to ndtrain.

`plugins=[my_package.my_module]` loads a module with such parts. An installed package lists its plugins in the entry
point group `ndtrain.plugins`.

A part may have its own configuration, a dataclass that extends the dataclass of its section (`OptimConfig` for an
optimizer). Its fields become keys of that section, with types, defaults and suggestions for misspelt keys.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

from ndtrain.config.registry import decorator, register

Part = TypeVar("Part")


class _Family(Protocol):
    """The attribute of a `ndtrain.model.families.Family` that `register_family` reads."""

    @property
    def model_type(self) -> str: ...


Family = TypeVar("Family", bound=_Family)


def register_family(family: Family, config: type | None = None) -> Family:
    """Register a `ndtrain.model.families.Family` under its `model_type`, and return it.

    Args:
        config: a dataclass that extends `ModelConfig` with the fields of the family's config.json.
    """
    register("family", family.model_type, family, config)
    return family


def register_attention_mod(name: str, config: type | None = None) -> Callable[[Part], Part]:
    """Register a modification of the attention scores or mask; `model.attention=name` selects it.

    It is a function (model config) -> `ndtrain.model.attention.AttentionMod`.

    Args:
        config: a dataclass that extends `ModelConfig`; its fields are keys of `model` and are written to config.json.
    """
    return decorator("attention_mod", name, config)


def register_objective(name: str, config: type | None = None) -> Callable[[Part], Part]:
    """Register a subclass of `ndtrain.model.objective.Objective`; `objective=name` selects it.

    Args:
        config: a dataclass that extends `ObjectiveConfig`; its fields are keys of `objective`.
    """
    return decorator("objective", name, config)


def register_optimizer(name: str, config: type | None = None) -> Callable[[Part], Part]:
    """Register a subclass of `ndtrain.optim.Optimizer`; `optim=name` selects it."""
    return decorator("optimizer", name, config)


def register_lr_schedule(name: str) -> Callable[[Part], Part]:
    """Register a learning-rate schedule; `optim.schedule=name` selects it.

    It is a function (step, cfg, end) -> factor in [0, 1]: 0 means `optim.min_lr`, 1 means `optim.lr`. It is called for
    the steps after warmup; `end` is the last step of the schedule.
    """
    return decorator("lr_schedule", name)


def register_source(name: str, config: type | None = None) -> Callable[[Part], Part]:
    """Register a data source; `data=name` selects it. It is a function (data config) -> `ndtrain.data.Corpus`."""
    return decorator("source", name, config)


def register_logger(name: str, config: type | None = None) -> Callable[[Part], Part]:
    """Register a logger; `logger=name` selects it.

    It is a class with the constructor arguments (config, run folder, warn) and the methods log(row) and
    finish(exit code).
    """
    return decorator("logger", name, config)


def register_callback(name: str, config: type | None = None) -> Callable[[Part], Part]:
    """Register a subclass of `ndtrain.engine.callbacks.Callback`. Every run that loads the plugin creates an instance.

    Args:
        config: a dataclass; its fields are the keys `callbacks.name.*`. The callback's constructor gets an instance.
    """
    return decorator("callback", name, config)
