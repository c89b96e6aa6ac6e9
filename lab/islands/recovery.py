"""Recovery: seconds without a finished step after a loss, of islands and of a job that restarts from a checkpoint.

Islands: one of them is killed, and started again after a few steps. The job: the same number of ranks with mesh.dp, all
killed in the middle between two checkpoints, and started again at once with resume=auto. Both train the same model, in
alternating rounds.

The longest gap is the time between two finished steps that the run had not done before. The lost time is this gap
without the usual time of a step. The number of steps that a job repeats depends on `every`.
"""

import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from lab.islands import recipe
from lab.islands.figures import first_finishes, next_step_after, rounded
from lab.islands.options import TrialOptions
from lab.islands.processes import Islands
from lab.islands.watch import Finished, Watcher, logged, wait_until
from ndtrain.arguments import option
from ndtrain.config import ConfigError
from ndtrain.measure.results import save
from tests.lib.helpers import processes, started

_PATIENCE_S = 300.0
_STEPS_APART = 3  # steps before a kill, and between a kill and the return


@dataclass(frozen=True)
class Options(TrialOptions):
    """Options of the trial."""

    islands: int = option("islands of one process each, and ranks of the job", 2)
    rounds: int = option("kills of each", 3)
    every: int = option("steps between checkpoints of the job", 20)
    hidden: int = option("hidden size of the model", 768)
    layers: int = option("layers of the model: 14 make 100 M parameters", 14)
    seq_len: int = option("tokens of a row", 64)
    batch: int = option("rows of the global batch", 2)

    def check(self) -> None:
        super().check()
        if self.islands < 2:
            raise ConfigError(f"islands={self.islands}: at least 2, so that one goes on")


def run(options: Options) -> bool:
    """Run the trial. Return True."""
    options.check()
    of_islands: list[dict[str, Any]] = []
    of_job: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        args = _overrides(options, Path(place))
        names, draw = recipe.names(options.islands), random.Random(0)
        job = Path(place, "job")
        job.mkdir()
        for number in range(options.rounds):
            group = Path(place, f"group-{number}")
            group.mkdir()
            of_islands.append(_lose_island(Islands(group, args, names), number, draw))
            print(f"round {number + 1}: islands {rounded(of_islands[-1])}", flush=True)
            of_job.append(_restart_job(options, job, args, draw))
            print(f"round {number + 1}: job {rounded(of_job[-1])}", flush=True)
    rounds = {"islands": of_islands, "job": of_job}
    result = rounded({"rounds": rounds} | {side: _medians(own) for side, own in rounds.items()})
    result["times_as_fast"] = rounded(result["job"]["longest_gap_s"] / result["islands"]["longest_gap_s"])
    save("islands recovery", options, **result)
    _show(result)
    return True


def _overrides(options: Options, folder: Path) -> list[str]:
    size = recipe.model(options.hidden, options.layers, options.seq_len)
    own = [f"train.steps={recipe.FOREVER}", f"train.global_batch={options.batch}", *options.args.split()]
    return recipe.overrides(folder, *size, *own)


def _reach(seen: Watcher, names: Sequence[str], step: int, failure: Callable[[], object]) -> None:
    """Wait until some runs have finished a step.

    Raises:
        RuntimeError: they take too long.
    """
    if not wait_until(lambda: all(seen.step(name) >= step for name in names), _PATIENCE_S):
        raise RuntimeError(f"step {step} is not reached in {_PATIENCE_S:.0f} s: {failure()}")


def _usual(finished: Sequence[Finished], begin: int, end: int) -> float:
    """Return the seconds per step from one step to another."""
    times = first_finishes(finished)
    return (times[end] - times[begin]) / (end - begin)


# ------------------------------------------------------------------------------------------------------------- islands


def _lose_island(islands: Islands, number: int, draw: random.Random) -> dict[str, Any]:
    """Start the islands, kill one, start it again, and return the seconds."""
    names, lost = islands.names, islands.names[1 + number % (len(islands.names) - 1)]
    others = [name for name in names if name != lost]
    texts = lambda: {name: logged(folder)[-3:] for name, folder in islands.folders.items()}
    with islands, Watcher(islands.folders) as seen:
        for name in names:
            islands.start(name)
        _reach(seen, names, 1, texts)
        begin = max(seen.step(name) for name in names)
        _reach(seen, names, begin + _STEPS_APART, texts)
        usual = _usual(seen.finished, begin, begin + _STEPS_APART)
        time.sleep(draw.uniform(0, usual))
        step, killed = seen.step(others[0]), time.time()
        islands.kill(lost)
        _reach(seen, others, step + _STEPS_APART, texts)
        next_s, gap = next_step_after(seen.finished, others, killed), _longest_gap(seen.finished, others, step)
        alone = seen.step(others[0])
        returned = time.time()
        islands.start(lost, "resume=auto")
        before = seen.last(lost)
        if not wait_until(lambda: seen.last(lost) > before, _PATIENCE_S):
            raise RuntimeError(f"island {lost} has not returned: {texts()}")
        together = seen.step(lost)
        _reach(seen, names, together + 1, texts)
        slowest = _longest_gap(seen.finished, others, alone)
        times = {
            "step_s": usual,
            "next_step_s": next_s,
            "longest_gap_s": gap,
            "lost_s": gap - usual,
            "longest_gap_during_return_s": slowest,
        }
        return times | _return_times(islands.folders[lost], returned, seen.last(lost), seen.finished, lost)


def _return_times(folder: Path, began: float, last: float, finished: Sequence[Finished], name: str) -> dict[str, float]:
    """Return the parts of the time from the start of an island to its first finished step."""
    lines = [(at - began, text) for at, text in logged(folder) if at > began]
    first = lambda word: min((at for at, text in lines if word in text), default=float("nan"))
    ready, read = first(" parameters, "), first("read the state after step")
    step = next_step_after(finished, [name], began)
    parts = {"return_start_s": ready, "return_read_s": read - ready, "return_first_step_s": step - read}
    return {"return_s": step, **parts}


def _longest_gap(finished: Sequence[Finished], names: Sequence[str], since: int) -> float:
    """Return the longest time between two steps of some islands from a step on."""
    times = list(first_finishes(row for row in finished if row.island in names and row.step >= since).values())
    return max(b - a for a, b in pairwise(times))


# ----------------------------------------------------------------------------------------------------------- a restart


def _restart_job(options: Options, folder: Path, args: Sequence[str], draw: random.Random) -> dict[str, Any]:
    """Start a job, kill it between two checkpoints, start it again, and return the seconds to its next new step."""
    mesh = [f"mesh.dp={options.islands}", "mesh.zero=1", f"checkpoint.every={options.every}"]
    own = [*args, *mesh, f"run.dir={folder / 'run'}", "resume=auto"]
    failure = lambda: logged(folder / "run")[-3:]
    with Watcher({"job": folder / "run"}) as seen:
        old = _last_row(seen)
        with started(own, folder, options.islands):
            _reach(seen, ["job"], 1, failure)
            if not wait_until(lambda: len(seen.finished) > old, _PATIENCE_S):
                raise RuntimeError(f"the job did not begin: {failure()}")
            begin = seen.step("job")
            goal = (begin // options.every + 1) * options.every + options.every // 2
            _reach(seen, ["job"], goal, failure)
            usual = _usual(seen.finished, goal - _STEPS_APART, goal)
            time.sleep(draw.uniform(0, usual))
            for pid in processes(folder):
                os.kill(pid, signal.SIGKILL)
            killed, last, step = time.time(), seen.last("job"), seen.step("job")
            rows = len(seen.finished)
        with started(own, folder, options.islands):
            if not wait_until(lambda: len(seen.finished) > rows and seen.step("job") > step, _PATIENCE_S):
                raise RuntimeError(f"the job did not return: {failure()}")
            later = seen.finished[rows:]
    new = next(row for row in later if row.step > step)
    return {
        "step_s": usual,
        "next_step_s": new.at - killed,
        "longest_gap_s": new.at - last,
        "lost_s": new.at - last - usual,
        "start_to_first_step_s": later[0].at - killed,
        "repeated_steps": sum(row.step <= step for row in later),
        "repeating_s": new.at - later[0].at,
    }


def _last_row(seen: Watcher) -> int:
    """Return the number of rows that the folder already has."""
    time.sleep(0.1)
    return len(seen.finished)


def _medians(rounds: Sequence[dict[str, Any]]) -> dict[str, float]:
    return {key: statistics.median(own[key] for own in rounds) for key in rounds[0]}


def _show(result: dict[str, Any]) -> None:
    for side in ("islands", "job"):
        print(side, *(f"{key} {value:.2f}" for key, value in result[side].items()), sep="\n  ")
    print(f"islands go on {result['times_as_fast']:.1f} times as fast as the job (medians of longest_gap_s)")
