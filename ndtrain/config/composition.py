"""Composition of a `Config` from `conf/`, `recipes/`, plugins and the command line."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from ndtrain.config.composition_errors import one_line, wrong_configuration
from ndtrain.config.keys import conf_dir
from ndtrain.config.overrides import check_overrides
from ndtrain.config.registry import GROUPED, KINDS, joined, plugin_parts
from ndtrain.config.saved_run import SavedRun
from ndtrain.config.schema import Config, ConfigError
from ndtrain.config.typed import overridden, schema_with, typed


def compose(*overrides: str) -> Config:
    """Compose the configuration of a run: `compose("recipe=llama_small", "mesh.fsdp=2")`. `Trainer` resolves it.

    Raises:
        ConfigError: as in `load_config`, or an override is not a string (for example a list of overrides).
    """
    if others := [type(o).__name__ for o in overrides if not isinstance(o, str)]:
        raise ConfigError(f"overrides must be strings, not a {others[0]}: call compose(*overrides)")
    return load_config(list(overrides))


def load_config(overrides: list[str], search: list[str] | None = None, base: SavedRun | None = None) -> Config:
    """Compose `conf/config.yaml` and `overrides` (in Hydra's command-line grammar) into a typed `Config`.

    Args:
        search: additional config folders, which may contain the user's own recipes under `recipe/`.
        base: a saved configuration, used instead of a recipe. None: if the overrides resume a run and name no recipe,
            the configuration of that run.

    Raises:
        ConfigError: an unknown key or option, a value of the wrong type, a plugin that cannot be loaded, or a saved
            configuration that cannot be used. For an unknown name the message suggests the closest match.
    """
    return compose_checked(check_overrides(overrides, search, base=base), search)


def compose_checked(overrides: list[str], search: Sequence[str] | None = None) -> Config:
    """Compose a `Config` as `load_config` does, from overrides that `check_overrides` has returned.

    Raises:
        ConfigError: a value of the wrong type, or a file that cannot be composed.
    """
    register_schema()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            cfg = hydra_compose("config", overrides=overrides + search_path(search), return_hydra_config=True)
        with _hydra_values(cfg):
            return typed(cfg, overridden(overrides))
    except ConfigError:
        raise
    except Exception as error:
        if not wrong_configuration(error, overrides):
            raise
        raise ConfigError(one_line(error, search, overrides)) from error


def search_path(folders: Sequence[str] | None) -> list[str]:
    """Return the override that adds these folders to Hydra's search path, as a list; empty if there are no folders."""
    paths = ",".join(f"'file://{Path(folder).resolve()}'" for folder in folders or [])
    return [f"hydra.searchpath=[{paths}]"] if paths else []


@contextmanager
def _hydra_values(cfg: DictConfig) -> Iterator[None]:
    """Make `${hydra:...}` resolve to the values of `cfg` within this context."""
    shared = HydraConfig.instance()
    before = shared.cfg
    shared.set_config(cfg)
    try:
        yield
    finally:
        shared.cfg = before


def to_yaml(cfg: Config) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(cfg), resolve=True)


# ------------------------------------------------------------------------------------------------------------ schema


def register_schema() -> None:
    """Register the schema, and the options that plugins add to groups, with Hydra."""
    _register(tuple((part.kind, part.name, part.config) for part in plugin_parts(*KINDS)))


@lru_cache(maxsize=1)  # runs again only if the plugins have changed
def _register(parts: tuple[tuple[str, str, type | None], ...]) -> None:
    store = ConfigStore.instance()
    schema = schema_with(plugin_parts("callback", "attention_mod"))
    store.store(name="schema", node=schema)
    for kind, name, config in parts:
        if kind in GROUPED:
            node = OmegaConf.structured(config or KINDS[kind].base)
            store.store(group=KINDS[kind].section, name=name, node=_named(node, name))
        elif kind == "family" and config:  # joined with the keys of attention mods, which the schema's `model` has
            node = OmegaConf.structured(joined([config, OmegaConf.get_type(schema.model)]))
            store.store(group="model", name=name, node=_named(node, name, key="model_type"))


def _named(node: DictConfig, name: str, key: str = "name") -> DictConfig:
    """Return the node of a group's option: the fields of a part's config with their defaults, and the part's name."""
    node[key] = name
    return node
