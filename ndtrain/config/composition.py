"""How a `Config` comes from `conf/`, `recipes/`, plugins and the command line."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ndtrain.config.composition_errors import one_line, wrong_configuration
from ndtrain.config.keys import conf_dir
from ndtrain.config.overrides import check_overrides
from ndtrain.config.registry import KINDS, Part, joined, own_keys, plugin_parts
from ndtrain.config.schema import Config, ConfigError


def compose(*overrides: str) -> Config:
    """The configuration of a run: `compose("recipe=llama_small", "mesh.fsdp=2")`. `Trainer` resolves it.

    Raises:
        ConfigError: as `load_config`, and for a list of overrides in place of several.
    """
    if others := [type(o).__name__ for o in overrides if not isinstance(o, str)]:
        raise ConfigError(f"compose takes overrides as strings, not a {others[0]}: compose(*overrides)")
    return load_config(list(overrides))


def load_config(overrides: list[str], search: list[str] | None = None) -> Config:
    """Composes `conf/config.yaml` with `overrides` (Hydra's command-line grammar) into a typed `Config`.

    `search` lists further config folders, which may hold recipes of the user's own under `recipe/`.

    Raises:
        ConfigError: an unknown key or option (the near miss is named), a value of the wrong type, or a plugin that
            cannot be loaded.
    """
    return compose_checked(check_overrides(overrides, search), search)


def compose_checked(overrides: list[str], search: Sequence[str] | None = None) -> Config:
    """As `load_config`, of overrides that `check_overrides` has returned.

    Raises:
        ConfigError: a value of the wrong type, or a file that cannot be composed.
    """
    register_schema()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            cfg = hydra_compose("config", overrides=overrides + search_path(search), return_hydra_config=True)
        with _hydra_values(cfg):
            return _typed(cfg, _keys_of(overrides))
    except ConfigError:
        raise
    except Exception as error:
        if not wrong_configuration(error, overrides):
            raise
        raise ConfigError(one_line(error, search, overrides)) from error


def search_path(folders: Sequence[str] | None) -> list[str]:
    """The override that makes Hydra look into these folders too; none without folders."""
    paths = ",".join(f"'file://{Path(folder).resolve()}'" for folder in folders or [])
    return [f"hydra.searchpath=[{paths}]"] if paths else []


@contextmanager
def _hydra_values(cfg: DictConfig) -> Iterator[None]:
    """Within it `${hydra:...}` has its values."""
    shared = HydraConfig.instance()
    before = shared.cfg
    shared.set_config(cfg)
    try:
        yield
    finally:
        shared.cfg = before


def to_config(cfg: DictConfig, given: Iterable[str] | None = None) -> Config:
    """A composed DictConfig as a plain typed `Config`; merging it again refuses keys that `+key=` smuggled in.

    Args:
        given: the keys that the user has overridden; None: those of the job that Hydra runs, if it does.

    Raises:
        ConfigError: a key, value or interpolation is wrong.
    """
    if given is None:
        given = _keys_of(HydraConfig.get().overrides.task) if HydraConfig.initialized() else ()
    try:
        return _typed(cfg, given)
    except OmegaConfBaseException as error:
        raise ConfigError(one_line(error)) from error


def _typed(cfg: DictConfig, given: Iterable[str]) -> Config:
    container = OmegaConf.to_container(cfg, resolve=False)
    container.pop("hydra", None)
    parts = _chosen_parts(container)
    _drop_unused_defaults(container, parts)
    made = OmegaConf.to_object(OmegaConf.merge(_schema(parts), container))
    made.interpolated = dict(_interpolations(container))
    return made.with_given(given)


def _keys_of(overrides: Iterable[str]) -> frozenset[str]:
    """The keys of overrides in Hydra's grammar."""
    return frozenset(o.partition("=")[0].lstrip("+~") for o in overrides)


def _interpolations(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, text) of every value whose text holds an interpolation."""
    for name, value in node.items():
        if isinstance(value, dict):
            yield from _interpolations(value, f"{prefix}{name}.")
        elif "${" in str(value):
            yield f"{prefix}{name}", str(value)


def to_yaml(cfg: Config) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(cfg), resolve=True)


# ------------------------------------------------------------------------------------------------------------ schema


def register_schema() -> None:
    """Makes the schema, and the options that plugins add to groups, known to Hydra."""
    store = ConfigStore.instance()
    schema = _schema(plugin_parts("callback", "attention_mod"))
    store.store(name="schema", node=schema)
    for part in plugin_parts("optimizer", "source", "logger"):
        node = OmegaConf.structured(part.config or KINDS[part.kind].base)
        store.store(group=KINDS[part.kind].section, name=part.name, node=_named(node, part.name))
    for part in plugin_parts("family"):
        if part.config:  # with the keys of attention mods, which the schema's own model has
            node = OmegaConf.structured(joined([part.config, OmegaConf.get_type(schema.model)]))
            store.store(group="model", name=part.name, node=_named(node, part.name, key="model_type"))


def _named(node: DictConfig, name: str, key: str = "name") -> DictConfig:
    """What a group's option stands for: the fields of a part's config with their defaults, and its name."""
    node[key] = name
    return node


def _schema(parts: Iterable[Part]) -> DictConfig:
    """The schema with the configs of these parts in their sections."""
    schema, configs = OmegaConf.structured(Config), {}
    for part in parts:
        if part.kind == "callback" and part.config:
            schema.callbacks[part.name] = OmegaConf.structured(part.config)
        elif part.config:
            configs.setdefault(KINDS[part.kind].section, []).append(part.config)
    for section, classes in configs.items():
        schema[section] = OmegaConf.structured(joined(classes))
    return schema


def _chosen_parts(container: dict[str, Any]) -> list[Part]:
    """The plugins' parts that a composed configuration selects."""

    def selects(part: Part, key: str) -> bool:
        value = container.get(KINDS[part.kind].section, {}).get(key)
        return part.name in value if isinstance(value, list) else part.name == value

    named = [part for part in plugin_parts("optimizer", "source", "logger") if selects(part, "name")]
    families = [part for part in plugin_parts("family") if selects(part, "model_type")]
    mods = [part for part in plugin_parts("attention_mod") if selects(part, "attention")]
    return [*plugin_parts("callback"), *named, *families, *mods]


def _drop_unused_defaults(container: dict[str, Any], chosen: Iterable[Part]) -> None:
    """Takes the keys of attention mods that no key selects out of `model`, where they have their defaults: a mod is no
    option of a group, so the schema has the keys of all loaded mods while a configuration is composed."""
    used = {key for part in chosen if part.kind != "callback" for key in own_keys(part.kind, part.name)}
    for part in plugin_parts("attention_mod"):
        defaults = OmegaConf.to_container(OmegaConf.structured(part.config)) if part.config else {}
        for key in own_keys(part.kind, part.name):
            if key not in used and container["model"].get(key) == defaults[key]:
                container["model"].pop(key, None)
