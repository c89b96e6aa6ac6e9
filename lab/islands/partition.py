"""A partition: the network between two groups of islands is cut for a while, and then repaired.

At most one group may finish steps during the cut, apart from the step in progress. At the end all islands have finished
the run, and every step has the same loss wherever it was done.
"""

import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.islands import recipe
from lab.islands.figures import first_finishes, next_step_after, rounded
from lab.islands.options import TrialOptions, number
from lab.islands.processes import Islands
from lab.islands.watch import Finished, Watcher, logged, wait_until
from ndtrain.arguments import ArgumentError, option
from ndtrain.config import ConfigError
from ndtrain.measure.results import save
from tests.lib import namespaces

_BEGIN_STEP = 20  # after which the network is cut
_PATIENCE_S = 600.0


def _sides(key: str, text: str) -> list[int]:
    if not re.fullmatch(r"[1-9](\+[1-9])+", text):
        raise ArgumentError(f"{key}={text}: must be the islands of each side, e.g. 2+1")
    return [int(x) for x in text.split("+")]


@dataclass(frozen=True)
class Options(TrialOptions):
    """Options of the trial."""

    sides: list[int] = option("islands of each side; the first side has the first member", (2, 1), read=_sides)
    seconds: float = number("seconds for which the network is cut", 30.0)
    steps: int = option("steps of the run; they must outlast the cut", 500)
    hidden: int = option("hidden size of the model", 128)
    seq_len: int = option("tokens of a row", 128)
    batch: int = option("rows of the global batch", 12)

    def check(self) -> None:
        super().check()
        if reason := namespaces.missing():
            raise ConfigError(reason)


def run(options: Options) -> bool:
    """Run the trial. Return False if both sides went on, an island failed, or islands had different losses."""
    options.check()
    names = recipe.names(sum(options.sides))
    at, sides = 0, []
    for size in options.sides:
        sides.append(names[at : at + size])
        at += size
    with tempfile.TemporaryDirectory() as place, namespaces.hosts(len(names)) as hosts:
        folder = Path(place)
        own = [f"train.steps={options.steps}", f"train.global_batch={options.batch}", *options.args.split()]
        args = recipe.overrides(folder, *recipe.model(options.hidden, 2, options.seq_len), *own)
        islands = Islands(folder, args, names, dict(zip(names, hosts, strict=True)))
        with islands, Watcher(islands.folders) as seen:
            result = rounded(_trial(options, islands, seen, sides), 6)
    save("islands partition", options, **result)
    _show(options, result)
    return not result["faults"]


def _trial(options: Options, islands: Islands, seen: Watcher, sides: list[list[str]]) -> dict[str, Any]:
    for name in islands.names:
        islands.start(name)
    if not wait_until(lambda: all(seen.step(name) >= _BEGIN_STEP for name in islands.names), _PATIENCE_S):
        raise RuntimeError(f"the islands did not begin: {_lines(islands, 0.0)}")
    cut = time.time()
    for number_, side in enumerate(sides[1:]):
        for name in side:
            islands.hosts[name].plug_into(f"side{number_}")
    time.sleep(options.seconds)
    healed = time.time()
    for name in islands.names:
        islands.hosts[name].plug_into("bridge")
    complete = wait_until(lambda: len(islands.ended()) == len(islands.names), _PATIENCE_S)
    time.sleep(0.1)  # the watcher reads the last rows
    each = [_of_side(seen.finished, side, cut, healed) for side in sides]
    faults = [*_faults(islands, each), *options.disagreements(seen.finished)]
    faults += ["the run ended before the cut: give more steps"] * any(x["last_step"] >= options.steps for x in each)
    faults += [] if complete else [f"not all have finished: {_lines(islands, healed)}"]
    return {
        "sides": each,
        "whole_step_s": _step_s(seen.finished, cut),
        "all_together_again_s": _together(islands, healed),
        "end_codes": islands.ended(),
        "faults": faults,
        "lines": _lines(islands, cut),
    }


def _of_side(finished: Sequence[Finished], side: Sequence[str], cut: float, healed: float) -> dict[str, Any]:
    """Return what a side has done during the cut."""
    own = [row for row in finished if row.island in side]
    times = {step: at for step, at in first_finishes(own).items() if cut < at < healed}
    return {
        "islands": list(side),
        "steps_during_cut": len(times),
        "first_step": min(times, default=0),
        "last_step": max(times, default=0),
        "step_times_s": [at - cut for at in list(times.values())[:3]],
        "next_step_after_repair_s": next_step_after(own, side, healed),
    }


def _faults(islands: Islands, each: Sequence[dict[str, Any]]) -> list[str]:
    going = [own["islands"] for own in each if own["steps_during_cut"] > 1]  # one step may have been in progress
    failed = {name: code for name, code in islands.ended().items() if code}
    return [
        *([f"several sides went on: {going}"] * (len(going) > 1)),
        *(f"{name} has ended with code {code}" for name, code in failed.items()),
    ]


def _step_s(finished: Sequence[Finished], cut: float) -> float:
    """Return the usual seconds per step before the cut."""
    times = [at for at in first_finishes(finished).values() if at < cut][_BEGIN_STEP // 2 :]
    return (times[-1] - times[0]) / (len(times) - 1)


def _together(islands: Islands, healed: float) -> float | None:
    """Return the seconds from the repair until an island has logged an epoch with all islands."""
    of_first = logged(islands.folders[islands.names[0]])
    times = (at - healed for at, text in of_first if at > healed and _has_all(text, islands.names))
    return min(times, default=None)


def _has_all(text: str, names: Sequence[str]) -> bool:
    """Return True if a line names an epoch in which all islands have rows."""
    shares = re.fullmatch(r"islands from step \d+[^:]*: (.*) rows", text)
    return bool(shares) and {share.split()[0] for share in shares[1].split(", ")} == set(names)


def _lines(islands: Islands, since: float) -> dict[str, list[str]]:
    """Return what each island has logged about the islands, with the seconds since a moment."""
    of_protocol = lambda text: re.match(r"islands from|waits|read the state|warning|\d+ of \d+ islands", text)
    shown = lambda lines: [f"{at - since:.1f} s: {text}" for at, text in lines if at > since and of_protocol(text)]
    return {name: shown(logged(folder)) for name, folder in islands.folders.items()}


def _show(options: Options, result: dict[str, Any]) -> None:
    print(f"a step takes {result['whole_step_s']:.3f} s with all islands; the network is cut for {options.seconds:g} s")
    print(f"{'side':10} {'steps during the cut':>22} {'next step after the repair':>28}")
    for own in result["sides"]:
        after = own["next_step_after_repair_s"]
        steps = f"{own['steps_during_cut']} ({own['first_step']} .. {own['last_step']})"
        print(f"{', '.join(own['islands']):10} {steps:>22} {'none' if after is None else f'{after:.2f} s':>28}")
    for name, lines in result["lines"].items():
        print(f"island {name}, seconds since the cut:", *lines, sep="\n  ")
    print("faults: " + ("; ".join(result["faults"]) or "none"))
