"""Measures the most promising candidates on this machine and names the fastest.

Every measurement is a process of `ndtrain bench step` and a line of `FOLDER/tune.jsonl`, so that a call that was cut off
goes on where it stopped, and a candidate that fails does not end the others. Candidates are measured in rounds, every
other one backwards, so that a drift of the machine's speed meets all alike.
"""

import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from ndtrain.arguments import option
from ndtrain.bench.rounds import in_round
from ndtrain.config import ConfigError, load_config, resolve
from ndtrain.metrics.measured_peak import cpu_model
from ndtrain.plan.candidates import Space
from ndtrain.plan.hardware import Hardware, load_hardware
from ndtrain.plan.options import RunOptions, unresolved_config, world_of
from ndtrain.plan.predict import Predictor
from ndtrain.plan.price import Rates
from ndtrain.plan.search import override_line, search, workers

TABLE, DESCRIPTION = "tune.jsonl", "hardware.yaml"
LIMIT_S = 600  # of a measurement
_SHARES = ("matmul", "attention", "memory", "link", "network")  # rates that a longer time divides
_TIMES = ("kernel_s", "launch_s", "link_hop_s", "network_hop_s", "step_s")  # those that it multiplies


@dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    """Of `plan tune`. Its hardware is that of this machine."""

    folder: str = option("where the table of measurements is kept; what is there is not measured again")
    best: int = option("candidates of the search to measure", 6)
    candidates: str | None = option('measure these instead: their overrides, " | " between two', None)
    rounds: int = option("measurements of each candidate", 2)
    steps: int = option("timed steps of a measurement, after as many untimed ones", 4)
    predict: int = option("candidates that the search predicts at first", 40)
    processes: int = option("processes to search in", 1)


@dataclass(frozen=True)
class Tuned:
    """A candidate that was measured.

    Attributes:
        overrides: the line to paste.
        step_ms: the fastest of its blocks of steps, which a busy machine disturbs least; None: it failed.
        predicted_ms: None: the hardware's description has no rates.
        error: the last line of what a failed measurement wrote.
    """

    overrides: str
    step_ms: float | None
    predicted_ms: float | None
    error: str


def run(options: Options, overrides: Sequence[str]) -> None:
    """Measures what the table lacks, prints it with the winner, and writes the description with the measured rates.

    Raises:
        ConfigError: there is no such run, a candidate is not legal, all fail, or the folder cannot be used.
    """
    hardware = load_hardware(options.hardware)
    table = Table.open(options.folder)
    lines = _candidates(options, overrides, hardware)
    for number, lines_in_round in enumerate(in_round(lines, i) for i in range(options.rounds)):
        for line in lines_in_round:
            if table.row(line, options, number) is None:
                table.add(line, options, number, measure(line, options))
                print(_progress(table.rows[-1]), flush=True)
    tuned = ranking(table, options, lines)
    if tuned[0].step_ms is None:
        raise ConfigError(f"folder={options.folder}: every candidate failed, the first one with: {tuned[0].error}")
    print(as_text(tuned))
    if ratio := measured_over_predicted(tuned):
        path = Path(options.folder) / DESCRIPTION
        write_description(path, hardware, ratio)
        print(f"\nmeasured / predicted: {ratio:.3f}; hardware={path} has it in its rates")
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(t) for t in tuned], indent=1) + "\n")


def _candidates(options: Options, overrides: Sequence[str], hardware: Hardware) -> dict[str, float | None]:
    """The override line of each candidate -> its predicted milliseconds.

    Raises:
        ConfigError: one is not legal, or none is.
    """
    cfg = unresolved_config(overrides, hardware)
    space = Space(cfg, world_of(cfg, options, hardware), hardware)
    if not options.candidates:
        with workers(options.processes) as pool:
            best = search(space, pool, options.predict).best[: options.best]
        return {override_line(row.candidate, overrides): 1e3 * row.prediction.step_time_s for row in best}
    lines: dict[str, float | None] = {}
    for own in options.candidates.split("|"):
        line = shlex.join([*overrides, *shlex.split(own)])
        resolved = resolve(load_config(shlex.split(line)), space.ranks)
        priced = hardware.memory_gb_s is not None
        lines[line] = 1e3 * Predictor(hardware).predict(resolved, False).step_time_s if priced else None
    return lines


# ----------------------------------------------------------------------------------------------------------- measuring


def measure(line: str, options: Options) -> dict[str, Any]:
    """What a table's row says of one measurement: the milliseconds of a step in each block, or the error."""
    words = shlex.split(line)
    recipe = next((w.partition("=")[2] for w in words if w.startswith("recipe=")), None)
    if recipe is None:
        raise ConfigError("recipe is missing: a bench's steps need one, recipe=llama_small")
    case = shlex.join(w for w in words if not w.startswith("recipe="))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "step.json"
        ranks = resolve_ranks(options)
        command = [
            sys.executable, "-m", "ndtrain.bench", "step", f"recipe={recipe}", f"cases={case}", f"ranks={ranks}",
            f"rounds={options.steps}", "steps=1", f"warmup={options.steps}", f"out={out}",
        ]  # fmt: skip
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return {"block_ms": [], "error": f"not done within {LIMIT_S} s"}
        if ended.returncode:
            said = (ended.stderr.strip() or ended.stdout.strip() or f"exit status {ended.returncode}").splitlines()
            return {"block_ms": [], "error": said[-1]}
        (result,) = json.loads(out.read_text())["found"].values()
        return {"block_ms": result["sides"]["ours"]["block_ms"], "error": ""}
