"""`bench gpu`: a fixed suite on one device, case by case, into one JSON file and a report next to it.

The most decisive cases run first. Both files are written after each case. A suite can therefore be measured in parts,
even on several days. A call that is killed loses only its current case.
"""

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from lab.gpu.case import run_case
from lab.gpu.estimate import GIB, seconds
from lab.gpu.report import markdown, table
from lab.gpu.suite import SUITES, Case
from ndtrain.arguments import option
from ndtrain.config import ConfigError
from ndtrain.measure.ranks import DEVICE_HELP, Device, choose_device
from ndtrain.measure.results import surroundings, write

DONE = ("measured", "out of memory")  # statuses of cases that are not measured again


@dataclass(frozen=True)
class Options:
    """Options of `bench gpu`."""

    suite: Literal["auto", "h200", "h100", "smoke"] = option(
        "auto: by the GPU's memory, h200 without a GPU; smoke: the same code with tiny shapes, on any device", "auto"
    )
    device: Device = option(DEVICE_HELP, "auto")
    part: str = option("k/n, the k-th of n parts of the suite", "1/1")
    only: str = option("run only cases whose names contain this text", "")
    missing: bool = option("skip cases that are already in the JSON file in `folder`", False)
    resume: str = option("JSON file of an earlier call: its results are kept, and its cases are skipped", "")
    folder: str = option("folder to write gpu-<suite>.json and .md to", "benchmarks")
    limit_s: int = option("time limit of a case in seconds", 300)
    minutes: int = option(
        "time limit for all cases; cases not expected to end in time are skipped; default: no limit", 0
    )
    list: bool = option("print the cases with their expected seconds, and measure nothing", False)


def run(options: Options) -> None:
    """Measure the requested cases and print the report. Without a GPU, the report of a GPU suite comes from the JSON
    file, and cases missing there are shown as not measured.

    Raises:
        ConfigError: arguments that do not go together, or a file that holds another device's results.
    """
    name = choose_suite(options.suite)
    suite, path = SUITES[name], Path(options.folder) / f"gpu-{name}.json"
    if not path.parent.is_dir():
        raise ConfigError(f"folder={options.folder}: no such folder: give an existing one")
    cases = select(suite.cases, options.part, options.only)
    device = choose_device(options.device)
    if options.device == "cpu" and name != "smoke":
        raise ConfigError(f"device=cpu: suite={name} is for a GPU; suite=smoke runs on a CPU too")
    results = _results(path, options.resume)
    done = [name for name, row in results["cases"].items() if row["status"] in DONE]
    left = [c for c in cases if c.name not in done] if options.missing or options.resume else cases
    if options.list:
        print(listing(name, cases, results["cases"]))
        return
    if device == "cpu" and name != "smoke":
        print("This machine has no CUDA device that torch can use: nothing is measured here.\n")
    else:
        _check_same(results, path)
        _measure(left, name, options, device, results, path)
    print(_write(path, name, results))


def choose_suite(asked: str) -> str:
    """Return the suite of that name. For auto, choose the largest suite that fits this GPU's memory, or the largest of
    all without a GPU.

    Raises:
        ConfigError: this GPU has too little memory for any suite.
    """
    if asked != "auto":
        return asked
    sizes = sorted((s.memory, name) for name, s in SUITES.items() if s.memory)
    if not torch.cuda.is_available():
        return sizes[-1][1]
    have = torch.cuda.get_device_properties(0).total_memory / GIB
    fitting = [name for size, name in sizes if size <= have + 1]  # drivers reserve some of it
    if not fitting:
        least, name = sizes[0]
        raise ConfigError(f"suite=auto: this GPU has {have:.0f} GiB, and suite={name} needs {least}; try suite=smoke")
    return fitting[-1]


def listing(name: str, cases: Sequence[Case], rows: Mapping[str, Any]) -> str:
    """List the cases in order, each with its expected seconds, the total minutes so far, and its status."""
    lines, total = [], 0.0
    for case in cases:
        needed = seconds(case, SUITES[name])
        total += needed
        status = rows.get(case.name, {}).get("status", "not measured")
        lines.append([case.name, f"{needed:.0f}", f"{total / 60:.1f}", status])
    return table(["case", "seconds, expected", "minutes so far", ""], lines)


def select(cases: Sequence[Case], part: str, only: str) -> list[Case]:
    """Select every n-th case whose name contains `only`, from the k-th on, if `part` is k/n.

    Raises:
        ConfigError: there is no such part, or no case is left.
    """
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", part)
    if not match or int(match[1]) > int(match[2]):
        raise ConfigError(f"part={part}: must be k/n with k from 1 to n, e.g. 1/4")
    k, n = int(match[1]), int(match[2])
    chosen = [case for case in cases if only in case.name][k - 1 :: n]
    if not chosen:
        known = ", ".join(dict.fromkeys(case.shape for case in cases))
        raise ConfigError(f"only={only}: no case of part {part} has this text in its name; names begin with {known}")
    return chosen


def _measure(
    cases: Sequence[Case], name: str, options: Options, device: str, results: dict[str, Any], path: Path
) -> None:
    """Measure one case after another while time is left. Each row is stored in `results` and on disk at once."""
    suite, here, left_out = SUITES[name], surroundings(), []
    end = time.monotonic() + (60 * options.minutes or float("inf"))
    for number, case in enumerate(cases, start=1):
        left = end - time.monotonic()
        if seconds(case, suite) > left:
            left_out.append(case.name)
            continue
        row = run_case(case, suite, device, min(options.limit_s, left))
        if row["status"] == "timed out" and left < options.limit_s:
            left_out.append(case.name)
            continue
        why = f": {row['why']}" if "why" in row else ""
        print(f"{number}/{len(cases)} {case.name}: {row['status']} in {row['seconds']} s{why}", flush=True)
        results.update(here)
        results["cases"][case.name] = {**row, "commit": here["commit"], "device": device}
        _write(path, name, results)
    if left_out:
        print(
            f"\nnot started or not finished because of minutes={options.minutes}: {', '.join(left_out)}; "
            f"resume={path} continues"
        )
    print()


def _write(path: Path, name: str, results: dict[str, Any]) -> str:
    """Write both files and return the report."""
    if results["cases"]:
        write(path, results)
    report = markdown(name, SUITES[name], results)
    path.with_suffix(".md").write_text(report)
    return report


def _results(path: Path, resume: str) -> dict[str, Any]:
    """Return the results so far: the folder's rows, completed by the rows of the file to resume.

    Raises:
        ConfigError: a file is damaged, or the file to resume does not exist.
    """
    own = _load(path)
    if not resume:
        return own
    if not Path(resume).is_file():
        raise ConfigError(f"resume={resume}: no such file: remove resume= to start the suite from the beginning")
    earlier = _load(Path(resume))
    _check_same(earlier, Path(resume))
    return {**(own if own["cases"] else earlier), "cases": {**earlier["cases"], **own["cases"]}}


def _load(path: Path) -> dict[str, Any]:
    """Return the results in a file, or empty results if it does not exist.

    Raises:
        ConfigError: the file is damaged.
    """
    if not path.exists():
        return {"bench": "gpu", **surroundings(), "cases": {}}
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: delete it, or give another folder") from error


def _check_same(results: dict[str, Any], path: Path) -> None:
    """Check that the file's results come from this device.

    Raises:
        ConfigError: they come from another device.
    """
    name = lambda gpus: gpus[0].partition(",")[0] if gpus else "no GPU"
    then, now = name(results["hardware"]["gpus"]), name(surroundings()["hardware"]["gpus"])
    if results["cases"] and then != now:
        raise ConfigError(f"{path} holds results of {then}, but this is {now}: give another folder")
