"""Trials with many ranks, each with its figures as a JSON file and a table.

python -m lab.scale TRIAL [key=value ...]
python -m lab.scale TRIAL --help

{trials}
"""

import sys
from collections.abc import Sequence

from lab.trials import run_trial
from ndtrain.arguments import status_of

TRIALS = {
    "table": "ranks=32,256,2048,16384: what one rank of a large run does, counted without other ranks",
    "ranks": "ranks=64 mesh='fsdp=64': real gloo processes start, train, save, and resume on another mesh",
}


def main(args: Sequence[str]) -> int:
    """Run the trial that `args` name. Return 0; 1 if the trial has failed; or 2 for bad arguments."""
    return run_trial("lab.scale", __doc__ or "", TRIALS, args)


if __name__ == "__main__":
    sys.exit(status_of(main))
