"""Draws the planner's pictures of the documentation into docs/img/, from today's predictions.

python docs/plan_drawings.py            # writes docs/img/plan_*.svg
python docs/plan_drawings.py --check    # writes nothing; exit status 1 where a file is stale

They take some seconds each, and that of scaling some minutes, so that drawings.py does not make them.
"""

import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from drawings import update

from ndtrain.plan.__main__ import main as plan

LLAMA3 = ["recipe=llama3_405b", "hardware=h100", "nodes=2048"]
PICTURES = {  # file of docs/img -> arguments of `ndtrain plan`
    "plan_waterfall.svg": ["predict", *LLAMA3],
    "plan_goodput.svg": ["goodput", *LLAMA3, "replicas=16"],
    "plan_scaling.svg": ["scaling", "recipe=llama3_8b", "hardware=h100", "least=8", "most=4096", "predict=6"],
}


def drawn() -> Iterator[tuple[str, str]]:
    """Each picture's name and text."""
    warnings.filterwarnings("ignore", module="torch")
    with tempfile.TemporaryDirectory() as folder:
        for name, arguments in PICTURES.items():
            made = Path(folder) / name
            if plan([*arguments, f"svg={made}"]):
                sys.exit(1)
            yield name, made.read_text()


if __name__ == "__main__":
    sys.exit(update(drawn(), "plan_drawings.py", sys.argv[1:]))
