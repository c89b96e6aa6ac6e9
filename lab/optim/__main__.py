"""Trials of optimizers, with their figures as a JSON file and a table.

python -m lab.optim TRIAL [key=value ...]
python -m lab.optim TRIAL --help

{trials}
"""

import sys
from collections.abc import Sequence

from lab.trials import run_trial
from ndtrain.arguments import status_of

TRIALS = {"runs": "folder=runs/sweep keys=optim.lr,run.seed: the losses of a multirun's runs, by their settings"}


def main(args: Sequence[str]) -> int:
    """Run the trial that `args` name. Return 0; 1 if the trial has failed; or 2 for bad arguments."""
    return run_trial("lab.optim", __doc__ or "", TRIALS, args)


if __name__ == "__main__":
    sys.exit(status_of(main))
