"""The cost of failures in closed form: the best checkpoint interval, and how the elapsed time is spent.

Failures are a Poisson process: the time to the next failure is exponential with mean M and independent of the past.
They also strike during saves and restarts. All times are in seconds. Under this assumption the shares of
`with_checkpoints` are exact; tests/plan/test_failures.py compares them with simulated failures.
"""

import math
from dataclasses import dataclass

NEVER = 1e18  # the mean time between failures that never happen


@dataclass(frozen=True)
class Shares:
    """Shares of the elapsed time. They add up to 1.

    Attributes:
        training: the goodput: steps that are not lost.
        saving: training waits for a save.
        restarting: from a failure until training continues, without the steps that are repeated.
        lost: steps and saves that a failure made useless.
        absent: replicas are being replaced while the others train.
    """

    training: float
    saving: float
    restarting: float
    lost: float
    absent: float = 0.0


@dataclass(frozen=True)
class Saving:
    """The duration of a save, in seconds.

    Attributes:
        blocking: training waits for this time.
        background: afterwards training continues for this time until the save is complete. A failure loses the save.
    """

    blocking: float
    background: float


def young(blocking: float, mtbf: float) -> float:
    """Return the best training time between two saves, to first order: sqrt(2 blocking M) (Young, "A first order
    approximation to the optimum checkpoint interval", CACM 17(9), 1974)."""
    return math.sqrt(2 * blocking * mtbf)


def daly(blocking: float, mtbf: float) -> float:
    """Return the best training time between two saves, to higher order (Daly, "A higher order estimate of the optimum
    checkpoint interval for restart dumps", FGCS 22(3), 2006). It is near the optimum of `with_checkpoints` even if a
    save is not short compared with M. Neither the restart nor a save's background part changes the optimum."""
    if blocking >= 2 * mtbf:
        return mtbf
    ratio = math.sqrt(blocking / (2 * mtbf))
    return young(blocking, mtbf) * (1 + ratio / 3 + ratio**2 / 9) - blocking


def with_checkpoints(interval: float, saving: Saving, restart: float, mtbf: float) -> Shares:
    """Return how a run spends its time if any failure stops it and it restarts from its last complete checkpoint.

    From one complete checkpoint to the next, S = interval + blocking must pass without a failure. After a failure,
    restart + background + S must pass, because the newest complete checkpoint is older by its background part. The
    expected time of both together is M exp((restart + background) / M) (exp(S / M) - 1). Without a background part this
    is Daly's complete model. A save must end before the next begins: background <= S.
    """
    length = (interval + saving.blocking) / mtbf
    passed = math.exp(-length - (restart + saving.background) / mtbf) / -math.expm1(-length)  # checkpoints per M
    training, saved = passed * interval / mtbf, passed * saving.blocking / mtbf
    restarting = -math.expm1(-restart / mtbf)  # probability that the last failure is less than a restart ago
    return Shares(training, saved, restarting, 1 - training - saved - restarting)


@dataclass(frozen=True)
class Replicas:
    """Replicas that continue training if one of them is lost. The lost replica restores its state from a peer.

    Attributes:
        count: number of replicas, 2 or more, of equal size.
        absence: time from a replica's failure until it trains again.
        stall: time that the others lose: until they detect the failure, and the step that they repeat.
    """

    count: int
    absence: float
    stall: float


def mtbf_of_all(replicas: Replicas, mtbf: float) -> float:
    """Return the mean time between failures that leave no replica: the last one fails while all others are absent.

    A replica is present for a share a = exp(-absence / (n M)) of the time. In n M there are n a (1 - a)^(n - 1) such
    failures.
    """
    each = replicas.count * mtbf
    present, absent = math.exp(-replicas.absence / each), -math.expm1(-replicas.absence / each)
    return mtbf / max(present * absent ** (replicas.count - 1), mtbf / NEVER)


def chance_without_quorum(count: int, takeover: float, replicas_mtbf: float) -> float:
    """Return the probability that a failure leaves too few islands to go on.

    Each failure is followed by `takeover`, after which the remaining islands agree to go on. If too many of them fail
    before they agree, the run waits. More than half of the members before may go on. Half of them may if the first
    member is among them, which is assumed in half of the cases. Of two islands, only the failure of both counts here.

    Args:
        count: the number of islands, all of which are present.
        replicas_mtbf: mean time between failures of one island.
    """
    if not takeover:
        return 0.0
    fails, others = -math.expm1(-takeover / replicas_mtbf), count - 1
    chance = lambda k: math.exp(  # of k failures among the others; binomials of many islands exceed a float
        math.lgamma(others + 1)
        - math.lgamma(k + 1)
        - math.lgamma(others - k + 1)
        + k * math.log(fails)
        - (others - k) * takeover / replicas_mtbf
    )
    too_few = sum(chance(k) for k in range(count // 2, count))
    return too_few + (chance(count // 2 - 1) / 2 if count % 2 == 0 and count > 2 else 0.0)


def with_replicas(interval: float, saving: Saving, restart: float, replicas: Replicas, mtbf: float) -> Shares:
    """Return how a run spends its time if its replicas are lost one at a time.

    A replica fails every n M. It is present if it had no failure for `absence`, with probability
    exp(-absence / (n M)). It trains if the others had no failure for `stall`, with probability
    exp(-stall (n - 1) / (n M)). A checkpoint is needed only if no replica is left. Replicas fail independently of each
    other. Failures of an absent replica are assumed to stall the others too. This makes the goodput too low, by at most
    stall / M times the share of time that a replica is absent.
    """
    n, each = replicas.count, replicas.count * mtbf
    present, absent = math.exp(-replicas.absence / each), -math.expm1(-replicas.absence / each)
    present /= 1 - absent**n  # share of the time in which any replica is present
    moving = math.exp(-replicas.stall * (n - 1) / each)
    base = with_checkpoints(interval, saving, restart, mtbf_of_all(replicas, mtbf))
    return Shares(
        training=base.training * present * moving,
        saving=base.saving,
        restarting=base.restarting + base.training * present * (1 - moving),
        lost=base.lost,
        absent=base.training * (1 - present),
    )
