"""What failures cost a run, in closed form: the best checkpoint interval, and where the elapsed time goes.

Failures are a Poisson process: the time to the next one is exponential with mean M, whatever went before, so they also
strike during saves and restarts. All times are in seconds. Under this assumption the shares of `with_checkpoints` are
exact; tests/plan/test_failures.py compares them with simulated failures.
"""

import math
from dataclasses import dataclass

NEVER = 1e18  # the mean time between failures that do not happen


@dataclass(frozen=True)
class Shares:
    """Where the elapsed time goes. The shares add up to 1.

    Attributes:
        training: the goodput: steps that count.
        saving: training waits for a save.
        restarting: from a failure until training goes on, without what is computed again.
        lost: work and saves that a failure made worthless.
        absent: of replicas that are being replaced while the others train.
    """

    training: float
    saving: float
    restarting: float
    lost: float
    absent: float = 0.0


@dataclass(frozen=True)
class Saving:
    """A save. It is of use `background` after `blocking`, and training goes on meanwhile.

    Attributes:
        blocking: training waits so long.
        background: then training goes on, but a failure loses the save.
    """

    blocking: float
    background: float


def young(blocking: float, mtbf: float) -> float:
    """The best training time between two saves to first order: sqrt(2 blocking M) (Young, "A first order approximation
    to the optimum checkpoint interval", CACM 17(9), 1974)."""
    return math.sqrt(2 * blocking * mtbf)


def daly(blocking: float, mtbf: float) -> float:
    """The best training time between two saves to higher order (Daly, "A higher order estimate of the optimum
    checkpoint interval for restart dumps", FGCS 22(3), 2006): near the optimum of `with_checkpoints` also where
    a save is not short against M. Neither the restart nor a save's background part changes the optimum."""
    if blocking >= 2 * mtbf:
        return mtbf
    ratio = math.sqrt(blocking / (2 * mtbf))
    return young(blocking, mtbf) * (1 + ratio / 3 + ratio**2 / 9) - blocking


def with_checkpoints(interval: float, saving: Saving, restart: float, mtbf: float) -> Shares:
    """Where the time of a run goes that any failure stops, and that restarts from its last complete checkpoint.

    From one complete checkpoint to the next, S = interval + blocking must pass without a failure. After a failure,
    restart + background + S must: the newest complete checkpoint is older by its background part. The expected time of
    both together is M exp((restart + background) / M) (exp(S / M) - 1). Without a background part this is Daly's
    complete model. A save must end before the next begins: background <= S.
    """
    length = (interval + saving.blocking) / mtbf
    passed = math.exp(-length - (restart + saving.background) / mtbf) / -math.expm1(-length)  # checkpoints per M
    training, saved = passed * interval / mtbf, passed * saving.blocking / mtbf
    restarting = -math.expm1(-restart / mtbf)  # how likely the last failure is less than a restart ago
    return Shares(training, saved, restarting, 1 - training - saved - restarting)


@dataclass(frozen=True)
class Replicas:
    """Replicas that go on training when one of them is lost, which heals from a peer.

    Attributes:
        count: 2 or more, of equal size.
        absence: from a replica's failure until it trains again.
        stall: how long the others stand still: until they know, and the step that they do again.
    """

    count: int
    absence: float
    stall: float


def mtbf_of_all(replicas: Replicas, mtbf: float) -> float:
    """The mean time between failures that leave no replica: the last one fails while all others are absent.

    With a = exp(-absence / (n M)), the share of time that a replica is present, n a (1 - a)^(n - 1) times in n M.
    """
    each = replicas.count * mtbf
    present, absent = math.exp(-replicas.absence / each), -math.expm1(-replicas.absence / each)
    return mtbf / max(present * absent ** (replicas.count - 1), mtbf / NEVER)


def with_replicas(interval: float, saving: Saving, restart: float, replicas: Replicas, mtbf: float) -> Shares:
    """Where the time of a run goes whose replicas are lost one at a time.

    A replica fails every n M. It is present when it had no failure for `absence`, which is as likely as
    exp(-absence / (n M)), and does not stand still when the others had none for `stall`: exp(-stall (n - 1) / (n M)). A
    checkpoint is needed only when no replica is left. Replicas fail independently of each other. Failures of an absent
    replica are taken to stall the others too: the goodput is too low, by at most stall / M times the share of time that
    a replica is absent.
    """
    n, each = replicas.count, replicas.count * mtbf
    present, absent = math.exp(-replicas.absence / each), -math.expm1(-replicas.absence / each)
    present /= 1 - absent**n  # of the time that one is present
    moving = math.exp(-replicas.stall * (n - 1) / each)
    base = with_checkpoints(interval, saving, restart, mtbf_of_all(replicas, mtbf))
    return Shares(
        training=base.training * present * moving,
        saving=base.saving,
        restarting=base.restarting + base.training * present * (1 - moving),
        lost=base.lost,
        absent=base.training * (1 - present),
    )
