"""The command line of a run: overrides, Hydra's own flags, and one-line messages for configuration errors."""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import ndtrain
from ndtrain.arguments import near
from ndtrain.config import Config, ConfigError, check_overrides, load_config, world_from_env
from ndtrain.config.foreign_names import meaning_of
from ndtrain.config.keys import config_folders, group_options, known_keys
from ndtrain.run import completion
from ndtrain.run.launcher_report import print_error, record_error
from ndtrain.run.sweep import run_with_hydra

log = logging.getLogger("ndtrain")

Train = Callable[[Config], int]

# Hydra's flags -> the values that may follow. (): any value. None: the flag takes no value.
_FLAGS: dict[str, tuple[str, ...] | None] = {
    "--cfg": ("job", "hydra", "all"), "-c": ("job", "hydra", "all"), "--package": (), "-p": (),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
    "-i": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
    "--multirun": None, "-m": None, "--run": None, "-r": None, "--resolve": None, "--hydra-help": None,
}  # fmt: skip
_OURS = ("--help", "-h", "--version", "--config-dir", "-cd", "--shell-completion", "-sc")
_ACTIONS = ("--cfg", "-c", "--info", "-i", "--multirun", "-m", "--run", "-r")  # at most one of them


def main(train: Train, args: list[str] | None = None, usage: Callable[[Sequence[str]], str] | None = None) -> int:
    """Run `train` with the configuration that `args` describe, and return the exit status.

    With one of Hydra's own flags (`--cfg job`, `--multirun`), Hydra runs `train`. Otherwise the configuration is
    composed here. A configuration error is printed as one line, and the status is 2.

    Args:
        args: command-line arguments. None: the arguments of this process.
        usage: returns the text of `--help`, given the folders of `--config-dir`.
    """
    args = sys.argv[1:] if args is None else args
    try:
        if completion.wanted(args):
            return completion.run(args)
        if not args:
            raise ConfigError("nothing to train: name a recipe, e.g. recipe=llama_small; --help lists more")
        overrides, search, flags = _split(args)
        if usage and not {"--help", "-h"}.isdisjoint(args):
            print(usage(search))
            return 0
        if "--version" in args:
            print(f"ndtrain {ndtrain.__version__}")
            return 0
        if not {"--run", "-r"}.isdisjoint(flags) and len(flags) == 1:
            flags = []
        if flags:
            return run_with_hydra(train, flags, check_overrides(overrides, search, hydra=True), search, _report_error)
        return train(load_config(overrides, search))
    except ConfigError as error:
        _report_error(error)
        return 2
    except KeyboardInterrupt:
        print("interrupted before the first step: nothing was saved", file=sys.stderr, flush=True)
        return 130


def plain_config(args: list[str]) -> Config:
    """Return the configuration that these arguments describe.

    Raises:
        ConfigError: an argument is wrong, or is one of Hydra's own flags.
    """
    overrides, search, flags = _split(args)
    if flags or not {"--help", "-h", "--version"}.isdisjoint(args):
        flag = next(arg for arg in args if arg.startswith("-") and not arg.startswith(("--config-dir", "-cd")))
        raise ConfigError(f"{flag} is not supported by this command, which takes overrides and --config-dir")
    return load_config(overrides, search)


def _report_error(error: ConfigError) -> None:
    """Log the error and print it in one line."""
    log.error(str(error))
    print_error(str(error))


# --------------------------------------------------------------------------------------------------------- arguments


def _split(args: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Split arguments into (overrides, folders given by --config-dir, Hydra's flags with their values).

    Raises:
        ConfigError: a flag is unknown, lacks its value, has a wrong value or conflicts with another flag, or a folder
            does not exist.
    """
    overrides, search, flags = [], [], []
    rest = iter(args)
    for arg in rest:
        name, equals, value = arg.partition("=")
        if name in ("--config-dir", "-cd"):
            search.append(value if equals else _value(arg, rest, "FOLDER"))
            if not Path(search[-1]).is_dir():
                raise ConfigError(f"{name}={search[-1]}: no such folder")
        elif name in _FLAGS:
            flags += _flag(arg, rest)
        elif name in _OURS:
            continue
        elif arg.startswith("-"):
            raise ConfigError(_unknown_flag(name, value if equals else next(rest, ""), search))
        else:
            overrides.append(arg)
    _check_flags(flags)
    return overrides, search, flags


def _unknown_flag(name: str, value: str, search: list[str]) -> str:
    """Return the message for an unknown flag, which may be an override with dashes or a flag of another trainer."""
    key, keys, groups = name.lstrip("-"), known_keys(), group_options(config_folders(search))
    if key in keys or key in groups:
        given = value if value and "=" not in value and not value.startswith("-") else "VALUE"
        return f"{name}: write an override without dashes: {key}={given}"
    if hint := meaning_of(key, [*keys, *groups]):
        return f"{name}: no such flag; {hint}an override is key=value, without dashes"
    known = [flag for flag in (*_OURS, *_FLAGS) if flag.startswith("--")]
    return f"{name}: no such flag; {near(name, known)}known: {', '.join(known)}"


def _flag(arg: str, rest: Iterator[str]) -> list[str]:
    name, equals, value = arg.partition("=")
    choices = _FLAGS[name]
    if choices is None:
        return [arg]
    value = value if equals else _value(arg, rest, "|".join(choices) or "VALUE")
    if choices and value not in choices:
        raise ConfigError(f"{name} {value}: {near(value, choices)}known: {', '.join(choices)}")
    return [name, value]


def _check_flags(flags: Sequence[str]) -> None:
    actions = [flag for flag in flags if flag in _ACTIONS]
    if len(actions) > 1:
        raise ConfigError(f"{actions[0]} and {actions[1]}: use only one of them")
    if "--resolve" in flags and not {"--cfg", "-c"} & set(flags):
        raise ConfigError("--resolve works only with --cfg job")
    if {"--package", "-p"} & set(flags) and not {"--cfg", "-c"} & set(flags):
        raise ConfigError("--package works only with --cfg job")


def _value(flag: str, rest: Iterator[str], example: str) -> str:
    try:
        return next(rest)
    except StopIteration:
        raise ConfigError(f"{flag} needs a value, as in {flag} {example}") from None


# -------------------------------------------------------------------------------------------------------- the process


def run_and_exit(train: Train, usage: Callable[[Sequence[str]], str]) -> NoReturn:
    """Run `main` and exit with its status. Report an exception to torchrun too.

    With several ranks, skip Python's teardown: gloo's threads abort during teardown in about every second run. After an
    error they would wait for peers that never answer.
    """
    alone = world_from_env()[2] == 1
    code: Any = 1
    try:
        code = main(train, usage=usage)
    except SystemExit as request:
        code = request.code
    except BaseException as error:
        record_error(error)
        if alone:
            raise
        sys.excepthook(*sys.exc_info())
    if alone:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)
