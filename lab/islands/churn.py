"""Churn: a random island is killed again and again, and started again after some seconds.

The first island killed is the one that listens at `islands.address`. One island is never killed, and its memory is
measured. The useful steps are compared with undisturbed runs of one island less, before and after, and of all islands.
On one machine more islands share the same cores, so all of them do fewer steps than one less.

Processes are forked from a server that has imported everything. Otherwise the imports of returning islands would take
the cores of the others, which do not share a machine in real use.
"""

import random
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.islands import recipe
from lab.islands.figures import growth, rate, rounded
from lab.islands.options import TrialOptions, number
from lab.islands.processes import hidden_output, listener, usage
from lab.islands.watch import Watcher, logged, wait_until
from ndtrain.arguments import option
from ndtrain.config import ConfigError
from ndtrain.measure.results import save
from tests.islands.runs import Islands

_SETTLE_S = 10.0  # after all islands are here, before anything is measured
_DOWN_S = (2.0, 8.0)  # an island is started again after a random time in this range
_SAMPLE_S = 5.0
_PATIENCE_S = 300.0


@dataclass(frozen=True)
class Options(TrialOptions):
    """Options of the trial."""

    islands: int = option("islands, one process each", 8)
    minutes: float = number("minutes with kills", 30.0)
    every: float = number("seconds between kills", 30.0)
    undisturbed: float = number("minutes of each undisturbed run; default: a tenth of `minutes`", 0.0)
    seed: int = option("seed of the random islands and times", 0)
    batch: int = option("rows of the global batch", 16)

    @property
    def quiet_s(self) -> float:
        return 60 * (self.undisturbed or self.minutes / 10)

    def check(self) -> None:
        super().check()
        if self.islands < 3:
            raise ConfigError(f"islands={self.islands}: at least 3 are needed, so that two go on")


def run(options: Options) -> bool:
    """Run the trial. Return False if an island was stuck or has failed, or islands had different losses."""
    options.check()
    with tempfile.TemporaryDirectory() as place, hidden_output(Path(place, "console.txt")):
        before = _undisturbed(options, Path(place, "before"))
        churned = _Churn(options, Path(place, "churn")).run()
        after = _undisturbed(options, Path(place, "after"))
        whole = _undisturbed(options, Path(place, "all"), options.islands)
    usual = (before["steps_per_s"] + after["steps_per_s"]) / 2
    churned["useful_share"] = churned["steps_per_s"] / usual
    churned["useful_share_of_all"] = churned["steps_per_s"] / whole["steps_per_s"]
    result = rounded({"before": before, "churn": churned, "after": after, "all": whole})
    save("islands churn", options, **result)
    _show(result)
    return not churned["faults"]


def _islands(options: Options, folder: Path, count: int) -> Islands:
    folder.mkdir()
    args = recipe.overrides(
        folder, f"train.steps={recipe.FOREVER}", f"train.global_batch={options.batch}", *options.args.split()
    )
    return Islands(folder, args, dict.fromkeys(recipe.names(count), "one"))


def _watcher(islands: Islands) -> Watcher:
    return Watcher({name: islands.folder / name for name in islands.meshes})


def _start_all(islands: Islands, seen: Watcher) -> None:
    for name in islands.meshes:
        islands.start(name)
    if not wait_until(lambda: all(seen.step(name) for name in islands.meshes), _PATIENCE_S):
        raise RuntimeError(f"the islands did not begin: {islands.failures()}")
    time.sleep(_SETTLE_S)


def _undisturbed(options: Options, folder: Path, count: int = 0) -> dict[str, Any]:
    """Return the rate of some islands without kills; of one less than all by default."""
    count = count or options.islands - 1
    with _islands(options, folder, count) as islands, _watcher(islands) as seen:
        _start_all(islands, seen)
        began = time.time()
        time.sleep(options.quiet_s)
        return {"islands": count, **rate(seen.finished, began, time.time())}


@dataclass
class _Churn:
    """The run with kills."""

    options: Options
    folder: Path
    kills: list[dict[str, Any]] = field(default_factory=list)
    samples: dict[str, list[tuple[float, dict]]] = field(default_factory=dict)

    def run(self) -> dict[str, Any]:
        with _islands(self.options, self.folder, self.options.islands) as islands, _watcher(islands) as seen:
            self.islands, self.seen = islands, seen
            self.survivor, draw = list(islands.meshes)[-1], random.Random(self.options.seed)
            self.samples = {name: [] for name in islands.meshes}
            _start_all(islands, seen)
            pid, self.began = islands.pid(self.survivor), time.time()
            end = self.began + 60 * self.options.minutes
            while (at := self.began + len(self.kills) * self.options.every) < end:
                self._sample_until(at)
                self._kill(draw)
            self._sample_until(end)
            measured = rate(seen.finished, self.began, end)
            stuck = self._stuck()
            return self._result(measured, stuck, islands.pid(self.survivor) == pid)

    def _sample_until(self, moment: float) -> None:
        """Wait, and measure all processes from time to time."""
        while (left := moment - time.time()) > 0:
            for name in self.islands.meshes:
                if (used := usage(self.islands.pid(name))) and self.islands.exit_codes(name) == [None]:
                    self.samples[name].append((time.time(), used))
            time.sleep(min(left, _SAMPLE_S))

    def _kill(self, draw: random.Random) -> None:
        """Kill an island, and start it again after some seconds."""
        pids = {self.islands.pid(name): name for name in self.islands.meshes}
        holder = pids.get(listener(self.islands.door, pids) or 0)
        victims = [name for name in self.islands.meshes if name != self.survivor]
        name = holder if not self.kills and holder in victims else draw.choice(victims)
        killed = {"island": name, "held_address": name == holder, "at_step": self.seen.step(self.survivor)}
        self.islands.kill(name)
        began = time.time()
        self._sample_until(began + draw.uniform(*_DOWN_S))
        self.islands.start(name, "resume=auto")
        self.kills.append(killed | {"at_s": began - self.began, "down_s": time.time() - began})

    def _stuck(self) -> list[str]:
        """Return the islands that do not reach the others after the last kill."""
        goal = max(self.seen.step(name) for name in self.islands.meshes) + 5
        there = lambda: all(self.seen.step(name) >= goal for name in self.islands.meshes)
        wait_until(there, 60)
        return [name for name in self.islands.meshes if self.seen.step(name) < goal]

    def _result(self, measured: dict[str, Any], stuck: list[str], alive: bool) -> dict[str, Any]:
        ended = [name for name in self.islands.meshes if self.islands.exit_codes(name) != [None]]
        faults = [f"{name} is stuck at step {self.seen.step(name)}" for name in stuck]
        faults += [f"{name} has ended: {logged(self.folder / name)[-1:]}" for name in ended]
        faults += self.options.disagreements(self.seen.finished)
        faults += ["the survivor was restarted"] * (not alive)
        kinds = ("rss_mib", "threads", "files")
        of_survivor = {kind: [(at, used[kind]) for at, used in self.samples[self.survivor]] for kind in kinds}
        return {
            "islands": self.options.islands,
            **measured,
            "kills": len(self.kills),
            "kills_of_address_holder": sum(kill["held_address"] for kill in self.kills),
            "survivor": {kind: growth(values, 30.0) for kind, values in of_survivor.items()},
            "return_s": sorted(self._return_times()),
            "faults": faults,
            "each_kill": self.kills,
        }

    def _return_times(self) -> list[float]:
        """Return the seconds from each start of an island to its first finished step."""
        starts = [(kill["island"], self.began + kill["at_s"] + kill["down_s"]) for kill in self.kills]
        later = lambda name, at: (row.at - at for row in self.seen.finished if row.island == name and row.at > at)
        return [seconds for name, at in starts if (seconds := min(later(name, at), default=None)) is not None]


def _show(result: dict[str, Any]) -> None:
    print(f"{'':8} {'islands':>7} {'steps':>7} {'seconds':>8} {'steps/s':>8} {'median gap':>11} {'longest gap':>12}")
    for phase in ("before", "churn", "after", "all"):
        own = result[phase]
        gaps = f"{own.get('median_gap_s', 0):9.3f} s {own.get('longest_gap_s', 0):10.3f} s"
        rates = f"{own['steps']:7} {own['seconds']:8.0f} {own['steps_per_s']:8.2f}"
        print(f"{phase:8} {own['islands']:7} {rates}  {gaps}")
    churned = result["churn"]
    print(
        f"{churned['kills']} kills, {churned['kills_of_address_holder']} of them of the island at islands.address; "
        f"useful steps {churned['useful_share']:.1%} of one island less, {churned['useful_share_of_all']:.1%} of all"
    )
    if times := churned["return_s"]:
        print(f"start of an island to its first step: median {times[len(times) // 2]:.1f} s, longest {times[-1]:.1f} s")
    for kind, grown in churned["survivor"].items():
        if grown:
            print(
                f"survivor's {kind}: {grown['first']:.1f} at the start, {grown['last']:.1f} at the end, "
                f"{grown['per_hour']:+.1f} an hour"
            )
    print("faults: " + ("; ".join(churned["faults"]) or "none"))
