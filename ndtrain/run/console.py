"""The console command `ndtrain <command> ...`: the same as `python -m ndtrain.<command> ...`.

usage: ndtrain COMMAND [arguments of the command]

  train      trains a run:               ndtrain train recipe=llama_small
  data       prepares token files:       ndtrain data prepare out=tokens data=text data.path=corpus/
  checkpoint works on checkpoints:       ndtrain checkpoint list runs/llama_small
  evaluate   validation loss:            ndtrain evaluate runs/llama_small
  generate   continues a text:           ndtrain generate runs/llama_small 'def main('
  schedule   shows pipeline schedules:   ndtrain schedule schedule=zb_v pp=4 microbatches=12
  plan       predicts memory and speed:  ndtrain plan dry recipe=llama3_8b hardware=h100 nodes=4
  bench      runs benchmarks:            ndtrain bench peers axis=one
  preflight  checks hosts and links:     ndtrain preflight recipe=llama_small
  report     draws the curves of runs:   ndtrain report runs/first runs/second
  torchrun   starts several ranks:       ndtrain torchrun --nproc-per-node 2 -m ndtrain.train recipe=llama_small ...

`ndtrain COMMAND --help` lists the arguments of a command. Completion with Tab: eval "$(ndtrain train -sc install=bash)"
"""

import runpy
import sys
from collections.abc import Sequence

import ndtrain
from ndtrain.arguments import near
from ndtrain.run import completion
from ndtrain.run.commands import COMMANDS, CONFIGURED


def main(args: Sequence[str] | None = None) -> int:
    """Run a command in this process. Return the command's exit status, or 2 if there is no such command."""
    args = list(sys.argv[1:] if args is None else args)
    if not args or args[0] in ("-h", "--help"):
        print((__doc__ or "").partition("\n\n")[2].strip(), file=sys.stdout if args else sys.stderr)
        return 0 if args else 2
    if args[0] == "--version":
        print(f"ndtrain {ndtrain.__version__}")
        return 0
    command, *rest = args
    if command not in COMMANDS:
        known = f"{near(command, list(COMMANDS))}known: {', '.join(COMMANDS)}"
        print(f"error: {command}: no such command; {known}", file=sys.stderr)
        return 2
    if command in CONFIGURED and completion.wanted(rest):
        return completion.main(rest)  # completion has to be fast, so do not import the command's module and torch
    sys.argv = [f"ndtrain {command}", *rest]
    try:
        runpy.run_module(COMMANDS[command], run_name="__main__", alter_sys=False)
    except KeyboardInterrupt:  # raised during imports, or in a command that has nothing to save
        print("interrupted", file=sys.stderr)
        return 130
    return 0
