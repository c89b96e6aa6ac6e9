"""The closed forms of goodput against failures that are simulated, and against Daly's own figures."""

import math
import random
from dataclasses import astuple

import pytest

from ndtrain.plan.failures import Replicas, Saving, daly, mtbf_of_all, with_checkpoints, with_replicas, young

BOUND = 0.005  # of each share, absolute: what the simulations below may miss the closed forms by
MIN, HOUR = 60.0, 3600.0


class Failures:
    """Times of a Poisson process. They go on whatever the run does."""

    def __init__(self, mtbf: float, seed: int):
        self._draw = random.Random(seed).expovariate
        self._rate, self.next = 1 / mtbf, self._draw(1 / mtbf)

    def strikes_before(self, end: float) -> bool:
        return self.next < end

    def pass_on(self) -> float:
        """The failure that strikes; the next one is drawn."""
        at, self.next = self.next, self.next + self._draw(self._rate)
        return at


def simulated_checkpoints(interval, saving, restart, mtbf, failures=40_000):
    """(training, saving, restarting) shares of a run that goes through so many failures, one save after the other."""
    strikes, now, restarting = Failures(mtbf, seed=1), 0.0, 0.0
    kept = 0  # saves that are complete
    pending = None  # when the save that is written in the background is complete
    for _ in range(failures):
        while True:  # a round: train, save
            end = now + interval + saving.blocking
            if pending is not None and pending < min(end, strikes.next):
                kept, pending = kept + 1, None
            if strikes.strikes_before(end):
                break
            now, pending = end, end + saving.background
        began, pending = strikes.pass_on(), None
        now = began + restart
        while strikes.strikes_before(now):
            now = strikes.pass_on() + restart
        restarting += now - began
    return kept * interval / now, kept * saving.blocking / now, restarting / now


CHECKPOINTS = {
    "long interval": (30 * MIN, Saving(60, 0), 10 * MIN, 3 * HOUR),
    "long save": (20 * MIN, Saving(10 * MIN, 0), 5 * MIN, HOUR),
    "failures during restarts": (5 * MIN, Saving(20, 0), 20 * MIN, 15 * MIN),
    "in the background": (10 * MIN, Saving(5, 8 * MIN), 10 * MIN, HOUR),
    "in the background, often": (3 * MIN, Saving(2, 3 * MIN), 4 * MIN, 10 * MIN),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_with_checkpoints_equals_simulated_failures(name):
    interval, saving, restart, mtbf = CHECKPOINTS[name]
    shares = with_checkpoints(interval, saving, restart, mtbf)
    expected = shares.training, shares.saving, shares.restarting
    assert simulated_checkpoints(interval, saving, restart, mtbf) == pytest.approx(expected, abs=BOUND)
    assert sum(astuple(shares)) == pytest.approx(1) and min(astuple(shares)) >= 0


class Fleet:
    """Replicas of which each fails on its own. A failure of a present one stalls the others."""

    def __init__(self, replicas: Replicas, mtbf: float):
        self.replicas = replicas
        self.failures = [Failures(replicas.count * mtbf, seed) for seed in range(replicas.count)]
        self.back = [0.0] * replicas.count  # when each is present again
        self.moves = [0.0] * replicas.count  # when each stands still no longer

    def fail(self) -> float:
        """The next failure happens."""
        which = min(range(self.replicas.count), key=lambda i: self.failures[i].next)
        now = self.failures[which].pass_on()
        if self.back[which] <= now:
            others = [i for i in range(self.replicas.count) if i != which]
            for i in others:
                self.moves[i] = max(self.moves[i], now + self.replicas.stall)
        self.back[which] = now + self.replicas.absence
        return now

    def restart(self, now: float) -> None:
        self.back, self.moves = [now] * self.replicas.count, [now] * self.replicas.count

    def work(self, start: float, end: float) -> float:
        """Of all replicas together, in seconds of the whole mesh."""
        begins = (max(start, back, moves) for back, moves in zip(self.back, self.moves, strict=True))
        return sum(max(0.0, end - begin) for begin in begins) / self.replicas.count


def simulated_replicas(interval, saving, restart, replicas, mtbf, failures=20_000):
    """The goodput of a run that goes through so many failures. Saves are made by the clock, and without replicas all
    starts again from the last one."""
    fleet, now, kept, since = Fleet(replicas, mtbf), 0.0, 0.0, 0.0
    saved = 0.0  # when the last save was made
    for _ in range(failures):
        after = min(f.next for f in fleet.failures)
        while saved + interval + saving.blocking <= after:
            since += fleet.work(now, saved + interval)
            kept, since = kept + since, 0.0
            now = saved = saved + interval + saving.blocking
        if now < after:
            since += fleet.work(now, after)
        now = max(now, fleet.fail())
        if min(fleet.back) > now:  # none is left
            since, now = 0.0, now + restart
            saved = now
            fleet.restart(now)
    return kept / now


REPLICAS = {
    "16 replicas": (HOUR, Saving(2, 0), 10 * MIN, Replicas(16, 12 * MIN, 3 * MIN), HOUR),
    "4 replicas": (20 * MIN, Saving(5, 0), 10 * MIN, Replicas(4, 15 * MIN, 2 * MIN), 2 * HOUR),
    "2 replicas, often none": (20 * MIN, Saving(5, 0), 10 * MIN, Replicas(2, 15 * MIN, MIN), HOUR),
}
REPLICA_BOUND = {name: 0.01 if "none" in name else 0.002 for name in REPLICAS}  # absolute


@pytest.mark.parametrize("name", REPLICAS)
def test_with_replicas_equals_simulated_failures(name):
    case = REPLICAS[name]
    shares = with_replicas(*case)
    assert simulated_replicas(*case) == pytest.approx(shares.training, abs=REPLICA_BOUND[name])
    assert sum(astuple(shares)) == pytest.approx(1) and min(astuple(shares)) >= 0


def test_mtbf_of_all_equals_simulation():
    replicas, mtbf = Replicas(3, HOUR, 0.0), HOUR
    fleet, times, now = Fleet(replicas, mtbf), 0, 0.0
    for _ in range(50_000):
        others = sum(back > min(f.next for f in fleet.failures) for back in fleet.back)
        which = min(range(3), key=lambda i: fleet.failures[i].next)
        last = others == 2 and fleet.back[which] <= fleet.failures[which].next
        now, times = fleet.fail(), times + last
    assert now / times == pytest.approx(mtbf_of_all(replicas, mtbf), rel=0.05)


def test_daly_equals_figures_of_paper():
    """Figures 3 to 5 of the paper: a dump of 5 minutes, and the best interval for M of 24 h, 6 h and 15 min."""
    assert [round(daly(5, mtbf)) for mtbf in (24 * 60, 6 * 60)] == [117, 57]
    assert daly(5, 15) == pytest.approx(9.1, abs=0.05)


@pytest.mark.parametrize("save_of_mtbf", [1e-4, 1e-2, 0.1, 0.5, 1.0])
def test_daly_interval_is_near_optimal(save_of_mtbf):
    goodput = lambda interval: with_checkpoints(interval, Saving(save_of_mtbf, 0), 0.3, 1.0).training
    best = max(goodput(math.exp(k / 200)) for k in range(-1400, 400))
    assert goodput(daly(save_of_mtbf, 1.0)) > 0.998 * best
    assert goodput(daly(save_of_mtbf, 1.0)) >= goodput(young(save_of_mtbf, 1.0))


def test_rare_and_frequent_failures_have_limits():
    calm = with_replicas(HOUR, Saving(1, 0), HOUR, Replicas(512, HOUR, MIN), 1e12)
    assert calm.training == pytest.approx(HOUR / (HOUR + 1), rel=1e-6)
    assert with_checkpoints(HOUR, Saving(1, 0), HOUR, 1.0).training == 0
    assert daly(3.0, 1.0) == 1.0
