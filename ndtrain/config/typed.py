"""Conversion of a composed tree of keys to a typed `Config`."""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ndtrain.config.composition_errors import one_line
from ndtrain.config.registry import GROUPED, KINDS, Part, joined, own_keys, plugin_parts
from ndtrain.config.schema import Config, ConfigError, LoggerConfig


def to_config(cfg: DictConfig, given: Iterable[str] | None = None) -> Config:
    """Convert a composed DictConfig to a typed `Config`. It is merged into the schema, which refuses keys from `+key=`.

    Args:
        given: the keys that the user has overridden. None: the overridden keys of the job that Hydra runs, if any.

    Raises:
        ConfigError: a key, value or interpolation is wrong.
    """
    if given is None:
        given = overridden(HydraConfig.get().overrides.task) if HydraConfig.initialized() else ()
    try:
        return typed(cfg, given)
    except OmegaConfBaseException as error:
        raise ConfigError(one_line(error)) from error


def typed(cfg: DictConfig, given: Iterable[str]) -> Config:
    """Convert as `to_config` does, but raise the errors of OmegaConf."""
    container = OmegaConf.to_container(cfg, resolve=False)
    container.pop("hydra", None)
    parts = _chosen_parts(container)
    _drop_unused_defaults(container, parts)
    made = OmegaConf.to_object(OmegaConf.merge(schema_with(parts), container))
    made.interpolated = dict(_interpolations(container))
    return made.with_given(given)


def overridden(overrides: Iterable[str]) -> frozenset[str]:
    """Return the keys of overrides in Hydra's grammar."""
    return frozenset(o.partition("=")[0].lstrip("+~") for o in overrides)


def _interpolations(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) of every value whose text contains an interpolation."""
    for name, value in node.items():
        if isinstance(value, dict):
            yield from _interpolations(value, f"{prefix}{name}.")
        elif "${" in str(value):
            yield f"{prefix}{name}", str(value)


def schema_with(parts: Iterable[Part]) -> DictConfig:
    """Return the schema with the configs of these parts in their sections. It is cached: callers must not change it."""
    return _schema(tuple((part.kind, part.name, part.config) for part in parts if part.config))


@lru_cache(maxsize=8)
def _schema(parts: tuple[tuple[str, str, type], ...]) -> DictConfig:
    schema, configs = OmegaConf.structured(Config), {}
    for kind, name, config in parts:
        if kind == "callback":
            schema.callbacks[name] = OmegaConf.structured(config)
        else:
            configs.setdefault(KINDS[kind].section, []).append(config)
    for section, classes in configs.items():
        schema[section] = OmegaConf.structured(joined(classes))
    return schema


def _chosen_parts(container: dict[str, Any]) -> list[Part]:
    """Return the parts of plugins that a composed configuration selects."""

    def selects(part: Part, key: str) -> bool:
        value = container.get(KINDS[part.kind].section, {}).get(key)
        return part.name in value if isinstance(value, list) else part.name == value

    named = [part for part in plugin_parts(*GROUPED) if selects(part, "name")]
    families = [part for part in plugin_parts("family") if selects(part, "model_type")]
    mods = [part for part in plugin_parts("attention_mod") if selects(part, "attention")]
    return [*plugin_parts("callback"), *named, *families, *mods]


def _drop_unused_defaults(container: dict[str, Any], chosen: Iterable[Part]) -> None:
    """Remove the keys of unselected attention mods from `model`, if they have their default values.

    A mod is not an option of a group, so the schema contains the keys of all loaded mods during composition.
    """
    used = {key for part in chosen if part.kind != "callback" for key in own_keys(part.kind, part.name)}
    for part in plugin_parts("attention_mod"):
        defaults = OmegaConf.to_container(OmegaConf.structured(part.config)) if part.config else {}
        for key in own_keys(part.kind, part.name):
            if key not in used and container["model"].get(key) == defaults[key]:
                container["model"].pop(key, None)


def store_loggers(names: list[str]) -> str:
    """Register an option of the group `logger` that selects several loggers, and return its name.

    Hydra alone would use only the name of the last logger, and would refuse two loggers with their own keys.
    """
    parts = [part for part in plugin_parts("logger") if part.name in names and part.config]
    node = OmegaConf.structured(joined([part.config for part in parts if part.config] or [LoggerConfig]))
    node.name = names
    option = "+".join(names)
    ConfigStore.instance().store(group="logger", name=option, node=node)
    return option
