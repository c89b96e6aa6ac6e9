"""Checks of overrides before Hydra parses them.

Hydra's own messages do not suggest the closest match, and it accepts any key after a `+`.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, ValueType
from hydra.errors import HydraException
from omegaconf import OmegaConf

from ndtrain.arguments import near
from ndtrain.config.composition_errors import read_yaml
from ndtrain.config.foreign_names import meaning_of, meaning_of_value
from ndtrain.config.keys import Key, config_folders, group_options, known_keys, near_key
from ndtrain.config.registry import load_plugins
from ndtrain.config.saved_run import SavedRun, overrides_for, run_to_resume
from ndtrain.config.schema import Config, ConfigError
from ndtrain.config.typed import store_loggers


def check_overrides(
    overrides: list[str], search: list[str] | None = None, hydra: bool = False, base: SavedRun | None = None
) -> list[str]:
    """Load the plugins that the overrides or the recipe name, and check the names of keys and group options.

    If the overrides resume a run and name no recipe, the saved configuration of that run replaces the recipe.

    Args:
        hydra: True if Hydra runs the job (`--multirun`, `--cfg`). Sweeps and the keys `hydra.*` are then allowed.
        base: the saved configuration that the overrides change. None: the configuration of the resumed run, if any.

    Returns:
        The overrides for Hydra. Keys of free-form dicts (rope_scaling, layout.rules) are marked as additions.

    Raises:
        ConfigError: an unknown key or option (the message suggests the closest match), or a plugin that cannot be
            loaded. Also an override without effect here, or a run to resume whose configuration cannot be used.
    """
    folders = config_folders(search)
    parsed = [_parse(override, group_options(folders)) for override in overrides]
    given, swept = _values(parsed), {o.key_or_group for o in parsed if o.is_sweep_override()}
    base = base or run_to_resume(given, swept)
    recipe, where = (base.values, f"{base.source}: ") if base else _recipe(given, folders)
    load_plugins(_plugins_named(given, recipe, where))
    groups, keys = group_options(folders), known_keys()
    _check_init_from({o.key_or_group: o for o in parsed}, recipe)
    checked = [_check(o, keys, groups, folders, hydra) for o in parsed]
    return [*checked, *(overrides_for(base, given, keys) if base else ())]


def sweep_jobs(overrides: list[str]) -> list[list[str]]:
    """Return the overrides of each job of a sweep, in the order in which Hydra's own sweeper runs the jobs.

    Return an empty list if another sweeper chooses the values, or if only Hydra can list them.
    """
    choices = []
    for o in OverridesParser.create().parse_overrides(overrides):
        if o.key_or_group == "hydra/sweeper" or (o.is_sweep_override() and not _can_be_listed(o)):
            return []
        values = o.sweep_string_iterator() if o.is_sweep_override() else [None]
        choices.append([o.input_line if v is None else f"{o.get_key_element()}={v}" for v in values])
    return [list(job) for job in itertools.product(*choices)]


def _can_be_listed(override: Override) -> bool:
    """Return True if the override lists its values: interval() does not, and glob() needs Hydra's folders."""
    return override.is_discrete_sweep() and "glob(" not in (override.input_line or "")


def _parse(override: str, groups: Mapping[str, set[str]]) -> Override:
    if "=" not in override and not override.startswith("~"):
        owner = next((f"{group}={override}" for group in ("recipe", *groups) if override in groups[group]), None)
        hint = f"did you mean {owner!r}?" if owner else f"give {override} a value: {override}=VALUE"
        raise ConfigError(f"{override}: an override is key=value; {hint}")
    try:
        return OverridesParser.create().parse_override(override)
    except HydraException as error:
        text = str(error).strip().splitlines()[0]
        key, _, value = override.partition("=")
        raise ConfigError(
            f"{override}: cannot read the override ({text}); close brackets and quotes, and put a value with special "
            f"characters in its own quotes: '{key}=\"{value}\"'"
        ) from error


def _plugins_named(given: Mapping[str, Any], recipe: Mapping[str, Any], where: str) -> list[str]:
    """Return the modules in the key `plugins` of the overrides or, if they do not set it, of the recipe.

    Args:
        where: prefix of messages about the recipe.
    """
    where = "" if "plugins" in given else where
    modules = given.get("plugins", recipe.get("plugins")) or []
    if not isinstance(modules, list):
        raise ConfigError(f"{where}plugins={modules}: a list needs brackets: 'plugins=[{modules}]'")
    return [str(module) for module in modules]


def _values(parsed: Sequence[Override]) -> dict[str, Any]:
    """Return key -> value of the overrides that are not sweeps."""
    return {o.key_or_group: o.value() for o in parsed if not o.is_sweep_override()}


def _recipe(given: Mapping[str, Any], folders: Sequence[Path]) -> tuple[dict[str, Any], str]:
    """Return the content of the chosen recipe's file, and `file: ` for messages; both empty without a recipe."""
    name = given.get("recipe")
    paths = [path for folder in folders if (path := folder / "recipe" / f"{name}.yaml").is_file()]
    return (read_yaml(paths[0]), f"{paths[0]}: ") if paths else ({}, "")


def _check_init_from(given: Mapping[str, Override], recipe: Mapping[str, Any]) -> None:
    """Check that the user sets no key of `model` together with `init_from`, because it would have no effect.

    The model is described by the config.json in the folder, or by the run's own keys with `moe.upcycle`.

    Raises:
        ConfigError: a key of `model` is set together with `init_from`, without `moe.upcycle`.
    """
    upcycle = given["moe.upcycle"].value() if "moe.upcycle" in given else (recipe.get("moe") or {}).get("upcycle")
    if upcycle:
        return
    lost = [key for key in given if key == "model" or key.startswith("model.")]
    if lost and "init_from" in given and given["init_from"].value() is not None:
        raise ConfigError(
            f"{given[lost[0]].input_line}: init_from={given['init_from'].value()} takes the model from the folder's "
            "config.json: remove the model override, or convert a dense model to experts with moe.upcycle=true"
        )


def _check(
    override: Override, keys: Mapping[str, Key], groups: Mapping[str, set[str]], folders: Sequence[Path], hydra: bool
) -> str:
    """Check an override, and return it as Hydra has to get it."""
    key = override.key_or_group
    if key.replace("/", ".").partition(".")[0] == "hydra":
        return _check_hydra_key(override, hydra)
    if override.is_sweep_override() and not hydra:
        raise ConfigError(_sweep_in_one_run(override, keys))
    if override.is_delete():
        return _check_deletion(override, keys, groups)
    return _check_group(override, groups[key], folders) if key in groups else _check_key(override, keys, groups)


def _check_hydra_key(override: Override, hydra: bool) -> str:
    key, line = override.key_or_group, override.input_line or ""
    if key == "hydra.run.dir":
        raise ConfigError(f"{line}: ndtrain has its own key for the run folder: use run.dir={override.value()}")
    if key == "hydra.searchpath":
        raise ConfigError(f"{line}: use --config-dir FOLDER, where FOLDER/recipe/ holds your recipes")
    if not hydra:
        fix = "use --multirun" if key == "hydra.mode" else "remove it, or add --multirun"
        raise ConfigError(f"{line}: a setting of Hydra that has no effect on a single run: {fix}")
    return line


def _sweep_in_one_run(override: Override, keys: Mapping[str, Key]) -> str:
    key, text = override.key_or_group, override.get_value_string()
    if key == "logger" or (key in keys and keys[key].listed):
        return f"{override.input_line}: a list needs brackets: '{key}=[{text}]'"
    quoted = (
        override.value_type == ValueType.SIMPLE_CHOICE_SWEEP and f"; quote it if it is one value: '{key}=\"{text}\"'"
    )
    return f"{override.input_line}: several values, with a run for each, need --multirun{quoted or ''}"


def _check_deletion(override: Override, keys: Mapping[str, Key], groups: Mapping[str, set[str]]) -> str:
    """Check a deletion `~key`, and return it.

    Only keys of free-form dicts can be deleted. Any other key has a default, which would apply again.
    """
    key, line = override.key_or_group, override.input_line or ""
    if key in groups:
        raise ConfigError(
            f"{line}: cannot delete a group; choose another option: {key}={'/'.join(sorted(groups[key]))}"
        )
    if any(keys[parent].free_form for parent in _parents(key)[1:] if parent in keys):
        if OmegaConf.select(OmegaConf.structured(Config), key) is not None:
            raise ConfigError(
                f"{line}: cannot delete {key}: its default would apply again. Use {key}=null to disable it"
            )
        return line
    if key not in keys:
        raise ConfigError(f"{line}: no such key; {near_key(key, keys)}`--cfg job` lists them all")
    unset = f"use {key}=null to disable it" if keys[key].optional else "remove this override to keep its value"
    raise ConfigError(f"{line}: cannot delete {key}, a key of the schema; {unset}")


def _check_group(override: Override, known: set[str], folders: Sequence[Path]) -> str:
    key, line = override.key_or_group, override.input_line or ""
    if override.is_sweep_override() and not _can_be_listed(override):
        return line
    values = [*override.sweep_string_iterator()] if override.is_sweep_override() else [override.value()]
    several = key == "logger" and isinstance(values[0], list) and values[0]
    for value in values[0] if several else values:
        if not isinstance(value, str) or value not in known:
            hint = _misplaced(key, str(value), known, folders)
            hint = hint or meaning_of_value(key, str(value), known) or near(str(value), list(known))
            raise ConfigError(f"{key}={value}: no such {key}; {hint}known: {', '.join(sorted(known))}")
        paths = [path for folder in folders if (path := folder / key / f"{value}.yaml").is_file()]
        if len({path.resolve() for path in paths}) > 1:
            raise ConfigError(f"{key}={value}: two files have this name, {' and '.join(map(str, paths))}: rename yours")
    if several:
        names = list(dict.fromkeys(values[0]))
        return f"{key}={store_loggers(names) if len(names) > 1 else names[0]}"
    return line


def _misplaced(group: str, value: str, known: set[str], folders: Sequence[Path]) -> str:
    """Return a hint if the value is the path of a file, or if the file is not in the folder of its group; else ""."""
    name = Path(value).stem if value.endswith((".yaml", ".yml")) or "/" in value else value
    if name in known and name != value:
        return f"write {group}={name}, without folder and ending; "
    if name != value and Path(value).is_file():
        return f"use --config-dir FOLDER {group}={name} for the file FOLDER/{group}/{name}.yaml; "
    for folder in folders[1:]:
        if (folder / f"{name}.yaml").is_file():
            return f"move {folder / name}.yaml into {folder / group}/; "
        if (folder / group / f"{name}.yml").is_file():
            return f"rename {folder / group / name}.yml to {name}.yaml; "
    return ""


def _parents(key: str) -> list[str]:
    """Return the key itself and the sections that contain it, innermost first."""
    return [key.rsplit(".", n)[0] for n in range(key.count(".") + 1)]


def _check_key(override: Override, keys: Mapping[str, Key], groups: Mapping[str, set[str]]) -> str:
    key, line = override.key_or_group, override.input_line or ""
    if any(keys[parent].free_form for parent in _parents(key) if parent in keys):
        if key in keys and keys[key].optional and override.value() == {}:
            raise ConfigError(
                f"{line}: has no effect, since entries are added to the recipe's; use {key}=null to remove them"
            )
        return "++" + line if override.type == OverrideType.CHANGE else line
    if key not in keys:
        raise ConfigError(f"{key}: no such key; {near_key(key, keys, groups)}`--cfg job` lists them all")
    if keys[key].section and not isinstance(override.value(), dict):
        below = next(k for k in [*keys, f"{key}.KEY"] if k.startswith(f"{key}."))
        hint = meaning_of(key, ()) or f"set its keys, as in {below}=..."
        raise ConfigError(f"{line}: {key} is a section and cannot have a value: {hint.strip()}")
    if keys[key].whole:
        line = _with_whole_numbers(override)
    scalar = isinstance(override.value(), str | int | float) and "${" not in line
    if keys[key].listed and scalar and not override.is_sweep_override():
        raise ConfigError(f"{line}: a list needs brackets: '{key}=[{override.value()}]'")
    return line


def _with_whole_numbers(override: Override) -> str:
    """Return the override of an integer key with numbers such as 1e3 written as integers: `train.steps=1000`.

    Any other value is unchanged, and the schema refuses it later.
    """
    values = [*override.sweep_string_iterator()] if _can_be_listed(override) else [override.get_value_string()]
    whole = [_whole_number(text) for text in values]
    if whole == values or override.is_delete():
        return override.input_line or ""
    return f"{override.get_key_element()}={','.join(whole)}"


def _whole_number(text: str) -> str:
    """Return a whole number such as 1e3 or 4.0 written as an integer, 1000 or 4. Return any other text unchanged."""
    if not re.fullmatch(r"[+-]?[0-9_]*\.?[0-9]*(e[+-]?[0-9]{1,3})?", text, re.IGNORECASE):
        return text
    try:
        number = Decimal(text)
    except InvalidOperation:
        return text
    return str(int(number)) if number == number.to_integral_value() else text
