"""Trials with real islands, each with its figures as a JSON file and a table.

python -m lab.islands TRIAL [key=value ...]
python -m lab.islands TRIAL --help

{trials}
"""

import sys
from collections.abc import Sequence

from lab.trials import run_trial
from ndtrain.arguments import status_of

TRIALS = {
    "churn": "islands=8 minutes=30 every=30: islands are killed and return, again and again",
    "link": "mbit=10 delay_ms=100: steps over a slow link, against the same steps over a fast one",
    "partition": "sides=2+1: the network splits for a while",
    "recovery": "islands=2: seconds without a step after a loss, against a restart from a checkpoint",
    "diloco": "islands=1,2,4,8: DiLoCo against data parallelism, at equal tokens, over learning rates",
    "kills": "seeds=10 kills=5: every step of killed islands, compared with one undisturbed process",
}


def main(args: Sequence[str]) -> int:
    """Run the trial that `args` name. Return 0; 1 if the trial has failed; or 2 for bad arguments."""
    return run_trial("lab.islands", __doc__ or "", TRIALS, args)


if __name__ == "__main__":
    sys.exit(status_of(main))
