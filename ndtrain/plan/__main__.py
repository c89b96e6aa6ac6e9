"""python -m ndtrain.plan dry recipe=llama3_8b hardware=h100 nodes=4 mesh.tp=8      # --help says more

A plan NAME is the module `ndtrain.plan.NAME`, with a dataclass `Options` and `run(options, overrides)`, which prints
the plan and raises ConfigError or ArgumentError. `ndtrain.runtime.commands.PLANS` lists them.
"""

import logging
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from ndtrain.arguments import ArgumentError, help_lines, one_of, status_of, wants_help
from ndtrain.config import ConfigError
from ndtrain.plan.options import split_options
from ndtrain.runtime import usage
from ndtrain.runtime.commands import PLANS


def main(args: Sequence[str]) -> int:
    """Runs a plan. The exit status: 2 where it cannot be made (one line says why)."""
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


def _module(plan: str) -> Any:
    return import_module(f"ndtrain.plan.{plan}")


if __name__ == "__main__":
    logging.getLogger("ndtrain").addHandler(logging.NullHandler())
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    warnings.filterwarnings("ignore", category=UserWarning, module="torch._dynamo")
    sys.exit(status_of(main))
