"""How a `Config` comes from `conf/`, `recipes/`, plugins and the command line."""

from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ndtrain.arguments import near
from ndtrain.config.registry import KINDS, Part, load_plugins, plugin_parts
from ndtrain.config.schema import Config, ConfigError, LoggerConfig


def conf_dir() -> Path:
    """The folder of Hydra groups: inside an installed wheel, else at the repository root."""
    here = Path(__file__).resolve().parent.parent
    for candidate in (here / "conf", here.parent / "conf"):
        if (candidate / "config.yaml").is_file():
            return candidate
    raise ConfigError(f"conf/ not found beside {here}: the installation is incomplete, reinstall ndtrain")


def compose(*overrides: str) -> Config:
    """The configuration of a run: `compose("recipe=llama_small", "mesh.fsdp=2")`. `Trainer` resolves it.

    Raises:
        ConfigError: as `load_config`.
    """
    return load_config(list(overrides))


def load_config(overrides: list[str], search: list[str] | None = None) -> Config:
    """Composes `conf/config.yaml` with `overrides` (Hydra's command-line grammar) into a typed `Config`.

    `search` lists further config folders, which may hold recipes of the user's own under `recipe/`.

    Raises:
        ConfigError: an unknown key or option (the near miss is named), a value of the wrong type, or a plugin that
            cannot be loaded.
    """
    overrides = check_overrides(overrides, search)
    register_schema()
    GlobalHydra.instance().clear()
    extra = [f"hydra.searchpath=[{','.join('file://' + str(Path(p).resolve()) for p in search)}]"] if search else []
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            return to_config(hydra_compose("config", overrides=overrides + extra))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_one_line(error)) from error


def to_config(cfg: DictConfig) -> Config:
    """A composed DictConfig as a plain typed `Config`; merging it again refuses keys that `+key=` smuggled in."""
    try:
        container = OmegaConf.to_container(cfg, resolve=False)
        container.pop("hydra", None)
        return OmegaConf.to_object(OmegaConf.merge(_schema(_chosen_parts(container)), container))
    except OmegaConfBaseException as error:
        raise ConfigError(_one_line(error)) from error


def to_yaml(cfg: Config) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(cfg), resolve=True)


def _one_line(error: BaseException) -> str:
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    key = getattr(cause, "full_key", None)
    text = str(cause).strip().splitlines()[0]
    return f"{key}: {text}" if key else text


# ------------------------------------------------------------------------------------------------------------ schema


def register_schema() -> None:
    """Makes the schema, and the options that plugins add to groups, known to Hydra."""
    store = ConfigStore.instance()
    store.store(name="schema", node=_schema(plugin_parts("callback")))
    for part in plugin_parts("optimizer", "source", "logger"):
        store.store(group=KINDS[part.kind].section, name=part.name, node=_named(part))
    for part in plugin_parts("family"):
        if part.config:
            store.store(group="model", name=part.name, node=_named(part, key="model_type"))


def _named(part: Part, key: str = "name") -> DictConfig:
    """The node that a group's option stands for: the fields of the part's config with their defaults."""
    node = OmegaConf.structured(part.config or KINDS[part.kind].base)
    node[key] = part.name
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
        schema[section] = OmegaConf.structured(_joined(classes))
    return schema


def _joined(classes: Sequence[type]) -> type:
    """A dataclass with the fields of all these."""
    bases = tuple(dict.fromkeys(classes))
    return bases[0] if len(bases) == 1 else make_dataclass("And".join(c.__name__ for c in bases), [], bases=bases)


def _chosen_parts(container: dict[str, Any]) -> list[Part]:
    """The plugins' parts that a composed configuration selects."""

    def selects(part: Part, key: str) -> bool:
        value = container.get(KINDS[part.kind].section, {}).get(key)
        return part.name in value if isinstance(value, list) else part.name == value

    named = [part for part in plugin_parts("optimizer", "source", "logger") if selects(part, "name")]
    families = [part for part in plugin_parts("family") if selects(part, "model_type")]
    return [*plugin_parts("callback"), *named, *families]


def _schema_keys(cls: type = Config, prefix: str = "") -> dict[str, bool]:
    """Every dotted key of the schema -> whether it may have any keys below it (free-form dicts)."""
    keys = {}
    for f in fields(cls):
        nested = f.default_factory if f.default_factory is not MISSING else None
        if is_dataclass(nested):
            keys[prefix + f.name] = False
            keys |= _schema_keys(nested, f"{prefix}{f.name}.")
        else:
            keys[prefix + f.name] = "dict[" in str(f.type)
    return keys


def _known_keys() -> dict[str, bool]:
    """The keys of the schema, and those of every plugin's config."""
    keys = _schema_keys() | {"callbacks": False}
    for part in plugin_parts(*KINDS):
        section = KINDS[part.kind].section
        if part.kind == "callback":
            section = f"callbacks.{part.name}"
            keys[section] = False
        if part.config:
            keys |= _schema_keys(part.config, f"{section}.")
    return keys


# --------------------------------------------------------------------------------------------------------- overrides


def check_overrides(overrides: list[str], search: list[str] | None = None) -> list[str]:
    """Loads the plugins that the overrides or the recipe name. Checks the names of keys and group options before Hydra
    sees them: its own messages lack the near miss, and it accepts any key behind a `+`.

    Returns:
        The overrides for Hydra: a key of a free-form dict (rope_scaling, layout.rules) is marked as an addition.

    Raises:
        ConfigError: naming the first unknown key or option and its near miss, or a plugin that cannot be loaded.
    """
    folders = [conf_dir(), *map(Path, search or [])]
    groups: dict[str, set[str]] = {}
    for folder in folders:
        for path in folder.glob("*/*.yaml"):
            groups.setdefault(path.parent.name, set()).add(path.stem)
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise ConfigError(f"cannot read the override: {_one_line(error)}") from error
    load_plugins(_plugins_named(parsed, folders))
    for part in plugin_parts("optimizer", "source", "logger", "family"):
        groups[KINDS[part.kind].section].add(part.name)
    _check_init_from({o.key_or_group: o for o in parsed})
    return [
        _check_group(o, groups[o.key_or_group]) if o.key_or_group in groups else _check_key(o, groups) for o in parsed
    ]


def _plugins_named(parsed: Sequence[Override], folders: Sequence[Path]) -> list[str]:
    """The modules of the key `plugins`: the override's, else the recipe's."""
    values = {o.key_or_group: o.value() for o in parsed if not o.is_sweep_override()}
    if "plugins" in values:
        return [str(module) for module in values["plugins"] or []]
    for folder in folders:
        recipe = folder / "recipe" / f"{values.get('recipe')}.yaml"
        if recipe.is_file():
            return list(OmegaConf.load(recipe).get("plugins") or [])
    return []


def _check_init_from(given: dict[str, Override]) -> None:
    """A field of the model beside `init_from` would have no effect: the folder says what the model is."""
    lost = [key for key in given if key.startswith("model.")]
    if lost and "init_from" in given and given["init_from"].value() is not None:
        raise ConfigError(
            f"{given[lost[0]].input_line}: init_from={given['init_from'].value()} takes the model from the folder's "
            "config.json: leave model.* out"
        )


def _check_group(override: Override, known: set[str]) -> str:
    key = override.key_or_group
    values = [*override.sweep_string_iterator()] if override.is_sweep_override() else [override.value()]
    several = key == "logger" and isinstance(values[0], list) and values[0]
    for value in values[0] if several else values:
        if not isinstance(value, str) or value not in known:
            hint = near(str(value), list(known))
            raise ConfigError(f"{key}={value}: no such {key}; {hint}known: {', '.join(sorted(known))}")
    return f"{key}={_store_loggers(values[0])}" if several else override.input_line


def _store_loggers(names: list[str]) -> str:
    """Makes an option of the group `logger` that stands for several loggers. Returns its name. Hydra alone would take
    the last one's name, and refuse two loggers with keys of their own."""
    parts = [part for part in plugin_parts("logger") if part.name in names and part.config]
    node = OmegaConf.structured(_joined([part.config for part in parts] or [LoggerConfig]))
    node.name = names
    option = "+".join(names)
    ConfigStore.instance().store(group="logger", name=option, node=node)
    return option


def _check_key(override: Override, groups: Iterable[str]) -> str:
    key, keys = override.key_or_group, _known_keys()
    if key.replace("/", ".").partition(".")[0] == "hydra":  # hydra.* and hydra/launcher=...: Hydra's own
        return override.input_line
    parents = [key.rsplit(".", n)[0] for n in range(key.count(".") + 1)]
    if any(keys.get(p) for p in parents):
        return "++" + override.input_line if override.type == OverrideType.CHANGE else override.input_line
    if key not in keys:
        section = key.rpartition(".")[0]
        siblings = [k for k in keys if k.rpartition(".")[0] == section] if section in keys else []
        hint = near(key, siblings) or near(key, [*keys, *groups])
        raise ConfigError(f"{key}: no such key; {hint}`--cfg job` lists them all")
    return override.input_line
