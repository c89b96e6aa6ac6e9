"""How a `Config` comes from `conf/`, `recipes/` and the command line."""

from collections.abc import Iterable
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ndtrain.arguments import near
from ndtrain.config.schema import Config, ConfigError


def conf_dir() -> Path:
    """The folder of Hydra groups: inside an installed wheel, else at the repository root."""
    here = Path(__file__).resolve().parent.parent
    for candidate in (here / "conf", here.parent / "conf"):
        if (candidate / "config.yaml").is_file():
            return candidate
    raise ConfigError(f"conf/ not found beside {here}: the installation is incomplete, reinstall ndtrain")


def register() -> None:
    """Makes the schema known to Hydra as the config named `schema`."""
    ConfigStore.instance().store(name="schema", node=Config)


def load_config(overrides: list[str], search: list[str] | None = None) -> Config:
    """Composes `conf/config.yaml` with `overrides` (Hydra's command-line grammar) into a typed `Config`.

    `search` lists further config folders, which may hold recipes of the user's own under `recipe/`.

    Raises:
        ConfigError: an unknown key or option (the near miss is named), or a value of the wrong type.
    """
    register()
    overrides = check_overrides(overrides, search)
    GlobalHydra.instance().clear()
    extra = [f"hydra.searchpath=[{','.join('file://' + str(Path(p).resolve()) for p in search)}]"] if search else []
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            return to_config(compose("config", overrides=overrides + extra))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_one_line(error)) from error


def to_config(cfg: Any) -> Config:
    """A composed DictConfig as a plain typed `Config` object; re-merging refuses keys that `+key=` smuggled in."""
    try:
        container = OmegaConf.to_container(cfg, resolve=False)
        container.pop("hydra", None)
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), container))
    except OmegaConfBaseException as error:
        raise ConfigError(_one_line(error)) from error


def to_yaml(cfg: Config) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(cfg), resolve=True)


def _one_line(error: BaseException) -> str:
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    key = getattr(cause, "full_key", None)
    text = str(cause).strip().splitlines()[0]
    return f"{key}: {text}" if key else text


def _schema_keys(cls: type = Config, prefix: str = "") -> dict[str, bool]:
    """Every dotted key of the schema -> whether anything may stand below it (free-form dicts)."""
    keys = {}
    for f in fields(cls):
        nested = f.default_factory if f.default_factory is not MISSING else None
        if is_dataclass(nested):
            keys[prefix + f.name] = False
            keys |= _schema_keys(nested, f"{prefix}{f.name}.")
        else:
            keys[prefix + f.name] = "dict[" in str(f.type)
    return keys


def check_overrides(overrides: list[str], search: list[str] | None = None) -> list[str]:
    """Checks the names of keys and group options before Hydra sees them: its own messages lack the near miss, and it
    accepts any key behind a `+`.

    Returns:
        The overrides for Hydra: what goes into a free-form dict (rope_scaling, layout.rules) is marked as an addition.

    Raises:
        ConfigError: naming the first unknown key or option and its near miss.
    """
    groups: dict[str, set[str]] = {}
    for folder in [conf_dir(), *map(Path, search or [])]:
        for path in folder.glob("*/*.yaml"):
            groups.setdefault(path.parent.name, set()).add(path.stem)
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise ConfigError(f"cannot read the override: {_one_line(error)}") from error
    _check_init_from({o.key_or_group: o for o in parsed})
    return [
        _check_group(o, groups[o.key_or_group]) if o.key_or_group in groups else _check_key(o, groups) for o in parsed
    ]


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
    values = override.sweep_string_iterator() if override.is_sweep_override() else [override.value()]
    for value in values:
        if not isinstance(value, str) or value not in known:
            hint = near(str(value), list(known))
            raise ConfigError(f"{key}={value}: no such {key}; {hint}known: {', '.join(sorted(known))}")
    return override.input_line


def _check_key(override: Override, groups: Iterable[str]) -> str:
    key, keys = override.key_or_group, _schema_keys()
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
