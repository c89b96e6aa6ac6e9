"""The command line of a room of trials: `python -m lab.ROOM TRIAL key=value ...`."""

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module

from ndtrain.arguments import ArgumentError, help_lines, one_of, parse, wants_help
from ndtrain.config import ConfigError


def run_trial(room: str, about: str, trials: Mapping[str, str], args: Sequence[str]) -> int:
    """Run the trial that `args` name. Return 0; 1 if the trial has failed; or 2 for bad arguments.

    Args:
        room: the package with a module for each trial, which has `Options` and `run`.
        about: the text of the room's help, with `{trials}` for the list of the trials.
        trials: name -> what the trial shows.
    """
    if not args or wants_help(args[:1]):
        lines = [f"  {name:10} {text}" for name, text in trials.items()]
        print(about.format(trials="\n".join(lines)).strip())
        return 0
    try:
        module = import_module(f"{room}.{one_of('trial', args[0], list(trials))}")
        if wants_help(args):
            print(f"{(module.__doc__ or '').strip()}\n\n{help_lines(module.Options)}")
            return 0
        return int(not module.run(parse(module.Options, args[1:])))
    except (ArgumentError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
