"""Which of several corpora each sequence of an endless run belongs to."""

import math
from collections.abc import Sequence
from fractions import Fraction
from heapq import heappop, heappush

import numpy as np

MAX_PERIOD = 1 << 20  # finer weights are rounded to multiples of 1 / MAX_PERIOD


class MixtureOrder:
    """Assigns each sequence 0, 1, 2, ... of an endless run to one of several corpora.

    The corpus is a pure function of the sequence's number and of the weights. Of the first n sequences, a corpus of
    weight w (of the sum of all weights) has n w, to less than one, for every n. This is the chairman assignment
    problem. Among the corpora whose next sequence may come already, the one with the earliest deadline goes first
    (Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980).

    Attributes:
        period: the number of sequences after which the order repeats.
        shares: how many sequences of a period each corpus has.
    """

    def __init__(self, weights: Sequence[float]):
        """Raises ValueError where a weight is less than 1 / MAX_PERIOD of the sum."""
        self.shares = integer_shares(weights)
        self.period = sum(self.shares)
        self._corpus = _assign(self.shares)
        self._ordinal = np.empty(self.period, np.int64)  # of a sequence among those of its corpus in the period
        for corpus, share in enumerate(self.shares):
            self._ordinal[self._corpus == corpus] = np.arange(share)

    def locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (corpus, number among that corpus's own sequences), each int64 [n], of sequences of the run."""
        period, position = np.divmod(numbers, self.period)
        corpus = self._corpus[position]
        return corpus, period * np.asarray(self.shares)[corpus] + self._ordinal[position]


def integer_shares(weights: Sequence[float]) -> list[int]:
    """Returns the smallest whole numbers in the proportion of `weights`, as their decimal notation gives it.

    Where their sum would exceed MAX_PERIOD, these are the nearest numbers with that sum (largest remainder).

    Raises:
        ValueError: a weight rounds to nothing. `args[1]` is its index.
    """
    exact = [Fraction(str(w)) for w in weights]
    fractions = [w / sum(exact) for w in exact]
    period = min(math.lcm(*(f.denominator for f in fractions)), MAX_PERIOD)
    shares = [math.floor(f * period) for f in fractions]
    by_remainder = sorted(range(len(fractions)), key=lambda c: shares[c] - fractions[c] * period)
    for corpus in by_remainder[: period - sum(shares)]:
        shares[corpus] += 1
    if 0 in shares:
        raise ValueError("a weight is less than a millionth of all", shares.index(0))
    divisor = math.gcd(*shares)
    return [share // divisor for share in shares]


def _assign(shares: Sequence[int]) -> np.ndarray:
    """Returns int64 [period]: the corpus of each sequence of a period."""
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
