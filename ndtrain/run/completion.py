"""Tab completion of the command line: `eval "$(ndtrain train -sc install=bash)"`.

The flag is Hydra's `--shell-completion` or `-sc`, with `install=`, `uninstall=` or `query=` and one of the shells bash,
zsh and fish. Completions come from the schema and the folders of groups. To be fast, this module composes no
configuration and does not import torch.
"""

import os
import shlex
import sys
from collections.abc import Sequence
from glob import glob
from itertools import pairwise
from pathlib import Path

from ndtrain.arguments import near
from ndtrain.config import ConfigError
from ndtrain.config.keys import Key, config_folders, group_options, known_keys
from ndtrain.config.registry import load_plugins, names
from ndtrain.run.commands import COMMANDS, CONFIGURED, PLANS

_FLAGS = ("--config-dir", "--cfg", "--multirun", "--info", "--help", "--version", "--resolve", "--package")

# bash splits words at `=`, so the function extracts the current word from the line itself
_BASH = r"""_ndtrain_complete() {
    local line=${COMP_LINE:0:COMP_POINT}
    local word=${line##*[[:space:]]}
    local cut=${word%"${COMP_WORDS[COMP_CWORD]}"} candidate
    [ "${COMP_WORDS[COMP_CWORD]}" = "=" ] && cut=$word
    COMPREPLY=()
    while IFS= read -r candidate; do
        [ -n "$candidate" ] && COMPREPLY+=("${candidate#"$cut"}")
    done < <(COMP_LINE=$line ndtrain train -sc query=bash 2>/dev/null)
    case "${COMPREPLY[*]}" in *= | *. | */) compopt -o nospace 2>/dev/null ;; esac
}
complete -F _ndtrain_complete ndtrain"""
# compdef exists only after the user's startup file has run compinit
_ZSH = r"""(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -u }
_ndtrain_complete() {
    local -a whole open
    local candidate
    for candidate in ${(f)"$(COMP_LINE="${(j: :)words[1,CURRENT-1]} $PREFIX" ndtrain train -sc query=zsh 2>/dev/null)"}
    do
        case $candidate in *= | *. | */) open+=($candidate) ;; *) whole+=($candidate) ;; esac
    done
    compadd -a whole
    compadd -S '' -a open
}
compdef _ndtrain_complete ndtrain"""
# fish adds no space after a word that ends in = . or /
_FISH = r"""function _ndtrain_complete
    set -lx COMP_LINE (commandline -cp)
    ndtrain train -sc query=fish 2>/dev/null
end
complete -c ndtrain -f -a '(_ndtrain_complete)'"""

_INSTALL = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
_UNINSTALL = {
    "bash": "complete -r ndtrain; unset -f _ndtrain_complete",
    "zsh": "compdef -d ndtrain; unfunction _ndtrain_complete",
    "fish": "complete -c ndtrain -e; functions -e _ndtrain_complete",
}
_ACTIONS = tuple(f"{action}={shell}" for action in ("install", "uninstall", "query") for shell in _INSTALL)


def wanted(args: Sequence[str]) -> bool:
    """Return True if these arguments request shell completion."""
    return not {"-sc", "--shell-completion"}.isdisjoint(args)


def main(args: Sequence[str]) -> int:
    """Call `run`. Print an error as one line and return status 2."""
    try:
        return run(args)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(args: Sequence[str]) -> int:
    """Print the shell's code, or the candidates that complete COMP_LINE, one per line. Return the exit status.

    Raises:
        ConfigError: the action or the shell is unknown.
    """
    asked = next((arg for arg in args if "=" in arg), "")
    action, _, shell = asked.partition("=")
    if asked not in _ACTIONS:
        known = ", ".join(a for a in _ACTIONS if not a.startswith("query"))
        raise ConfigError(f"-sc {asked}: {near(asked, _ACTIONS)}known: {known}; other shells are not supported")
    match action:
        case "install":
            print(_INSTALL[shell])
        case "uninstall":
            print(_UNINSTALL[shell])
        case "query":
            print("\n".join(candidates(os.environ.get("COMP_LINE", ""))))
    return 0


def candidates(line: str) -> list[str]:
    """Return the candidates for the last word of a command line. They end in `=`, `.` or `/` if more must follow."""
    words = line.split(" ")
    before, word = _words(" ".join(words[:-1])), words[-1]
    if before[-1:] in (["--config-dir"], ["-cd"]):
        return _paths(word)
    if before[-1:] in (["--cfg"], ["-c"]):
        return _starting(word, ("job", "hydra", "all"))
    if len(before) == 1 and Path(before[0]).name == "ndtrain":
        return _starting(word, (*COMMANDS, "--help", "--version"))
    if Path(before[0]).name == "ndtrain" and before[1] not in CONFIGURED:
        return _starting(word, ("--help",))
    if word.startswith("-"):
        return _starting(word, _FLAGS)
    if before[1:] == ["plan"]:
        return _starting(word, list(PLANS))
    return _overrides(word, _searched(before))


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text) or [""]
    except ValueError:  # a quote is open
        return text.split() or [""]


def _searched(words: Sequence[str]) -> list[str]:
    """Return the folders given by --config-dir in the line."""
    pairs = [word.partition("=") for word in words]
    after = [b for a, b in pairwise(words) if a in ("--config-dir", "-cd")]
    return [*after, *(value for name, _, value in pairs if name in ("--config-dir", "-cd") and value)]


def _overrides(word: str, search: list[str]) -> list[str]:
    prefix = word[: len(word) - len(word.lstrip("+~"))]
    key, equals, value = word.removeprefix(prefix).partition("=")
    load_plugins([])
    groups, keys = group_options(config_folders(search)), known_keys()
    if not equals:
        heads = {_next_part(name, key, keys, groups) for name in (*groups, *keys) if name.startswith(key)}
        return sorted(prefix + head for head in heads)
    *earlier, last = value.split(",")  # a sweep has several values
    done = f"{prefix}{key}=" + "".join(f"{v}," for v in earlier)
    values = sorted(groups[key]) if key in groups else _values(keys[key]) if key in keys else []
    if not values and key in keys and "str" in keys[key].kind:
        return [done + path for path in _paths(last)]
    return [done + v for v in _starting(last, values)]


def _next_part(name: str, typed: str, keys: dict[str, Key], groups: dict[str, set[str]]) -> str:
    """Return the key up to its next dot, `optim.`, or the whole key followed by `=`.

    A section that is not a group ends in a dot, because it takes no value.
    """
    rest = name[len(typed) :]
    if "." in rest:
        return typed + rest[: rest.index(".") + 1]
    return f"{name}." if name in keys and keys[name].section and name not in groups else f"{name}="


def _values(key: Key) -> list[str]:
    """Return the valid values of a key; empty if they cannot be listed."""
    return ["true", "false"] if key.kind == "bool" else [*key.choices, *(names(key.part) if key.part else ())]


def _starting(word: str, known: Sequence[str]) -> list[str]:
    return [candidate for candidate in known if candidate.startswith(word)]


def _paths(word: str) -> list[str]:
    return sorted(f"{path}/" if Path(path).is_dir() else path for path in glob(f"{word}*"))
