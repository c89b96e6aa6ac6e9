"""Kills: islands of several meshes are killed at random moments and return. Every step is compared with one undisturbed
process, in fp64."""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.islands.figures import rounded
from lab.islands.options import OutOptions
from lab.islands.processes import hidden_output
from ndtrain.arguments import one_of, option
from ndtrain.measure.results import save
from tests.islands.runs import MESHES, run_with_kills
from tests.lib.helpers import write_corpus

BOUND = 1e-10  # of relative differences of losses, gradient norms, weights and moments
_CHOICES = (("one", "one", "one"), ("tp", "fsdp"), ("one", "cp", "fsdp"), ("pp", "one", "one"), ("one", "one", "tp"))


@dataclass(frozen=True)
class Options(OutOptions):
    """Options of the trial."""

    seeds: int = option("runs, each with other random numbers and other meshes", 10)
    kills: int = option("kills of a run", 5)
    steps: int = option("steps of a run", 250)
    meshes: str = option(
        f"mesh of each island, e.g. one,tp; default: others in each run; known: {', '.join(MESHES)}", ""
    )

    def check(self) -> None:
        super().check()
        for mesh in filter(None, self.meshes.split(",")):
            one_of("mesh", mesh, list(MESHES))


def run(options: Options) -> bool:
    """Run the trial. Return False if a run differs or has failed."""
    options.check()
    rows = []
    with tempfile.TemporaryDirectory() as place, hidden_output(Path(place, "console.txt")):
        for seed in range(options.seeds):
            folder = Path(place, str(seed))
            folder.mkdir()
            rows.append(_one_run(options, folder, seed))
            print(_line(rows[-1]), flush=True)
    passed = sum(row["passed"] for row in rows)
    print(f"{passed} of {len(rows)} runs equal one undisturbed process within {BOUND:g}")
    save("islands kills", options, bound=BOUND, passed=passed, runs=rounded(rows))
    return passed == len(rows)


def _one_run(options: Options, folder: Path, seed: int) -> dict[str, Any]:
    meshes = options.meshes.split(",") if options.meshes else list(_CHOICES[seed % len(_CHOICES)])
    began, row = time.monotonic(), {"seed": seed, "meshes": meshes}
    try:
        killed = run_with_kills(folder, write_corpus(folder / "corpus.txt"), meshes, options.kills, options.steps, seed)
    except AssertionError as error:
        return row | {"passed": False, "why": str(error)[-2000:]}
    passed = killed.of_curves < BOUND and killed.of_tensors < BOUND
    return row | {"passed": passed, **killed._asdict(), "seconds": time.monotonic() - began}


def _line(row: dict[str, Any]) -> str:
    begin = f"seed {row['seed']}: islands {', '.join(row['meshes'])}: "
    if "why" in row:
        return f"{begin}FAILED: {row['why']}"
    far = f"largest difference of curves {row['of_curves']:.1e}, of weights and moments {row['of_tensors']:.1e}"
    return f"{begin}{row['kills']} kills, {far}, {row['seconds']:.0f} s"
