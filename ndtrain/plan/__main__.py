"""python -m ndtrain.plan dry recipe=llama3_8b hardware=h100 nodes=4 mesh.tp=8      # --help lists the plans

A plan NAME is the module `ndtrain.plan.NAME`, or one of `lab`. It has a dataclass `Options` and `run(options,
overrides)`, which prints the plan and raises ConfigError or ArgumentError. `ndtrain.run.commands.PLANS` lists them.
"""

import logging
import shlex
import sys
import warnings
from collections.abc import Sequence
from dataclasses import fields
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from ndtrain.arguments import ArgumentError, help_lines, one_of, parse, status_of, wants_help
from ndtrain.config import ConfigError
from ndtrain.run import usage
from ndtrain.run.checkout import LAB, from_checkout
from ndtrain.run.commands import PLANS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Own = TypeVar("Own", bound="DataclassInstance")


def main(args: Sequence[str]) -> int:
    """Make a plan. Return the exit status: 2 if it cannot be made (one line gives the reason), 130 after a Ctrl-C."""
    if wants_help(args) and args[0] in PLANS:
        print(usage.plan(args[0], help_lines(_module(args[0]).Options)))
        return 0
    if not args or wants_help(args):
        print(usage.plans(), file=sys.stdout if args else sys.stderr)
        return 0 if args else 2
    try:
        plan = _module(one_of("plan", args[0], list(PLANS)))
        plan.run(*split_options(plan.Options, args[1:]))
        return 0
    except (ArgumentError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # the results so far have been printed
        print("interrupted", file=sys.stderr)
        return 130


def split_options(cls: type[Own], args: Sequence[str]) -> tuple[Own, list[str]]:
    """Return the plan's options, an instance of the dataclass `cls`, and the other arguments.

    Raises:
        ArgumentError, ConfigError: an option has an invalid value, or a required one is missing.
    """
    own = {f.metadata.get("key") or f.name for f in fields(cls)}
    mine = [arg for arg in args if arg.partition("=")[0] in own]
    return parse(cls, mine), [arg for arg in args if arg not in mine]


def say_at_once(args: Sequence[str]) -> None:
    """Print the requested plan before its modules are imported, which may take some seconds."""
    if args and args[0] in PLANS and not wants_help(args):
        print(f"plan {shlex.join(args)}", file=sys.stderr, flush=True)


def _module(plan: str) -> Any:
    return from_checkout(LAB[plan]) if plan in LAB else import_module(f"ndtrain.plan.{plan}")


if __name__ == "__main__":
    logging.getLogger("ndtrain").addHandler(logging.NullHandler())
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    warnings.filterwarnings("ignore", category=UserWarning, module="torch._dynamo")
    say_at_once(sys.argv[1:])
    sys.exit(status_of(main))
