"""The parts that a run can be built from, by kind and name. ndtrain's own parts are registered like a user's plugins.

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

ENTRY_POINTS = "ndtrain.plugins"  # the group of entry points in which an installed package lists its plugins


@dataclass(frozen=True)
class Kind:
    """The properties of one kind of part.

    Attributes:
        section: the section of the configuration that contains a part's own fields.
        base: the class that a part's config must extend; None: any dataclass is accepted.
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
    "logger": Kind("logger", LoggerConfig, "ndtrain.observe.loggers"),
    "callback": Kind("callbacks"),
}


# The kinds whose parts are options of a config group. The group is named like the section; the section's key `name`
# selects the part.
GROUPED = ("objective", "optimizer", "source", "logger")


@dataclass(frozen=True)
class Part:
    """A registered part.

    Attributes:
        value: the class, function or object.
        config: the dataclass with the part's own fields; None: the part has no fields of its own.
        module: the module that registered the part.
    """

    kind: str
    name: str
    value: Any
    config: type | None
    module: str


_parts: dict[tuple[str, str], Part] = {}
_loaded: set[str] = set()
_loading: list[str] = []  # the plugins that are being imported, the innermost last


def register(kind: str, name: str, value: Any, config: type | None = None) -> None:
    """Register a part.

    Raises:
        ConfigError: another part of this kind has the name, or `config` does not extend the base class of the kind.
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
    """Return the names of all registered parts of a kind, in the order of registration."""
    _load_shipped(kind)
    return [part.name for part in _parts.values() if part.kind == kind]


def get(kind: str, name: str) -> Any:
    """Return the part with this kind and name.

    Raises:
        ConfigError: there is no such part.
    """
    _load_shipped(kind)
    if (kind, name) not in _parts:
        raise ConfigError(f"{kind} {name}: no such {kind}; known: {', '.join(names(kind))}")
    return _parts[kind, name].value


def config_of(kind: str, name: str) -> type | None:
    """Return the dataclass of a part's own configuration; None if it has no fields of its own."""
    get(kind, name)
    return _parts[kind, name].config


def own_keys(kind: str, name: str) -> list[str]:
    """Return the names of the fields that a part's config adds to the base class of its kind."""
    config, base = config_of(kind, name), KINDS[kind].base
    shared = {f.name for f in fields(base)} if base else set()
    return [f.name for f in fields(config) if f.name not in shared] if config else []


def joined(classes: Sequence[type]) -> type:
    """Return a dataclass with the fields of all these dataclasses."""
    several = tuple(dict.fromkeys(classes))
    bases = tuple(c for c in several if not any(c is not other and issubclass(other, c) for other in several))
    return bases[0] if len(bases) == 1 else make_dataclass("And".join(c.__name__ for c in bases), [], bases=bases)


def plugin_parts(*kinds: str) -> list[Part]:
    """Return the parts of these kinds that plugins have registered."""
    return [part for part in _parts.values() if part.kind in kinds and not part.module.startswith("ndtrain.")]


def _load_shipped(kind: str) -> None:
    module = KINDS[kind].shipped
    if module and module not in _loaded:
        _loaded.add(module)
        import_module(module)


# ----------------------------------------------------------------------------------------------------------- plugins


def load_plugins(modules: Sequence[str]) -> None:
    """Import the plugins of installed packages (entry points in the group `ndtrain.plugins`) and these modules.

    A module that is already loaded is not imported again.

    Raises:
        ConfigError: a module cannot be imported, fails during import, or registers nothing.
    """
    for name, module in _entry_points():
        _load(module, f"entry point {name}")
    for module in modules:
        _load(module, f"plugins=[{module}]")


@cache
def _entry_points() -> list[tuple[str, str]]:
    """Return (name, module) of each entry point of installed packages. Cached, because the search takes 20 ms."""
    return [(point.name, point.value.partition(":")[0]) for point in entry_points(group=ENTRY_POINTS)]


def _load(module: str, origin: str) -> None:
    if module in _loaded:
        return
    for kind in KINDS:  # first, so that parts of ndtrain that the plugin imports are not attributed to the plugin
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
    """Return one line that names the plugin whose code raised an error; None if no plugin's code was running.

    The error may come from code that the plugin called: the plugin's innermost frame is reported. All modules in a
    plugin's package count as its code.
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
    """Return a decorator that registers the decorated class or function."""

    def apply(value: Any) -> Any:
        register(kind, name, value, config)
        return value

    return apply
