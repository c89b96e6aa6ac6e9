"""The names that a configuration may use: keys of the schema, groups, options, and the folders of their files."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path

from ndtrain.arguments import near
from ndtrain.config.foreign_names import meaning_of
from ndtrain.config.registry import GROUPED, KINDS, plugin_parts
from ndtrain.config.schema import Config, ConfigError


def conf_dir() -> Path:
    """Return the folder of Hydra groups: inside an installed wheel, else at the repository root."""
    here = Path(__file__).resolve().parent.parent
    for candidate in (here / "conf", here.parent / "conf"):
        if (candidate / "config.yaml").is_file():
            return candidate
    raise ConfigError(f"there is no conf/ next to {here}: the installation is incomplete, reinstall ndtrain")


def config_folders(search: Sequence[str] | None = None) -> list[Path]:
    """Return the shipped folder of groups, followed by the folders given with `--config-dir`."""
    return [conf_dir(), *map(Path, search or [])]


def group_options(folders: Iterable[Path]) -> dict[str, set[str]]:
    """Return group -> its options, from files in the folders and from loaded plugins."""
    groups: dict[str, set[str]] = {}
    for folder in folders:
        for path in folder.glob("*/*.yaml"):
            groups.setdefault(path.parent.name, set()).add(path.stem)
    for part in plugin_parts(*GROUPED, "family"):
        groups[KINDS[part.kind].section].add(part.name)
    return groups


@dataclass(frozen=True)
class Key:
    """The type and the valid values of a key.

    Attributes:
        kind: the type as it is written, `int | None`; empty for a section, which contains other keys.
        choices: the valid values. Empty: any value of the type.
        part: a kind of registered parts whose names are valid values too. Its modules are imported only when needed.
    """

    kind: str = ""
    choices: tuple[str, ...] = ()
    part: str | None = None

    @property
    def section(self) -> bool:
        return not self.kind

    @property
    def free_form(self) -> bool:
        """True if the key is a dict in which users may choose the keys."""
        return "dict[" in self.kind

    @property
    def listed(self) -> bool:
        """True if the value has to be a list (or null)."""
        return self.kind.removesuffix(" | None").startswith("list[")

    @property
    def whole(self) -> bool:
        """True if the value has to be an integer (or null)."""
        return self.kind.removesuffix(" | None") == "int"

    @property
    def optional(self) -> bool:
        """True if the value may be null."""
        return "None" in self.kind or "Optional" in self.kind


def known_keys() -> dict[str, Key]:
    """Return all dotted keys of the schema and of the loaded plugins' configs."""
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
    """Return a hint for a key that does not exist; "" if no known key is similar.

    Compare meanings first (names in other trainers), then spellings. Keys of the same section are preferred.
    """
    if hint := meaning_of(key, [*known, *groups]):
        return hint
    section = key.rpartition(".")[0]
    siblings = [k for k in known if k.rpartition(".")[0] == section] if section in known else []
    return near(key, siblings) or near(key, [*known, *groups])
