"""Draws the planner's pictures of the documentation into docs/img/, from today's predictions.

python docs/plan_drawings.py            # writes docs/img/plan_*.svg
python docs/plan_drawings.py --check    # writes nothing; exit status 1 where a file is stale, but for that of scaling

They take some seconds each, and that of scaling some minutes, so that drawings.py does not make them and no test draws
the last one again.
"""

import sys
import tempfile
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from written import update

from ndtrain.plan.__main__ import main as plan

IMAGES = Path(__file__).parent / "img"
LLAMA3 = ["recipe=llama3_405b", "hardware=h100", "nodes=2048"]
PICTURES = {  # file of docs/img -> arguments of `ndtrain plan`
    "plan_waterfall.svg": ["predict", *LLAMA3],
    "plan_goodput.svg": ["goodput", *LLAMA3, "replicas=16"],
    "plan_scaling.svg": ["scaling", "recipe=llama3_8b", "hardware=h100", "least=8", "most=4096", "predict=6"],
}


SLOW = {"plan_scaling.svg"}


def drawn(names: Collection[str]) -> Iterator[tuple[Path, str]]:
    """Yield the file and the text of each picture."""
    warnings.filterwarnings("ignore", module="torch")
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            made = Path(folder) / name
            if plan([*PICTURES[name], f"svg={made}"]):
                sys.exit(1)
            yield IMAGES / name, made.read_text()


if __name__ == "__main__":
    names = PICTURES.keys() - SLOW if "--check" in sys.argv else PICTURES
    sys.exit(update(drawn(names), "plan_drawings.py", sys.argv[1:]))
