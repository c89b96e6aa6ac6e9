"""Decorators with which a user's module adds parts to ndtrain. `plugins=[my_package.my_module]` loads the module; an
installed package announces its own in the entry point group `ndtrain.plugins`.

A part may have a configuration of its own, a dataclass that extends the section's (`OptimConfig` for an optimizer). Its
fields are then keys of that section, with types, defaults and near-miss errors like the others.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

from ndtrain.config.registry import decorator, register

Part = TypeVar("Part")


class _Family(Protocol):
    """What `register_family` reads of a `ndtrain.model.families.Family`."""

    @property
    def model_type(self) -> str: ...


Family = TypeVar("Family", bound=_Family)


def register_family(family: Family, config: type | None = None) -> Family:
    """Registers a `ndtrain.model.families.Family` under its `model_type`. Returns it.

    Args:
        config: a dataclass that extends `ModelConfig`; its fields are those of the family's config.json.
    """
    register("family", family.model_type, family, config)
    return family


def register_attention_mod(name: str, config: type | None = None) -> Callable[[Part], Part]:
    """Registers what attention scores go through, which `model.attention=name` selects: a function (model config) ->
    `ndtrain.model.attention.AttentionMod`.

    Args:
        config: a dataclass that extends `ModelConfig`; its fields are keys of `model` and stand in config.json.
    """
    return decorator("attention_mod", name, config)


def register_objective(name: str, config: type | None = None) -> Callable[[Part], Part]:
    """Registers a subclass of `ndtrain.model.objective.Objective`; `objective=name` selects it.

    Args:
        config: a dataclass that extends `ObjectiveConfig`; its fields are keys of `objective`.
    """
    return decorator("objective", name, config)


def register_optimizer(name: str, config: type | None = None) -> Callable[[Part], Part]:
    """Registers a subclass of `ndtrain.optim.Optimizer`; `optim=name` selects it."""
    return decorator("optimizer", name, config)


def register_lr_schedule(name: str) -> Callable[[Part], Part]:
    """Registers a learning-rate schedule, which `optim.schedule=name` selects: a function (step, cfg, end) -> factor
    in [0, 1] between `optim.min_lr` and `optim.lr`, for a step after warmup; `end` is the schedule's last step."""
    return decorator("lr_schedule", name)


def register_source(name: str, config: type | None = None) -> Callable[[Part], Part]:
    """Registers a data source, which `data=name` selects: a function (data config) -> `ndtrain.data.Corpus`."""
    return decorator("source", name, config)


def register_logger(name: str, config: type | None = None) -> Callable[[Part], Part]:
    """Registers a logger, which `logger=name` selects: a class made with (config, run folder, warn), with methods
    log(row) and finish(exit code)."""
    return decorator("logger", name, config)


def register_callback(name: str, config: type | None = None) -> Callable[[Part], Part]:
    """Registers a subclass of `ndtrain.engine.callbacks.Callback`. Every run that loads the plugin makes one.

    Args:
        config: a dataclass; its fields are the keys `callbacks.name.*`, and the callback is made with an instance.
    """
    return decorator("callback", name, config)
