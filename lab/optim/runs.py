"""Reads the run folders of multiruns, and gives for each run its settings, its loss and its curve.

The loss of a run is the mean over its last steps. All runs of a sweep read the same data in the same order, so their
losses can be compared.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from omegaconf import OmegaConf

from lab.islands.figures import rounded
from lab.islands.options import OutOptions
from ndtrain.arguments import option
from ndtrain.config import ConfigError
from ndtrain.measure.results import save


@dataclass(frozen=True)
class Options(OutOptions):
    """Options of the trial."""

    folder: str = option("folder that contains the run folders", "runs")
    keys: str = option("keys whose values tell the runs apart, with commas", "optim.name,optim.lr,run.seed")
    last: int = option("number of last steps of which the loss is the mean", 30)
    points: int = option("points of a curve, each the mean of as many steps; 0: no curves", 0)

    def check(self) -> None:
        """Check the options.

        Raises:
            ConfigError: the folder has no runs.
        """
        super().check()
        if not self.folders:
            raise ConfigError(f"folder={self.folder}: there is no metrics.jsonl in a folder below")

    @property
    def folders(self) -> list[Path]:
        """The run folders."""
        return sorted(path.parent for path in Path(self.folder).rglob("metrics.jsonl"))


def run(options: Options) -> bool:
    """Print the runs in the order of their settings, and write them. Return True."""
    options.check()
    keys = options.keys.split(",")
    cases = [_read(folder, keys, options) for folder in options.folders]
    cases.sort(key=lambda case: [(value is not None, value) for value in case["settings"].values()])
    for case in cases:
        settings = " ".join(f"{key}={value}" for key, value in case["settings"].items())
        print(f"{settings}: loss {case['loss']:.4f} over the last {options.last} of {case['steps']} steps")
    save("optim runs", options, cases=rounded(cases, digits=6))
    return True


def _read(folder: Path, keys: list[str], options: Options) -> dict[str, Any]:
    cfg = OmegaConf.load(folder / "config.yaml")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows]
    each = max(1, len(losses) // options.points) if options.points else len(losses)
    means = [[at + each, fmean(losses[at : at + each])] for at in range(0, len(losses) - each + 1, each)]
    return {
        "settings": {key: OmegaConf.select(cfg, key) for key in keys},
        "steps": len(rows),
        "loss": fmean(losses[-options.last :]),
        "step_s": median(row["step_time_s"] for row in rows),
        "curve": means if options.points else [],
    }
