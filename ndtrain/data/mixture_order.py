"""The order in which an endless run takes its sequences from several corpora."""

import math
from collections.abc import Sequence
from fractions import Fraction
from heapq import heappop, heappush

import numpy as np

MAX_PERIOD = 1 << 20  # finer weights are rounded to multiples of 1 / MAX_PERIOD


class MixtureOrder:
    """Assigns each sequence 0, 1, 2, ... of an endless run to one of several corpora.

    The corpus is a pure function of the sequence's number and of the weights. Let w be the weight of a corpus divided
    by the sum of all weights. For every n, the first n sequences contain n w sequences of this corpus, to less than
    one. This is the chairman assignment problem. Among the corpora whose next sequence is already allowed, the one
    with the earliest deadline goes first (Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980).

    Attributes:
        period: the number of sequences after which the order repeats.
        shares: the number of sequences of each corpus in a period.
    """

    def __init__(self, weights: Sequence[float]):
        """Assign the sequences of one period to the corpora.

        Raises:
            ValueError: a weight is less than about 1 / MAX_PERIOD of the sum.
        """
        self.shares = integer_shares(weights)
        self.period = sum(self.shares)
        self._corpus = _assign(self.shares)
        self._ordinal = np.empty(self.period, np.int64)  # index among the corpus's sequences of the period
        for corpus, share in enumerate(self.shares):
            self._ordinal[self._corpus == corpus] = np.arange(share)

    def locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (corpus, number among this corpus's own sequences) for sequences of the run, each int64 [n]."""
        period, position = np.divmod(numbers, self.period)
        corpus = self._corpus[position]
        return corpus, period * np.asarray(self.shares)[corpus] + self._ordinal[position]


def integer_shares(weights: Sequence[float]) -> list[int]:
    """Return the smallest integers in the ratio of `weights`, which are read as decimal numbers.

    If their sum would exceed MAX_PERIOD, approximate the ratio with integers of this sum (largest remainder).

    Raises:
        ValueError: a weight rounds to 0. `args[1]` is its index.
    """
    exact = [Fraction(str(w)) for w in weights]
    fractions = [w / sum(exact) for w in exact]
    period = min(math.lcm(*(f.denominator for f in fractions)), MAX_PERIOD)
    shares = [math.floor(f * period) for f in fractions]
    by_remainder = sorted(range(len(fractions)), key=lambda c: shares[c] - fractions[c] * period)
    for corpus in by_remainder[: period - sum(shares)]:
        shares[corpus] += 1
    if 0 in shares:
        raise ValueError("a weight is less than a millionth of all weights", shares.index(0))
    divisor = math.gcd(*shares)
    return [share // divisor for share in shares]


def _assign(shares: Sequence[int]) -> np.ndarray:
    """Return the corpus of each sequence of a period, int64 [period]."""
    period = sum(shares)
    assigned = np.empty(period, np.int64)
    counts = [0] * len(shares)
    later = [(0, corpus) for corpus in range(len(shares))]  # (earliest position of its next sequence, corpus)
    ready: list[tuple[int, int]] = []  # (deadline of its next sequence, corpus)
    for position in range(period):
        while later and later[0][0] <= position:
            corpus = heappop(later)[1]
            heappush(ready, (-(-(counts[corpus] + 1) * period // shares[corpus]), corpus))
        corpus = heappop(ready)[1]
        assigned[position] = corpus
        counts[corpus] += 1
        if counts[corpus] < shares[corpus]:
            heappush(later, (counts[corpus] * period // shares[corpus], corpus))
    return assigned
