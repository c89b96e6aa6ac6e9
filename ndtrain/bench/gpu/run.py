"""`bench gpu`: a fixed suite on one device, case by case, into one JSON file and a report beside it.

Each case is written when it is done, so a suite can be measured in parts, on several days or in short calls.
"""

import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ndtrain.arguments import option
from ndtrain.bench.gpu.case import run_case
from ndtrain.bench.gpu.report import markdown
from ndtrain.bench.gpu.suite import SUITES, Case
from ndtrain.bench.ranks import DEVICE_HELP, Device, choose_device
from ndtrain.bench.results import surroundings, write
from ndtrain.config import ConfigError

DONE = ("measured", "out of memory")  # what missing=true need not measure again


@dataclass(frozen=True)
class Options:
    """Options of `bench gpu`."""

    suite: Literal["h200", "h100", "smoke"] = option("smoke: the same code with tiny shapes, on any device", "h200")
    device: Device = option(DEVICE_HELP, "auto")
    part: str = option("k/n, the k-th of n parts of the suite", "1/1")
    only: str = option("cases whose names hold this", "")
    missing: bool = option("leave out what the JSON file has already", False)
    folder: str = option("where it is written, gpu-<suite>.json and .md", "benchmarks")
    limit_s: int = option("seconds for a case", 900)
    minutes: int = option("for all cases; without end unless given", 0)


def run(options: Options) -> None:
    """Measures what was asked for and prints the report. Without a GPU, its suites are reported from the JSON file, and
    what that lacks as not measured.

    Raises:
        ConfigError: arguments that do not go together, or a file that holds another device's results.
    """
    suite, path = SUITES[options.suite], Path(options.folder) / f"gpu-{options.suite}.json"
    if not path.parent.is_dir():
        raise ConfigError(f"folder={options.folder}: there is no such folder")
    cases = select(suite.cases, options.part, options.only)
    device = choose_device(options.device)
    if options.device == "cpu" and options.suite != "smoke":
        raise ConfigError(f"device=cpu: suite={options.suite} is for a GPU; suite=smoke runs on a CPU too")
    results = _load(path)
    if device == "cpu" and options.suite != "smoke":
        print("This machine has no CUDA device that torch can use: nothing is measured here.\n")
    else:
        _check_same(results, path)
        done = [name for name, row in results["cases"].items() if row["status"] in DONE]
        _measure([c for c in cases if not (options.missing and c.name in done)], options, device, results, path)
    report = markdown(options.suite, suite, results)
    path.with_suffix(".md").write_text(report)
    print(report)


def select(cases: Sequence[Case], part: str, only: str) -> list[Case]:
    """Of the cases whose names hold `only` every n-th, from the k-th on, where `part` is k/n.

    Raises:
        ConfigError: no such part, or no case is left.
    """
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", part)
    if not match or int(match[1]) > int(match[2]):
        raise ConfigError(f"part={part}: must be k/n with k from 1 to n, e.g. 1/4")
    k, n = int(match[1]), int(match[2])
    chosen = [case for case in cases if only in case.name][k - 1 :: n]
    if not chosen:
        known = ", ".join(dict.fromkeys(case.shape for case in cases))
        raise ConfigError(f"only={only}: no case of part {part} is called so; names begin with {known}")
    return chosen


def _measure(cases: Sequence[Case], options: Options, device: str, results: dict[str, Any], path: Path) -> None:
    """Measures one case after the other while there is time; each is in `results` and on disk at once."""
    suite, here = SUITES[options.suite], surroundings()
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # less is lost near the end of memory
    end = time.monotonic() + (60 * options.minutes or float("inf"))
    for number, case in enumerate(cases, start=1):
        left = end - time.monotonic()
        if left <= 0:
            print(f"{options.minutes} minutes are over: {len(cases) - number + 1} cases are left for missing=true\n")
            break
        row = run_case(case, suite, device, min(options.limit_s, left))
        if row["status"] == "timed out" and left < options.limit_s:
            print(f"{case.name}: cut short after {row['seconds']} s by minutes={options.minutes}\n")
            break
        why = f": {row['why']}" if "why" in row else ""
        print(f"{number}/{len(cases)} {case.name}: {row['status']} in {row['seconds']} s{why}", flush=True)
        results.update(here)
        results["cases"][case.name] = {**row, "commit": here["commit"], "device": device}
        write(path, results)
    print()


def _load(path: Path) -> dict[str, Any]:
    """The results so far.

    Raises:
        ConfigError: the file is damaged.
    """
    if not path.exists():
        return {"bench": "gpu", **surroundings(), "cases": {}}
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: delete it, or give another folder") from error


def _check_same(results: dict[str, Any], path: Path) -> None:
    """
    Raises:
        ConfigError: the file holds results of another device.
    """
    name = lambda gpus: gpus[0].partition(",")[0] if gpus else "no GPU"
    then, now = name(results["hardware"]["gpus"]), name(surroundings()["hardware"]["gpus"])
    if results["cases"] and then != now:
        raise ConfigError(f"{path} holds results of {then}, and this is {now}: give another folder")
