"""Messages for a configuration that cannot be composed: one line with the file, the key and the fix."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, GrammarParseError, OmegaConfBaseException

from ndtrain.arguments import near
from ndtrain.config.keys import Key, config_folders, group_options, known_keys, near_key
from ndtrain.config.schema import ConfigError

# Errors raised while a wrong configuration is composed. Hydra raises the last two for an invalid or circular defaults
# list.
_COMPOSING = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, RecursionError)
_OF_NULL = ("'NoneType' object has no attribute 'get'", "Unexpected type for root: NoneType")
_NULL = "a file or an earlier override sets this key to null, so entries cannot be added: remove the null"
PACKAGE = "# @package _global_"
_NUMBERS = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false"}


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file of the user.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or holds something other than a mapping.
    """
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except yaml.YAMLError as error:
        raise ConfigError(_not_yaml(error, path)) from error
    except GrammarParseError as error:
        where, text = f"{path}{_line_of(path, error.full_key or '')}", str(error).splitlines()[0]
        raise ConfigError(
            f"{where}: {error.full_key}: invalid reference ({text}): write it as ${{run.name}}"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: contains a list: write `key: value` lines")
    return content


def wrong_configuration(error: Exception, overrides: Sequence[str]) -> bool:
    """Return True if an error raised during composition is due to the user's files or overrides."""
    return isinstance(error, _COMPOSING) or bool(_entries_of_null(error, overrides))


def _entries_of_null(error: BaseException, overrides: Sequence[str]) -> str:
    """Return the override that adds entries to a free-form key whose value is null; "" if the error has another cause.

    OmegaConf does not check for this case, so its code fails with an AttributeError or AssertionError.
    """
    if not isinstance(error, AttributeError | AssertionError) or not str(error).startswith(_OF_NULL):
        return ""
    return next((o.lstrip("+") for o in overrides if o.startswith("++") and not o.endswith("=null")), "")


def one_line(error: BaseException, search: Sequence[str] | None = None, overrides: Sequence[str] = ()) -> str:
    """Return the one-line message for an error of Hydra or OmegaConf.

    Args:
        search: the folders of `--config-dir`, which may contain the wrong file.
        overrides: the overrides on the command line, which may name files in these folders.
    """
    if isinstance(error, yaml.YAMLError):
        return _not_yaml(error)
    folders, keys = config_folders(search), known_keys()
    chosen = [folder / f"{o.lstrip('+').replace('=', '/', 1)}.yaml" for o in overrides for folder in folders[1:]]
    chosen = [path for path in chosen if path.is_file()]
    first = next(iter(str(error).strip().splitlines()), "")
    named = re.match(r"In '?(?P<config>[^':]*)'?: (?P<text>.*)", first)
    path = _file_of(named["config"], folders) if named else None
    if added := _entries_of_null(error, overrides):
        return f"{added}: {_NULL}"
    causes = [e for e in (error, error.__cause__, error.__context__) if isinstance(e, OmegaConfBaseException)]
    if causes:
        return _wrong_value(causes[0], path or _file_with(causes[0].full_key, chosen, overrides), keys)
    paths = list(dict.fromkeys([path, *chosen] if path else chosen))
    text = named["text"] if named else first
    return _wrong_defaults(text, error, paths, folders) or _wrong_choice(text, paths, folders)


def _wrong_value(error: OmegaConfBaseException, path: Path | None, keys: Mapping[str, Key]) -> str:
    """Return the message for a key or value that the schema refuses, in the file `path` or, if None, in an override."""
    key = error.full_key or ""
    if path and path.parent.name == "recipe" and key == "recipe":
        return f"{path}: its first line must be `{PACKAGE}`, or its keys are placed under `recipe`"
    if path and not key:
        key = _value_for_a_section(path, keys)
    where = f"{path}{_line_of(path, key)}: " if path else ""
    text = str(error).strip().splitlines()[0]
    if key in keys and keys[key].section:
        return f"{where}{key}: a section cannot have a value: set its keys, as in {_below(key, keys)}"
    if isinstance(error, ConfigKeyError | ConfigAttributeError) and path and key in keys and "." in key:
        outer, _, inner = key.rpartition(".")
        return f"{_mention(key, [path])}{key}: keys are nested in a file: write `{inner}:` indented under `{outer}:`"
    if isinstance(error, ConfigKeyError | ConfigAttributeError) and key and key not in keys:
        return f"{where}{key}: no such key; {near_key(key, keys)}`--cfg job` lists them all"
    if match := re.match(r"Value '(.*)' of type '\w+' could not be converted to (\w+)", text):
        needed = _NUMBERS.get(match[2], match[2])
        if match[2] == "Integer" and re.fullmatch(r"-?[0-9]+\.0", match[1]):
            needed += f": write {match[1].removesuffix('.0')}"
        return f"{where}{key}={match[1]}: must be {needed}"
    if re.match(r"Invalid value assigned: \w+ is not a ListConfig", text) and not key:  # an element of a list
        nested = " or ".join(name for name, known in keys.items() if known.kind.startswith("list[list["))
        return f"{where}{nested}: its elements are lists, which need brackets: `[[...]]`"
    if re.match(r"Invalid value assigned: \w+ is not a ListConfig", text):
        return f"{where}{key}: a list needs brackets: `[...]`"
    if match := re.match(r"Cannot assign (\w+) to Dict", text):
        example = f"must be keys with values, as in {{name: text, weight: 1}}, not {match[1]}"
        return f"{where}{key or 'data.blend'}: an entry {example}"
    if match := re.match(r"Value '(.*)' is not a valid bool", text):
        return f"{where}{key}={match[1]}: must be {_NUMBERS['Boolean']}"
    if match := re.match(r"Value '(.*)' \(\w+\) is incompatible with type hint '(.*)'", text):
        return f"{where}{key}={match[1]}: must be of type {match[2].removeprefix('typing.')}"
    if re.search(r"is not Optional|Non optional field|Incompatible value 'None'", text) and "${" not in text:
        return f"{where}{key}=null: must have a value"
    if match := re.match(r"Interpolation key '(.*)' not found", text):
        hint = near(match[1], list(keys))
        return f"{where}{key}: ${{{match[1]}}} refers to an unknown key; {hint}`--cfg job` lists them all"
    if match := re.search(r"\$\{hydra:[^}]*\}", text):
        return f"{where}{key}: {match[0]} is not available here; use a key of the run, e.g. ${{run.name}}"
    return f"{where}{key}: {text}" if key else f"{where}{text}"


def _wrong_defaults(text: str, error: BaseException, paths: Sequence[Path], folders: Sequence[Path]) -> str:
    """Return the message for a wrong defaults list; "" for another error.

    The list may be invalid, lead to its own file, or name a group without the leading slash.
    """
    groups = group_options(folders)
    if isinstance(error, RecursionError):
        return f"{' or '.join(map(str, paths))}: its defaults list includes the file itself: name another recipe there"
    if match := re.match(r"Invalid defaults list in '(.*)', defaults must be a list", text):
        path = _file_of(match[1], folders) or match[1]
        return f"{path}: defaults: must be a list, as in `- override /model: llama_small` on the line below"
    if match := re.match(r"Could not override '([^'@/]*)@recipe\.", text):
        return f"{paths[0]}: its first line must be `{PACKAGE}`, or its keys are placed under `recipe`"
    if match := re.match(r"Could not (?:override|find|load) '[^'@/]*/([^'@/]*)(?:@\w+)?(?:/([^'/]*))?'", text):
        group = match[1]
        if group in groups:
            where = _mention(group, paths)
            line = f"override /{group}: {match[2] or '...'}"
            return f"{where}{group}: in a defaults list a group begins with a slash: write `{line}`"
    if match := re.match(r"(\S+) appears more than once in the final defaults list", text):
        if where := _mention(match[1], paths, unless="override"):
            return f"{where}/{match[1]}: already chosen: write `override /{match[1]}: ...` in the defaults list"
        return f"{match[1]}: chosen twice; write {match[1]}=... without a plus"
    return ""


def _wrong_choice(text: str, paths: Sequence[Path], folders: Sequence[Path]) -> str:
    """Return the message for a group or option that does not exist or is chosen twice, by default Hydra's own text.

    Args:
        paths: the files whose defaults lists may name it.
    """
    groups = group_options(folders)
    if match := re.match(r"Could not (?:find|load) '(.*)/([^/]*)'", text):
        group, option = match[1].strip("/"), match[2]
        where = _mention(option, paths)
        known = sorted(groups.get(group, ()))
        return f"{where}{group}: {option}: no such {group}; {near(option, known)}known: {', '.join(known)}"
    if match := re.match(r"Could not override '(.*)'\.", text):
        group = match[1]
        where = _mention(group, paths)
        hint = near(group.rpartition("/")[2], list(groups))
        return f"{where}override /{group}: no such group; {hint}known: {', '.join(sorted(groups))}"
    if match := re.match(r"(?:Multiple values for|Override '.*' is defined before) '?([^\s':]+?)(?:\.|:) ", text):
        where = _mention(match[1], paths, unless="override")
        return f"{where}/{match[1]}: already chosen: write `override /{match[1]}: ...` in the defaults list"
    if match := re.match(r"Error parsing override '(.*)'", text):
        return f"{match[1]}: an override is key=value"
    return text


def _not_yaml(error: yaml.YAMLError, path: Path | None = None) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
    name = path or (mark.name if mark else "a file of the configuration")
    where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else str(name)
    if "'\\t'" in problem:
        return f"{where}: not YAML: a tab; indent with spaces"
    hint = "" if "duplicate" in problem else " (look at the indentation, colons and brackets here and just above)"
    return f"{where}: not YAML: {problem.splitlines()[0]}{hint}"


# -------------------------------------------------------------------------------------------------- places in files


def _file_of(config: str, folders: Sequence[Path]) -> Path | None:
    """Return the file of a config by its name in Hydra, `recipe/mine`. If there are several, prefer the user's file."""
    paths = [folder / f"{config.removesuffix('.yaml')}.yaml" for folder in reversed(folders)]
    return next((path for path in paths if path.is_file()), None)


def _file_with(key: str | None, paths: Sequence[Path], overrides: Sequence[str]) -> Path | None:
    """Return the file that sets a key; None if no file does, or if an override sets the key too."""
    if not key or any(o.lstrip("+").startswith(f"{key}=") for o in overrides):
        return None
    return next((path for path in paths if _line_of(path, key)), None)


def _mention(word: str, paths: Sequence[Path], unless: str = "\n") -> str:
    """Return `file:line: ` of the first line that contains `word` but not `unless`; "" if there is no such line."""
    for path in paths:
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            text = line.partition("#")[0]
            if unless not in text and re.search(rf"(^|[\s/:]){re.escape(word)}(\s|:|$)", text):
                return f"{path}:{number}: "
    return ""


def _line_of(path: Path, key: str) -> str:
    """Return `:line` of a dotted key in a file; "" if it is not there. Files of a group may omit the group's name."""
    names = key.split(".")
    for wanted in (names, names[1:]):
        node, line = yaml.compose(path.read_text(errors="replace")), None
        for name in wanted:
            pairs = node.value if isinstance(node, yaml.MappingNode) else []
            at = next(((k, v) for k, v in pairs if k.value == name), None)
            if at is None:
                line = None
                break
            line, node = at[0].start_mark.line + 1, at[1]
        if line is not None:
            return f":{line}"
    return ""


def _value_for_a_section(path: Path, keys: Mapping[str, Key]) -> str:
    """Return the first key of a file that names a section but has a plain value; "" if there is no such key."""
    for key, value in read_yaml(path).items():
        if key in keys and keys[key].section and not isinstance(value, dict):
            return key
    return ""


def _below(section: str, keys: Mapping[str, Key]) -> str:
    """Return a key of the section, for an example in a message."""
    return next((key for key in keys if key.startswith(f"{section}.")), f"{section}.KEY")
