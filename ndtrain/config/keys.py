"""The names that a configuration may use: keys of the schema, groups and their options, and where their files are."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path

from ndtrain.arguments import near
from ndtrain.config.foreign_names import meaning_of
from ndtrain.config.registry import GROUPED, KINDS, plugin_parts
from ndtrain.config.schema import Config, ConfigError


def conf_dir() -> Path:
    """The folder of Hydra groups: inside an installed wheel, else at the repository root."""
    here = Path(__file__).resolve().parent.parent
    for candidate in (here / "conf", here.parent / "conf"):
        if (candidate / "config.yaml").is_file():
            return candidate
    raise ConfigError(f"there is no conf/ beside {here}: the installation is incomplete, reinstall ndtrain")


def config_folders(search: Sequence[str] | None = None) -> list[Path]:
    """The shipped folder of groups, and those that `--config-dir` names."""
    return [conf_dir(), *map(Path, search or [])]


def group_options(folders: Iterable[Path]) -> dict[str, set[str]]:
    """group -> the options that its files and the loaded plugins offer."""
    groups: dict[str, set[str]] = {}
    for folder in folders:
        for path in folder.glob("*/*.yaml"):
            groups.setdefault(path.parent.name, set()).add(path.stem)
    for part in plugin_parts(*GROUPED, "family"):
        groups[KINDS[part.kind].section].add(part.name)
    return groups


@dataclass(frozen=True)
class Key:
    """What is known of a key.

    Attributes:
        kind: its type as it is written, `int | None`; empty for a section, which has keys below it.
        choices: its values, where only some are valid.
        part: the kind of registered parts whose names are values too; they are imported only when they are asked for.
    """

    kind: str = ""
    choices: tuple[str, ...] = ()
    part: str | None = None

    @property
    def section(self) -> bool:
        return not self.kind

    @property
    def free_form(self) -> bool:
        """Whether it may have any keys below it."""
        return "dict[" in self.kind

    @property
    def listed(self) -> bool:
        """Whether it is a list, and nothing else."""
        return self.kind.removesuffix(" | None").startswith("list[")

    @property
    def whole(self) -> bool:
        """Whether it is a whole number, and nothing else."""
        return self.kind.removesuffix(" | None") == "int"

    @property
    def optional(self) -> bool:
        """Whether null is a value."""
        return "None" in self.kind or "Optional" in self.kind


def known_keys() -> dict[str, Key]:
    """Every dotted key of the schema, and those of every plugin's config."""
    keys = _keys_of(Config) | {"callbacks": Key()}
    for part in plugin_parts(*KINDS):
        section = KINDS[part.kind].section
        if part.kind == "callback":
            section = f"callbacks.{part.name}"
            keys[section] = Key()
        if part.config:
            keys |= _keys_of(part.config, f"{section}.")
    return keys


def _keys_of(cls: type, prefix: str = "") -> dict[str, Key]:
    keys = {}
    for f in fields(cls):
        nested = f.default_factory if f.default_factory is not MISSING else None
        if is_dataclass(nested):
            keys[prefix + f.name] = Key()
            keys |= _keys_of(nested, f"{prefix}{f.name}.")
        else:
            kind = f.type.__name__ if type(f.type) is type else str(f.type)
            keys[prefix + f.name] = Key(kind, f.metadata.get("choices", ()), f.metadata.get("part"))
    return keys


def near_key(key: str, known: Mapping[str, Key], groups: Iterable[str] = ()) -> str:
    """A hint on a key that does not exist, or nothing: by its meaning, else by its spelling. Keys of the same section
    come first."""
    if hint := meaning_of(key, [*known, *groups]):
        return hint
    section = key.rpartition(".")[0]
    siblings = [k for k in known if k.rpartition(".")[0] == section] if section in known else []
    return near(key, siblings) or near(key, [*known, *groups])
