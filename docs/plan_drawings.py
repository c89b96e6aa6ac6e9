"""Draws the planner's pictures of the documentation into docs/img/, from today's predictions.

python docs/plan_drawings.py            # writes docs/img/plan_*.svg
python docs/plan_drawings.py --check    # writes nothing; exit status 1 where a file is stale

They take some seconds each, so that drawings.py does not make them.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

from ndtrain.plan.__main__ import main as plan  # noqa: E402

LLAMA3 = [
    "recipe=llama3_8b", "run.name=llama3_405b", "hardware=h100", "nodes=2048", "mesh.pp=16", "mesh.tp=8",
    "mesh.zero=1", "schedule=interleaved", "schedule.chunks=4", "recompute=selective", "train.global_batch=2048",
    "train.steps=1200000", "model.hidden_size=16384", "model.intermediate_size=53248", "model.num_hidden_layers=126",
    "model.num_attention_heads=128",
]  # fmt: skip
PICTURES = {  # file of docs/img -> arguments of `ndtrain plan`
    "plan_waterfall.svg": ["predict", *LLAMA3],
    "plan_goodput.svg": ["goodput", *LLAMA3, "replicas=16"],
}


def main(args: Sequence[str]) -> int:
    """Writes the pictures, or with --check compares them; the exit status."""
    stale = []
    with tempfile.TemporaryDirectory() as folder:
        for name, arguments in PICTURES.items():
            made, path = Path(folder) / name, DOCS / "img" / name
            if plan([*arguments, f"svg={made}"]):
                return 1
            if "--check" not in args:
                path.write_text(made.read_text())
            elif not path.is_file() or path.read_text() != made.read_text():
                stale.append(name)
    if stale:
        print(f"stale: {', '.join(stale)}; run python docs/plan_drawings.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
