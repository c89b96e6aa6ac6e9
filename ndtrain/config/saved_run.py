"""The configuration of an earlier run, which takes the place of a recipe: `resume=auto run.dir=FOLDER` needs none.

The run folder's config.yaml holds the resolved configuration of its last start. It is parsed as data: its size and its
depth are bounded, and a `${...}` in it is refused.
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
_RECIPE = "saved_run"  # the recipe as which Hydra composes a saved configuration
_LONGEST = 1 << 20  # bytes of a config.yaml, which has about 4,000
_DEEPEST = 20  # mappings and lists in one another
# keys whose default `resolve` works out from the mesh and the schedule
_WORKED_OUT = ("mesh.zero", "train.micro_batch", "schedule.chunks", "cp.ulysses", "cp.balance")


@dataclass(frozen=True)
class SavedRun:
    """The configuration that a run has saved.

    Attributes:
        values: section -> key -> value.
        source: the file that it is from, for messages.
        follows: whether what was worked out for the mesh of that run is worked out again for the new one.
    """

    values: dict[str, Any]
    source: str
    follows: bool = True


# --------------------------------------------------------------------------------------------------- the run to resume


def run_to_resume(given: Mapping[str, Any], swept: Collection[str]) -> SavedRun | None:
    """Returns the configuration of the run that the overrides resume; None if they name a recipe, resume nothing, or
    name model and data themselves for a folder that holds no run yet.

    Args:
        given: key -> value of the overrides.
        swept: keys of which a sweep chooses the values.

    Raises:
        ConfigError: there is no such run, or its config.yaml cannot be used.
    """
    resume = given.get("resume")
    if "recipe" in {*given, *swept} or ("resume" not in swept and resume in (None, "none")):
        return None
    for key in ("resume", "run.dir"):
        if key in swept and (key == "resume" or resume == "auto"):
            raise ConfigError(f"{key}: the jobs of a sweep resume several runs here: name their recipe, recipe=NAME")
    folder = _run_dir(given) if resume == "auto" else _run_folder(Path(str(resume)))
    if folder is None or not (folder / NAME).is_file():
        if any(key in ("model", "data", "init_from") or key.startswith(("model.", "data.")) for key in given):
            return None
        raise _no_run(resume, folder)
    saved = read_saved(folder / NAME)
    saved.values["run"]["dir"] = str(folder)  # the folder may have been moved since
    return saved


def _run_dir(given: Mapping[str, Any]) -> Path:
    """The folder that `run.dir` names, whose value may refer to other keys that are given."""
    tree = OmegaConf.create({})
    try:
        for key, value in {"run.name": RunConfig.name, "run.dir": RunConfig.dir, **given}.items():
            if "." in key:
                OmegaConf.update(tree, key, value, force_add=True)
        return Path(str(OmegaConf.select(tree, "run.dir")))
    except (OmegaConfBaseException, AttributeError, TypeError) as error:
        raise ConfigError(
            f"run.dir={given.get('run.dir', RunConfig.dir)}: refers to what only the run folder says: write the folder "
            "out, or name the run's recipe, recipe=NAME"
        ) from error


def _run_folder(path: Path) -> Path | None:
    """The run folder that a path means: the folder itself, that of its checkpoints, or that of one checkpoint."""
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
        f"resume={resume}: {what}: name a run folder, or a checkpoint in one; elsewhere name the run's recipe too, "
        "recipe=NAME"
    )


# ------------------------------------------------------------------------------------------------------------ the file


def read_saved(path: Path) -> SavedRun:
    """Reads the config.yaml of a run folder.

    Raises:
        ConfigError: it cannot be read, is no YAML, is larger or nested deeper than any configuration, refers to itself,
            or has no sections.
    """
    _check_shape(path)
    values = read_yaml(path)
    for section in ("run", "model"):
        if not isinstance(values.get(section), dict):
            raise ConfigError(f"{path}: there is no section `{section}`: it is no configuration of a run; {_REPAIR}")
    return SavedRun(values, str(path))


_REPAIR = "restore it, or name the run's recipe, recipe=NAME"


def _check_shape(path: Path) -> None:
    """Checks size and depth before anything is built of the file. Aliases are refused: a few lines of them stand for
    billions of values."""
    try:
        with open(path, "rb") as file:
            text = file.read(_LONGEST + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from error
    if len(text) > _LONGEST:
        raise ConfigError(f"{path}: has more than {_LONGEST:,} bytes: it is no configuration of a run; {_REPAIR}")
    depth = 0
    try:
        for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST or isinstance(event, yaml.AliasEvent):
                what = "refers to parts of itself" if depth <= _DEEPEST else "is nested too deeply"
                raise ConfigError(f"{path}: {what}: it is no configuration of a run; {_REPAIR}")
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = str(getattr(error, "problem", None) or error).splitlines()[0]
        raise ConfigError(f"{path}: is damaged, not YAML ({problem}): {_REPAIR}") from error


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every value that is no mapping, and of every empty mapping."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


# ----------------------------------------------------------------------------------------------------------- as recipe


def overrides_for(saved: SavedRun, given: Mapping[str, Any], keys: Mapping[str, Key]) -> list[str]:
    """Makes the saved configuration known to Hydra as a recipe. Returns the overrides that choose it and the options of
    plugins that it needs. Its plugins must be loaded.

    As with a recipe, the given overrides change it. A group that is given, `optim=NAME`, takes the place of what the
    saved one has chosen; `model=NAME` takes that of the whole model.

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
    """Checks that every key exists, and that no value refers to another one or to the environment.

    Raises:
        ConfigError: naming all keys that do not exist, or the first value that is a reference.
    """
    unknown = []
    for key, value in _leaves(values):
        if "${" in str(value):
            raise ConfigError(f"{source}: {key}={value}: a run's configuration holds values, no references: write one")
        parts = key.split(".")
        parents = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
        if key not in keys and not any(keys[p].free_form for p in parents if p in keys):
            unknown.append(key)
        elif key in keys and keys[key].section and value != {}:
            raise ConfigError(f"{source}: {key}={value}: a section, whose keys stand below it; {_REPAIR}")
    if unknown:
        raise ConfigError(
            f"{source}: this version of ndtrain has no {', '.join(unknown)}: take it out of the file, or name "
            "the run's recipe and its overrides in the command"
        )


def _work_out_again(values: dict[str, Any], cfg: Config) -> None:
    """Removes the values that `resolve` has worked out from others. With another mesh they are others."""
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
    """Group -> the option of a plugin that it needs, whose own keys the group's section then has."""
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
    """Removes what a given option of a group decides: which part is used, and the keys of the saved one alone."""
    if section == "model":
        del values[section]
        return
    chosen = values[section].pop("name", None)
    for part in plugin_parts(*GROUPED):
        if KINDS[part.kind].section == section and part.name == chosen:
            for key in own_keys(part.kind, part.name):
                values[section].pop(key, None)
