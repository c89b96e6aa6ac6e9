"""Measures the most promising candidates on this machine and names the fastest.

Every measurement is a process of `ndtrain bench step` and a line of `FOLDER/tune.jsonl`. So an interrupted call
continues where it stopped, and a candidate that fails does not stop the others. Candidates are measured in rounds.
Every second round is in reverse order, so that a drift of the machine's speed affects all candidates alike.
"""

import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ndtrain.arguments import option
from ndtrain.config import ConfigError, resolve
from ndtrain.device.cores import cpu_cores
from ndtrain.device.measured_peak import cpu_model
from ndtrain.plan.candidates import Space, searched_run
from ndtrain.plan.hardware import Hardware, description_path, load_hardware
from ndtrain.plan.options import RunOptions, words_of, world_of, write_file
from ndtrain.plan.predict import Predictor
from ndtrain.plan.price import Rates
from ndtrain.plan.search import Predictions, override_line, printing_so_far, search, workers
from ndtrain.run import cli

TABLE, DESCRIPTION = "tune.jsonl", "hardware.yaml"
LIMIT_S = 600  # timeout of a measurement, in seconds


@dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    """The options of `plan tune`. `hardware` describes this machine."""

    folder: str = option("folder of the table of measurements; measurements in it are not repeated")
    best: int = option("number of candidates of the search to measure", 6)
    candidates: str | None = option('overrides of the candidates to measure instead, separated by " | "', None)
    rounds: int = option("measurements per candidate", 2)
    steps: int = option("timed steps per measurement, after the same number of untimed ones", 4)
    predict: int = option("candidates that the search predicts first", 40)
    processes: int = option("worker processes of the search", 1)


def run(options: Options, overrides: Sequence[str]) -> None:
    """Measure what the table lacks, print it with the winner, and write the description with the measured rate.

    Raises:
        ConfigError: the run's configuration is invalid, a candidate is not legal, all candidates fail, or the folder
            cannot be used.
    """
    hardware = load_hardware(options.hardware)
    table = Table.open(options.folder)
    candidates = _candidates(options, overrides, hardware)
    try:
        _measure_all(table, candidates, options)
    except KeyboardInterrupt:
        print("interrupted: run the same command again to measure the rest\n" + as_text(ranking(table, candidates)))
        raise
    tuned = ranking(table, candidates)
    if tuned[0].step_ms is None:
        raise ConfigError(f"folder={options.folder}: every candidate failed, the first with: {tuned[0].error}")
    print(as_text(tuned))
    if ratio := measured_over_predicted(tuned):
        path = Path(options.folder) / DESCRIPTION
        write_file("folder", str(path), described(options.hardware, ratio))
        print(f"\nmeasured / predicted: {ratio:.3f}. hardware={path} predicts with it")
    if options.json:
        write_file("json", options.json, json.dumps([t._asdict() for t in tuned], indent=1))


def _measure_all(table: "Table", candidates: Sequence["Trial"], options: Options) -> None:
    """Measure what the table lacks, with every second round in reverse order. Print a line for each measurement."""
    for number in range(options.rounds):
        for candidate in candidates[:: -1 if number % 2 else 1]:
            if not table.has(candidate, number):
                print(_progress(table.add(candidate, number, measure(candidate, options.steps))), flush=True)


class Trial(NamedTuple):
    """A candidate to measure.

    Attributes:
        overrides: all overrides of the run, in one line.
        predicted_ms: None if the hardware's description has no rates.
    """

    overrides: str
    ranks: int
    predicted_ms: float | None


def _candidates(options: Options, overrides: Sequence[str], hardware: Hardware) -> list[Trial]:
    """Return the given candidates, or else the best of a search.

    Raises:
        ConfigError: the recipe is missing, a given candidate is not legal, or the search finds none.
    """
    if not any(word.startswith("recipe=") for word in overrides):
        raise ConfigError("recipe is missing: give the recipe to measure, e.g. recipe=llama_small")
    cfg, overrides = searched_run(overrides, hardware)
    ranks = world_of(cfg, options, hardware)
    if options.candidates is None:
        space, predicted = Space(cfg, ranks, hardware), Predictions()
        with printing_so_far(space, predicted, overrides), workers(options.processes) as pool:
            best = search(space, pool, options.predict, predicted=predicted).fitting[: options.best]
        return [Trial(override_line(row.candidate, overrides), ranks, 1e3 * row.prediction.step_time_s) for row in best]
    trials = []
    for own in options.candidates.split("|"):
        words = [*overrides, *words_of("candidates", own)]
        run = resolve(cli.plain_config(words), ranks)
        seconds = Predictor(hardware).predict(run, explain=False).step_time_s if hardware.peak_tflops else None
        trials.append(Trial(shlex.join(words), ranks, None if seconds is None else 1e3 * seconds))
    return trials


# ----------------------------------------------------------------------------------------------------------- measuring


def measure(trial: Trial, steps: int) -> dict[str, Any]:
    """Run one measurement. Return the milliseconds of each step, or the error."""
    words = shlex.split(trial.overrides)
    recipe = next(word for word in words if word.startswith("recipe="))
    case = shlex.join(word for word in words if word != recipe)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "step.json"
        command = [
            sys.executable, "-m", "ndtrain.bench", "step", recipe, f"cases={case}", f"ranks={trial.ranks}",
            f"rounds={steps}", "steps=1", f"warmup={steps}", f"out={out}",
        ]  # fmt: skip
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return {"block_ms": [], "error": f"not done within {LIMIT_S} s"}
        if ended.returncode:
            said = (ended.stderr.strip() or ended.stdout.strip() or f"exit status {ended.returncode}").splitlines()
            return {"block_ms": [], "error": said[-1]}
        (result,) = json.loads(out.read_text())["results"].values()
        return {"block_ms": result["sides"]["ours"]["block_ms"], "error": ""}


@dataclass
class Table:
    """The measurements in a folder. A row is one candidate in one round on one machine.

    Attributes:
        rows: the rows of this machine.
    """

    path: Path
    machine: str
    rows: list[dict[str, Any]]

    @classmethod
    def open(cls, folder: str) -> "Table":
        """Open the table of a folder. Create the folder if necessary, and remove a last line that was cut off.

        Raises:
            ConfigError: the folder cannot be used, or its file is not a table of `plan tune`.
        """
        path, machine = Path(folder) / TABLE, f"{cpu_cores()} x {cpu_model()}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            text = path.read_text() if path.exists() else ""
            whole = text[: text.rfind("\n") + 1]
            if whole != text:
                path.write_text(whole)
            rows = [json.loads(line) for line in whole.splitlines()]
            return cls(path, machine, [row for row in rows if row["machine"] == machine])
        except OSError as error:
            raise ConfigError(f"folder={folder}: cannot be used ({error.strerror})") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"folder={folder}: {path} is not a table of plan tune: give another folder") from error

    def has(self, trial: Trial, number: int) -> bool:
        return any(row["overrides"] == trial.overrides and row["round"] == number for row in self._of(trial))

    def add(self, trial: Trial, number: int, measured: dict[str, Any]) -> dict[str, Any]:
        """Append a row and return it."""
        row = {"machine": self.machine, **trial._asdict(), "round": number, **measured}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.rows.append(row)
        return row

    def blocks(self, trial: Trial) -> list[float]:
        """Return the milliseconds of all measured steps of a candidate."""
        return [ms for row in self._of(trial) for ms in row["block_ms"]]

    def error(self, trial: Trial) -> str:
        return next((row["error"] for row in self._of(trial) if row["error"]), "")

    def _of(self, trial: Trial) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["overrides"] == trial.overrides and row["ranks"] == trial.ranks]


# -------------------------------------------------------------------------------------------------------------- result


class Tuned(NamedTuple):
    """A candidate that was measured.

    Attributes:
        step_ms: its fastest step, which other load on the machine disturbs least; None if it failed.
        median_ms: the median of all steps.
        error: the last line of output of a failed measurement.
    """

    overrides: str
    step_ms: float | None
    median_ms: float | None
    predicted_ms: float | None
    error: str


def ranking(table: Table, trials: Sequence[Trial]) -> list[Tuned]:
    """Return the candidates, the fastest first and failed ones last."""
    tuned = []
    for trial in trials:
        blocks = table.blocks(trial)
        step, median = (min(blocks), statistics.median(blocks)) if blocks else (None, None)
        tuned.append(Tuned(trial.overrides, step, median, trial.predicted_ms, table.error(trial)))
    return sorted(tuned, key=lambda t: float("inf") if t.step_ms is None else t.step_ms)


def measured_over_predicted(tuned: Sequence[Tuned]) -> float | None:
    """Return the median of measured / predicted over the candidates that ran, or None if nothing was predicted."""
    ratios = [t.step_ms / t.predicted_ms for t in tuned if t.step_ms is not None and t.predicted_ms is not None]
    return statistics.median(ratios) if ratios else None


def described(name: str, ratio: float) -> str:
    """Return the description `name` as YAML, changed so that its predictions are longer by the factor `ratio`."""
    body = yaml.safe_load(description_path(name).read_text())
    rates = body.get("rates") or {}
    body["rates"] = rates | {"slower": round(ratio * rates.get("slower", Rates().slower), 6)}
    return yaml.safe_dump(body, sort_keys=False, default_flow_style=None, width=118).rstrip()


def as_text(tuned: Sequence[Tuned]) -> str:
    """Format the candidates as a table for people, with the winner in the first row."""
    ms = lambda value: "-" if value is None else f"{value:.1f}"
    lines = [f"{'fastest ms':>10} {'median ms':>10} {'predicted ms':>13}   overrides"]
    for t in tuned:
        lines.append(f"{ms(t.step_ms):>10} {ms(t.median_ms):>10} {ms(t.predicted_ms):>13}   {t.error or t.overrides}")
    winner = ["", f"winner: {tuned[0].overrides}"] if tuned[0].step_ms is not None else []
    return "\n".join([*lines, *winner])


def _progress(row: dict[str, Any]) -> str:
    what = row["error"] or f"{min(row['block_ms']):.1f} ms"
    return f"round {row['round']}: {what}   {row['overrides']}"
