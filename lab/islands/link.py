"""A slow link: seconds per step of islands over it, against the same steps over a fast link.

Each island has a network namespace. Both sides run in alternating order, in every round, for each variant of the run.
"""

import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.islands import probe, recipe, wide_area
from lab.islands.figures import first_finishes, rounded
from lab.islands.options import TrialOptions, number
from lab.islands.processes import Islands
from lab.islands.watch import Watcher, logged, wait_until
from ndtrain.arguments import option
from ndtrain.config import ConfigError
from ndtrain.measure.results import save
from ndtrain.measure.rounds import in_round, quartiles
from tests.lib import namespaces

_START_S = 120.0
SIDES = ("fast", "slow")


@dataclass(frozen=True)
class Options(TrialOptions):
    """Options of the trial."""

    islands: int = option("islands, one process each", 2)
    mbit: float = number("Mbit/s of each island's link, each way", 10.0)
    delay_ms: float = number("milliseconds between two islands, each way", 100.0)
    rounds: int = option("runs of each side", 3)
    steps: int = option("timed steps of a run; with rarer exchanges a multiple of the steps between them", 20)
    warmup: int = option("untimed steps before", 5)
    variants: str = option('overrides of runs to compare, "NAME: OVERRIDES | NAME: OVERRIDES"', "gradients:")
    hidden: int = option("hidden size of the model", 128)
    layers: int = option("layers of the model", 4)
    seq_len: int = option("tokens of a row", 128)
    batch: int = option("rows of the global batch", 8)
    limit_s: int = option("seconds after which a run has failed", 600)

    @property
    def runs(self) -> dict[str, list[str]]:
        """The overrides of each variant."""
        pairs = [text.partition(":") for text in self.variants.split("|")]
        return {name.strip(): given.split() for name, _, given in pairs}

    def check(self) -> None:
        super().check()
        if reason := namespaces.missing() or wide_area.missing():
            raise ConfigError(reason)


def run(options: Options) -> bool:
    """Run the trial. Return True."""
    options.check()
    measured: dict[str, list[dict[str, Any]]] = {f"{name} {side}": [] for name in options.runs for side in SIDES}
    for i in range(options.rounds):
        for case in in_round(measured, i):
            name, _, side = case.rpartition(" ")
            measured[case].append(_one_run(options, options.runs[name], side == "slow"))
            print(f"round {i + 1}: {case}: {measured[case][-1]['s_per_step']:.3f} s a step", flush=True)
    result = rounded({"link": _link(options), "cases": {case: _summary(runs) for case, runs in measured.items()}})
    save("islands link", options, **result)
    _show(options, result)
    return True


def _network(options: Options, hosts: list, slow: bool) -> Any:
    return wide_area.wide_area(hosts, options.mbit, options.delay_ms) if slow else nullcontext()


def _link(options: Options) -> dict[str, dict[str, float]]:
    """Measure both links, as programs see them."""
    found = {}
    for side in SIDES:
        with namespaces.hosts(2) as hosts, _network(options, hosts, side == "slow"):
            megabytes = options.mbit / 2 if side == "slow" else 100
            found[side] = probe.measure(hosts[0], hosts[1], megabytes)
    return found


def _one_run(options: Options, given: list[str], slow: bool) -> dict[str, float]:
    """Return seconds per step and megabytes that an island sends in a step."""
    names = recipe.names(options.islands)
    with tempfile.TemporaryDirectory() as place, namespaces.hosts(len(names)) as hosts, _network(options, hosts, slow):
        folder, card = Path(place), wide_area.CARD if slow else namespaces.CARD
        size = recipe.model(options.hidden, options.layers, options.seq_len)
        own = [f"train.steps={recipe.FOREVER}", f"train.global_batch={options.batch}", *options.args.split()]
        args = recipe.overrides(folder, *size, *own, *given)
        islands = Islands(folder, args, names, dict(zip(names, hosts, strict=True)))
        with islands, Watcher(islands.folders) as seen:
            for name in names:
                islands.start(name)
            _reach(islands, seen, options.warmup, _START_S + options.limit_s)
            before = hosts[0].sent_bytes(card)
            _reach(islands, seen, options.warmup + options.steps, options.limit_s)
            sent = hosts[0].sent_bytes(card) - before
        times = first_finishes(seen.finished)
    seconds = times[options.warmup + options.steps] - times[options.warmup]
    return {"s_per_step": seconds / options.steps, "sent_mb_per_step": sent / options.steps / 1e6}


def _reach(islands: Islands, seen: Watcher, step: int, seconds: float) -> None:
    """Wait until all islands have finished a step.

    Raises:
        RuntimeError: one has ended, or they take too long.
    """
    there = lambda: islands.ended() or all(seen.step(name) >= step for name in islands.names)
    if not wait_until(there, seconds) or islands.ended():
        lines = {name: [text for _, text in logged(folder)[-3:]] for name, folder in islands.folders.items()}
        raise RuntimeError(f"step {step} is not reached after {seconds:.0f} s, or an island has ended: {lines}")


def _summary(runs: list[dict[str, float]]) -> dict[str, Any]:
    """Return the median and the quartiles over runs, and each run."""
    return {**quartiles([own["s_per_step"] for own in runs]), "runs": runs}


def _show(options: Options, result: dict[str, Any]) -> None:
    for side, own in result["link"].items():
        print(f"{side} link: round trip {own['round_trip_ms']:.1f} ms, {own['mbit']:.1f} Mbit/s")
    print(f"{'':24} {'s/step':>8} {'quartiles':>18} {'MB sent a step':>15}")
    for case, own in result["cases"].items():
        sent = own["runs"][-1]["sent_mb_per_step"]
        print(f"{case:24} {own['median']:8.3f} {own['q1']:8.3f} .. {own['q3']:6.3f} {sent:15.3f}")
    for name in options.runs:
        slow, fast = (result["cases"][f"{name} {side}"]["median"] for side in ("slow", "fast"))
        print(f"{name}: a step over the slow link takes {slow / fast:.2f} times as long")
