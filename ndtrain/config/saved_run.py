"""The configuration of an earlier run, used instead of a recipe: `resume=auto run.dir=FOLDER` needs no recipe.

The config.yaml of a run folder holds the resolved configuration of the run's last start. It is parsed as data: its size
and depth are bounded, and a `${...}` in it is refused.
"""

import copy
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ndtrain.config.checks import resolve
from ndtrain.config.composition_errors import read_yaml
from ndtrain.config.keys import Key
from ndtrain.config.registry import GROUPED, KINDS, own_keys, plugin_parts
from ndtrain.config.schema import AXES, Config, ConfigError, RunConfig
from ndtrain.config.typed import store_loggers, to_config

NAME = "config.yaml"  # in a run folder
_RECIPE = "saved_run"  # name of the recipe under which Hydra gets a saved configuration
_LONGEST = 1 << 20  # maximum size of a config.yaml in bytes; a usual one has about 4,000
_DEEPEST = 20  # maximum levels of nested mappings and lists
# keys whose default `resolve` computes from the mesh and the schedule
_WORKED_OUT = ("mesh.zero", "train.micro_batch", "schedule.chunks", "cp.ulysses", "cp.balance")


@dataclass(frozen=True)
class SavedRun:
    """The saved configuration of a run.

    Attributes:
        values: section -> key -> value.
        source: path of the file, for messages.
        follows: True if values that were computed for the mesh of that run are computed again for the new mesh.
    """

    values: dict[str, Any]
    source: str
    follows: bool = True


# --------------------------------------------------------------------------------------------------- the run to resume


def run_to_resume(given: Mapping[str, Any], swept: Collection[str]) -> SavedRun | None:
    """Return the configuration of the run that the overrides resume.

    Return None if the overrides name a recipe or resume nothing. Return None also if the folder holds no run yet and
    the overrides choose the model or the data.

    Args:
        given: key -> value of the overrides.
        swept: keys whose values are chosen by a sweep.

    Raises:
        ConfigError: there is no such run, or its config.yaml cannot be used.
    """
    resume = given.get("resume")
    if "recipe" in {*given, *swept} or ("resume" not in swept and resume in (None, "none")):
        return None
    for key in ("resume", "run.dir"):
        if key in swept and (key == "resume" or resume == "auto"):
            raise ConfigError(f"{key}: the jobs of this sweep resume different runs: name their recipe, recipe=NAME")
    folder = _run_dir(given) if resume == "auto" else _run_folder(Path(str(resume)))
    if folder is None or not (folder / NAME).is_file():
        if any(key in ("model", "data", "init_from") or key.startswith(("model.", "data.")) for key in given):
            return None
        raise _no_run(resume, folder)
    saved = read_saved(folder / NAME)
    saved.values["run"]["dir"] = str(folder)  # the folder may have been moved since
    return saved


def _run_dir(given: Mapping[str, Any]) -> Path:
    """Return the folder that `run.dir` names. Its value may refer to other given keys.

    Raises:
        ConfigError: the value refers to a key that is not given.
    """
    tree = OmegaConf.create({})
    try:
        for key, value in {"run.name": RunConfig.name, "run.dir": RunConfig.dir, **given}.items():
            if "." in key:
                OmegaConf.update(tree, key, value, force_add=True)
        return Path(str(OmegaConf.select(tree, "run.dir")))
    except (OmegaConfBaseException, AttributeError, TypeError) as error:
        raise ConfigError(
            f"run.dir={given.get('run.dir', RunConfig.dir)}: refers to a key that only the run folder contains: write "
            "the path without it, or name the run's recipe, recipe=NAME"
        ) from error


def _run_folder(path: Path) -> Path | None:
    """Return the run folder that contains a path; None if there is none.

    The path may be the run folder, its folder of checkpoints, or one checkpoint.
    """
    options = [path]
    if path.name == "checkpoints":
        options.append(path.parent)
    elif path.parent.name == "checkpoints":
        options.append(path.parent.parent)
    return next((folder for folder in options if (folder / NAME).is_file()), None)


def _no_run(resume: Any, folder: Path | None) -> ConfigError:
    if folder is not None:
        fix = "name the folder of a run, run.dir=FOLDER, or the recipe of a new one, recipe=NAME"
        return ConfigError(f"resume=auto: run.dir={folder} holds no run (there is no {folder / NAME}): {fix}")
    what = "holds no run with a config.yaml" if Path(str(resume)).exists() else "does not exist"
    return ConfigError(
        f"resume={resume}: {what}: name a run folder or a checkpoint in one, or add the run's recipe, recipe=NAME"
    )


# ------------------------------------------------------------------------------------------------------------ the file


def read_saved(path: Path) -> SavedRun:
    """Read the config.yaml of a run folder.

    Raises:
        ConfigError: the file cannot be read, is not YAML, is too large or nested too deeply, contains aliases, or has
            no section `run` or `model`.
    """
    _check_shape(path)
    values = read_yaml(path)
    for section in ("run", "model"):
        if not isinstance(values.get(section), dict):
            raise ConfigError(f"{path}: not the configuration of a run: the section `{section}` is missing; {_REPAIR}")
    return SavedRun(values, str(path))


_REPAIR = "restore the file, or name the run's recipe, recipe=NAME"


def _check_shape(path: Path) -> None:
    """Check size and depth before building objects from the file.

    Aliases are refused, because a few lines with aliases can expand to billions of values.

    Raises:
        ConfigError: the file cannot be read, is not YAML, is too large or nested too deeply, or contains aliases.
    """
    try:
        with open(path, "rb") as file:
            text = file.read(_LONGEST + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from error
    if len(text) > _LONGEST:
        raise ConfigError(f"{path}: not the configuration of a run: it has more than {_LONGEST:,} bytes; {_REPAIR}")
    depth = 0
    try:
        for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST or isinstance(event, yaml.AliasEvent):
                what = "it contains YAML aliases" if depth <= _DEEPEST else "it is nested too deeply"
                raise ConfigError(f"{path}: not the configuration of a run: {what}; {_REPAIR}")
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = str(getattr(error, "problem", None) or error).splitlines()[0]
        raise ConfigError(f"{path}: damaged, not valid YAML ({problem}): {_REPAIR}") from error


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every value that is not a mapping, and of every empty mapping."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


# ----------------------------------------------------------------------------------------------------------- as recipe


def overrides_for(saved: SavedRun, given: Mapping[str, Any], keys: Mapping[str, Key]) -> list[str]:
    """Register the saved configuration with Hydra as a recipe.

    Return the overrides that choose this recipe and the plugins' options that it needs. Its plugins must be loaded.

    As with a recipe, the given overrides change it. A given group option such as `optim=NAME` replaces the saved option
    of this group; `model=NAME` replaces the whole section `model`.

    Raises:
        ConfigError: the file has a key that does not exist, or a value of the wrong type.
    """
    values = copy.deepcopy(saved.values)
    _check_keys(values, keys, saved.source)
    try:
        cfg = to_config(OmegaConf.create(values), ())
    except ConfigError as error:
        raise ConfigError(f"{saved.source}: {error}") from error
    if saved.follows:
        _work_out_again(values, cfg)
    options = _plugin_options(values)
    for section in {key for key in given if "." not in key} & values.keys():
        if isinstance(values[section], dict):
            _make_room(values, section)
    ConfigStore.instance().store(group="recipe", name=_RECIPE, node=values, package="_global_")
    return [f"recipe={_RECIPE}", *(f"{group}={name}" for group, name in options.items() if group not in given)]


def _check_keys(values: Mapping[str, Any], keys: Mapping[str, Key], source: str) -> None:
    """Check that every key exists, and that no value refers to another key or to the environment.

    Raises:
        ConfigError: some keys do not exist (all are named), a value is a reference, or a section has a plain value.
    """
    unknown = []
    for key, value in _leaves(values):
        if "${" in str(value):
            raise ConfigError(f"{source}: {key}={value}: a saved configuration has no references: write the value")
        parts = key.split(".")
        parents = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
        if key not in keys and not any(keys[p].free_form for p in parents if p in keys):
            unknown.append(key)
        elif key in keys and keys[key].section and value != {}:
            raise ConfigError(f"{source}: {key}={value}: a section cannot have a value; {_REPAIR}")
    if unknown:
        raise ConfigError(
            f"{source}: this version of ndtrain has no {', '.join(unknown)}: remove it from the file, or "
            "give the run's recipe and its overrides in the command"
        )


def _work_out_again(values: dict[str, Any], cfg: Config) -> None:
    """Remove the values that `resolve` has computed from other keys, because another mesh may need other values."""
    trial, ranks = cfg.unfrozen(), math.prod(getattr(cfg.mesh, axis) for axis in AXES)
    default = Config()
    for key in _WORKED_OUT:
        section, name = key.split(".")
        setattr(getattr(trial, section), name, getattr(getattr(default, section), name))
    try:
        resolve(trial, ranks)
    except ConfigError:
        return
    for key in _WORKED_OUT:
        section, name = key.split(".")
        if getattr(getattr(trial, section), name) == getattr(getattr(cfg, section), name):
            values.get(section, {}).pop(name, None)
    if cfg.data.vocab_size == cfg.model.vocab_size:
        values.get("data", {}).pop("vocab_size", None)


def _plugin_options(values: Mapping[str, Any]) -> dict[str, str]:
    """Return group -> plugin option for every plugin part in use that has its own keys.

    Choosing the option adds these keys to the section.
    """
    found, loggers = {}, values.get("logger", {}).get("name")
    for part in plugin_parts(*GROUPED, "family"):
        section = KINDS[part.kind].section or ""
        key = "model_type" if part.kind == "family" else "name"
        if part.config and values.get(section, {}).get(key) == part.name:
            found[section] = part.name
        if part.config and part.kind == "logger" and isinstance(loggers, list) and part.name in loggers:
            found[section] = store_loggers(loggers)
    return found


def _make_room(values: dict[str, Any], section: str) -> None:
    """Remove the saved values that a given option of the group `section` replaces.

    These are the part's name and its own keys, or all of `model`.
    """
    if section == "model":
        del values[section]
        return
    chosen = values[section].pop("name", None)
    for part in plugin_parts(*GROUPED):
        if KINDS[part.kind].section == section and part.name == chosen:
            for key in own_keys(part.kind, part.name):
                values[section].pop(key, None)
