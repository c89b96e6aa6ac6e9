"""Reads run folders: the rows of metrics.jsonl, the configuration, and how the run ended."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from ndtrain.config.json_file import JsonError, read_object
from ndtrain.observe.jsonl import read_rows

METRICS_FILE = "metrics.jsonl"


class ReportError(ValueError):
    """A run that cannot be shown. The message is one line."""


@dataclass(frozen=True)
class Metric:
    """One curve of a report.

    Attributes:
        key: its key in metrics.jsonl.
        title: its name.
        unit: the unit of the curve; "" if it has none.
        scale: factor from a value of the file to a value of the curve.
    """

    key: str
    title: str
    unit: str = ""
    scale: float = 1.0

    @property
    def axis(self) -> str:
        """The label of the vertical axis, with the unit."""
        return f"{self.title} ({self.unit})" if self.unit else self.title


STEP_AXIS = "Step"
METRICS = (
    Metric("loss", "Loss", "nats per token"),
    Metric("eval_loss", "Evaluation loss", "nats per token"),
    Metric("lr", "Learning rate"),
    Metric("grad_norm", "Gradient norm"),
    Metric("tokens_per_s", "Throughput", "tokens/s"),
    Metric("mfu", "MFU", "%", 100.0),
    Metric("peak_memory_bytes", "Peak memory", "GiB", 2.0**-30),
    Metric("data_wait_s", "Data wait", "ms", 1000.0),
)


@dataclass(frozen=True)
class Run:
    """One run folder.

    Attributes:
        name: distinguishes it from the other runs of the report.
        steps: [N], the logged steps in order.
        values: metric's key -> [N], in the metric's unit; NaN if a row has no finite value.
        restarts: steps after which the run was resumed from a checkpoint.
        skipped: steps that changed nothing, because the loss or a gradient was not finite.
        config: dotted key -> value; empty if there is no config.yaml.
        ended: how the run ended, in words.
    """

    name: str
    path: Path
    steps: np.ndarray
    values: dict[str, np.ndarray]
    tokens: int
    restarts: list[int]
    skipped: list[int]
    config: dict[str, Any]
    ended: str


def logged_metrics(runs: Sequence[Run]) -> list[Metric]:
    """Return the metrics that have a finite value in at least one run."""
    return [m for m in METRICS if any(np.isfinite(run.values[m.key]).any() for run in runs)]


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the run folders among these folders and directly below them, each once.

    Raises:
        ReportError: a path is neither a run folder nor a folder of run folders.
    """
    runs: list[Path] = []
    for path in paths:
        path = path.parent if path.name == METRICS_FILE else path
        if (path / METRICS_FILE).is_file():
            runs.append(path)
            continue
        below = sorted(p.parent for p in path.glob(f"*/{METRICS_FILE}"))
        if not below:
            why = "neither this folder nor a folder in it has a metrics.jsonl" if path.is_dir() else "no such folder"
            raise ReportError(f"{path}: {why}: give the run.dir of a training run")
        runs += below
    return list({path.resolve(): path for path in runs}.values())


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read these run folders, and give the runs distinct names.

    Leave out runs that cannot be drawn, such as a job of a sweep that has just started.

    Raises:
        ReportError: no run can be drawn. The error is the first one of `read_run`.
    """
    names = [str(_config(path).get("run.name", path.name)) for path in paths]
    if len(set(names)) < len(names):
        names = _paths_apart([path.resolve() for path in paths])
    runs, refused = [], []
    for path, name in zip(paths, names, strict=True):
        try:
            runs.append(read_run(path, name))
        except ReportError as error:
            refused.append(error)
    if refused and not runs:
        raise refused[0]
    for error in refused:
        print(f"skipped: {error}", file=sys.stderr)
    return runs


def _paths_apart(paths: Sequence[Path]) -> list[str]:
    common = Path(os.path.commonpath([path.parent for path in paths]))
    return [str(path.relative_to(common)) for path in paths]


def read_run(path: Path, name: str) -> Run:
    """Read the run in a run folder.

    Incomplete lines, lost rows, a missing configuration and a run in progress are no errors.

    Raises:
        ReportError: there is no row of a step yet, or the file cannot be read.
    """
    try:
        rows = read_rows(path / METRICS_FILE)
    except OSError as error:
        raise ReportError(f"{path / METRICS_FILE}: {error.strerror}") from error
    if not rows:
        raise ReportError(f"{path / METRICS_FILE} has no complete row yet: the run has not finished a step")
    rows.sort(key=lambda row: row["step"])
    values = {m.key: _column(rows, m.key) * m.scale for m in METRICS}
    return Run(
        name=name,
        path=path,
        steps=np.array([row["step"] for row in rows]),
        values=values,
        tokens=int(_number(rows[-1].get("tokens"), 0)),
        restarts=[int(row["resumed_step"]) for row in rows if _number(row.get("resumed_step"), 0)],
        skipped=_skipped(rows),
        config=_config(path),
        ended=_ended(path),
    )


def _number(value: Any, default: float = np.nan) -> float:
    return float(value) if isinstance(value, int | float) else default


def _column(rows: Sequence[dict[str, Any]], key: str) -> np.ndarray:
    column = np.array([_number(row.get(key)) for row in rows])
    column[~np.isfinite(column)] = np.nan
    return column


def _skipped(rows: Sequence[dict[str, Any]]) -> list[int]:
    """Return the steps at which the run's count `skipped_steps` rose."""
    counts = [_number(row.get("skipped_steps"), 0) for row in rows]
    before = [0 if rows[0]["step"] == 1 else counts[0], *counts]
    return [int(row["step"]) for row, old, new in zip(rows, before, counts, strict=False) if new > old]


def _config(path: Path) -> dict[str, Any]:
    """Return the flat configuration, or {} if config.yaml is missing or damaged."""
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path / "config.yaml"), resolve=False)
    except (OSError, OmegaConfBaseException, YAMLError, UnicodeDecodeError):
        return {}
    return flatten(tree) if isinstance(tree, dict) else {}


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested keys: {"a": {"b": 1}} becomes {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return flat


def _ended(path: Path) -> str:
    try:
        why = read_object(path / "exit.json").get("why", "unknown")
    except JsonError:
        return "unknown"
    return "running, or killed" if why == "running" else str(why)


def differences(runs: Sequence[Run]) -> list[str]:
    """Return the keys whose values differ between the runs' configurations. Keys that identify a run are left out."""
    configs = [run.config for run in runs if run.config]
    keys = dict.fromkeys(key for config in configs for key in config)
    own = {"run.name", "run.dir", "model.name", "resume", "logger.group", "logger.tags"}
    missing = object()
    return [k for k in keys if k not in own and any(c.get(k, missing) != configs[0].get(k, missing) for c in configs)]
