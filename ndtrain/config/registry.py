"""The parts that a run can be built from, by kind and name. What ndtrain ships is registered as a user's plugin is.

| kind          | what is registered                          | what selects it         | base of its config |
|---------------|---------------------------------------------|-------------------------|--------------------|
| family        | a `Family`                                  | `model.model_type`      | `ModelConfig`      |
| objective     | a subclass of `Objective`                   | `objective=name`        | `ObjectiveConfig`  |
| optimizer     | a subclass of `Optimizer`                   | `optim=name`            | `OptimConfig`      |
| attention_mod | a function (model config) -> `AttentionMod` | `model.attention=name`  | `ModelConfig`      |
| lr_schedule   | a function (step, cfg, end) -> factor       | `optim.schedule=name`   | none               |
| source        | a function (data config) -> `Corpus`        | `data=name`             | `DataConfig`       |
| logger        | a class with log(row) and finish(exit code) | `logger=name`           | `LoggerConfig`     |
| callback      | a subclass of `Callback`                    | its plugin being loaded | any dataclass      |
"""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, make_dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from ndtrain.config.schema import ConfigError, DataConfig, LoggerConfig, ModelConfig, ObjectiveConfig, OptimConfig

ENTRY_POINTS = "ndtrain.plugins"  # the group of entry points that an installed package announces its plugins in


@dataclass(frozen=True)
class Kind:
    """What is particular to one kind of part.

    Attributes:
        section: the section of the configuration that a part's own fields stand in.
        base: the class that a part's config must be a subclass of; None: any dataclass.
        shipped: the module that registers ndtrain's own parts of this kind.
    """

    section: str | None = None
    base: type | None = None
    shipped: str | None = None


KINDS = {
    "family": Kind("model", ModelConfig, "ndtrain.model.families"),
    "attention_mod": Kind("model", ModelConfig),
    "objective": Kind("objective", ObjectiveConfig, "ndtrain.model.objective"),
    "optimizer": Kind("optim", OptimConfig, "ndtrain.optim"),
    "lr_schedule": Kind(shipped="ndtrain.optim.lr_schedule"),
    "source": Kind("data", DataConfig),
    "logger": Kind("logger", LoggerConfig, "ndtrain.metrics.loggers"),
    "callback": Kind("callbacks"),
}


# The kinds of which a section's `name` selects one part, as an option of the group that has the section's name.
GROUPED = ("objective", "optimizer", "source", "logger")


@dataclass(frozen=True)
class Part:
    """One registered part.

    Attributes:
        value: the class, function or object.
        config: the dataclass of its section of the configuration; None: the section has no fields of its own.
        module: where it was registered.
    """

    kind: str
    name: str
    value: Any
    config: type | None
    module: str


_parts: dict[tuple[str, str], Part] = {}
_loaded: set[str] = set()
_loading: list[str] = []  # the plugin that is being imported


def register(kind: str, name: str, value: Any, config: type | None = None) -> None:
    """Makes a part known.

    Raises:
        ConfigError: another part of the kind has the name, or `config` is not what the kind needs.
    """
    base = KINDS[kind].base
    if config is not None and not (is_dataclass(config) and issubclass(config, base or object)):
        needed = f"a dataclass that extends {base.__name__}" if base else "a dataclass"
        raise ConfigError(f"{kind} {name}: its config {getattr(config, '__name__', config)} must be {needed}")
    module = _loading[-1] if _loading else value.__module__
    before = _parts.get((kind, name))
    if before is not None and before.value is not value:
        raise ConfigError(f"{kind} {name} is registered twice, by {before.module} and by {module}: rename one of them")
    _parts[kind, name] = Part(kind, name, value, config, module)


def names(kind: str) -> list[str]:
    """Every registered name of a kind, the shipped ones first."""
    _load_shipped(kind)
    return [part.name for part in _parts.values() if part.kind == kind]


def get(kind: str, name: str) -> Any:
    """The part of this name.

    Raises:
        ConfigError: there is none.
    """
    _load_shipped(kind)
    if (kind, name) not in _parts:
        raise ConfigError(f"{kind} {name}: no such {kind}; known: {', '.join(names(kind))}")
    return _parts[kind, name].value


def config_of(kind: str, name: str) -> type | None:
    """The dataclass of a part's own configuration; None where it has none."""
    get(kind, name)
    return _parts[kind, name].config


def own_keys(kind: str, name: str) -> list[str]:
    """The fields that a part's config adds to those of the kind's base."""
    config, base = config_of(kind, name), KINDS[kind].base
    shared = {f.name for f in fields(base)} if base else set()
    return [f.name for f in fields(config) if f.name not in shared] if config else []


def joined(classes: Sequence[type]) -> type:
    """A dataclass with the fields of all these."""
    several = tuple(dict.fromkeys(classes))
    bases = tuple(c for c in several if not any(c is not other and issubclass(other, c) for other in several))
    return bases[0] if len(bases) == 1 else make_dataclass("And".join(c.__name__ for c in bases), [], bases=bases)


def plugin_parts(*kinds: str) -> list[Part]:
    """The parts that plugins have registered."""
    return [part for part in _parts.values() if part.kind in kinds and not part.module.startswith("ndtrain.")]


def _load_shipped(kind: str) -> None:
    module = KINDS[kind].shipped
    if module and module not in _loaded:
        _loaded.add(module)
        import_module(module)


# ----------------------------------------------------------------------------------------------------------- plugins


def load_plugins(modules: Sequence[str]) -> None:
    """Imports the plugins of installed packages (entry points in the group `ndtrain.plugins`) and these modules. A
    module that is loaded already is not imported again.

    Raises:
        ConfigError: a module that cannot be imported, fails while it is imported, or registers nothing.
    """
    for name, module in _entry_points():
        _load(module, f"entry point {name}")
    for module in modules:
        _load(module, f"plugins=[{module}]")


@cache
def _entry_points() -> list[tuple[str, str]]:
    """(name, module) of those of installed packages. It looks at every package once a process, as that takes 20 ms."""
    return [(point.name, point.value.partition(":")[0]) for point in entry_points(group=ENTRY_POINTS)]


def _load(module: str, origin: str) -> None:
    if module in _loaded:
        return
    for kind in KINDS:  # before: what a plugin imports of ndtrain is not the plugin's
        _load_shipped(kind)
    before = dict(_parts)
    _loading.append(module)
    try:
        _import(module, origin)
        if _parts.keys() == before.keys():
            raise ConfigError(f"{origin}: {module} registers nothing: use a decorator of ndtrain.plugins in it")
    except ConfigError:
        _parts.clear()
        _parts.update(before)
        raise
    finally:
        _loading.pop()
    _loaded.add(module)


def _import(module: str, origin: str) -> None:
    try:
        import_module(module)
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from error
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            fix = "install it, or add its folder to PYTHONPATH"
            raise ConfigError(f"{origin}: there is no module {error.name}: {fix}") from error
        raise ConfigError(f"{origin}: {module} cannot be imported: {_where(error)}") from error
    except Exception as error:
        raise ConfigError(f"{origin}: {module} cannot be imported: {_where(error)}") from error


def plugin_failure(error: BaseException) -> str | None:
    """Return one line that names the plugin in whose code an error was raised; None if no plugin's code was running.

    The plugin's innermost frame counts, also if that frame called other code. All modules of a plugin's package are
    its code.
    """
    modules = {part.module.partition(".")[0]: part.module for part in plugin_parts(*KINDS)}
    frames = list(traceback.walk_tb(error.__traceback__))
    for depth in reversed(range(len(frames))):
        package = str(frames[depth][0].f_globals.get("__name__", "")).partition(".")[0]
        if package in modules:
            return f"plugin {modules[package]}: {_where(error, depth)}"
    return None


def _where(error: BaseException, depth: int = -1) -> str:
    """Return the error with file and line of the frame at `depth` of its traceback."""
    frame = traceback.extract_tb(error.__traceback__)[depth]
    line = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}{': ' * bool(line)}{line} ({frame.filename}:{frame.lineno})"


def decorator(kind: str, name: str, config: type | None = None) -> Callable[[Any], Any]:
    """A decorator that registers what it is put on."""

    def apply(value: Any) -> Any:
        register(kind, name, value, config)
        return value

    return apply
