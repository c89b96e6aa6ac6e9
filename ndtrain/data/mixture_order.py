"""Which of several corpora each sequence of an endless run belongs to."""

import math
from collections.abc import Sequence
from fractions import Fraction
from heapq import heappop, heappush

import numpy as np

LIMIT = 1 << 20  # the longest period: finer weights are rounded to multiples of 1 / LIMIT


class Turns:
    """Sequence k of an endless run, for each k from 0 on, belongs to one of several corpora by a pure function of k and
    their weights: of the first n sequences a corpus of weight w (of all weights' sum) has n w, to less than one, for
    every n. This is the chairman assignment problem, solved by letting the earliest deadline go first among those whose
    turn may have come already (Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980).

    `shares` are each corpus's sequences in a `period`, after which the turns repeat.
    """

    def __init__(self, weights: Sequence[float]):
        """Raises ValueError where a weight is less than 1 / LIMIT of all."""
        self.shares = whole_shares(weights)
        self.period = sum(self.shares)
        self._corpus = _assign(self.shares)
        self._rank = np.empty(self.period, np.int64)  # which of its corpus's sequences of the period each is
        for corpus, share in enumerate(self.shares):
            self._rank[self._corpus == corpus] = np.arange(share)

    def of(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(corpus, which of that corpus's own sequences it is), each int64 [n], of those sequences of the run."""
        period, place = np.divmod(numbers, self.period)
        corpus = self._corpus[place]
        return corpus, period * np.asarray(self.shares)[corpus] + self._rank[place]


def whole_shares(weights: Sequence[float]) -> list[int]:
    """The smallest whole numbers in the proportion of `weights`, as their decimal notation says it; where their sum
    would exceed LIMIT, the nearest that sum to it (largest remainder).

    Raises:
        ValueError: a weight that rounds to nothing, which `args[1]` is the number of.
    """
    exact = [Fraction(str(w)) for w in weights]
    parts = [w / sum(exact) for w in exact]
    period = min(math.lcm(*(p.denominator for p in parts)), LIMIT)
    shares = [math.floor(p * period) for p in parts]
    by_remainder = sorted(range(len(parts)), key=lambda c: shares[c] - parts[c] * period)
    for corpus in by_remainder[: period - sum(shares)]:
        shares[corpus] += 1
    if 0 in shares:
        raise ValueError("a weight is less than a millionth of all", shares.index(0))
    divisor = math.gcd(*shares)
    return [share // divisor for share in shares]


def _assign(shares: Sequence[int]) -> np.ndarray:
    """int64 [period]: the corpus of each sequence of a period."""
    period = sum(shares)
    out = np.empty(period, np.int64)
    given = [0] * len(shares)
    later = [(0, corpus) for corpus in range(len(shares))]  # (when its next sequence may come, corpus)
    ready: list[tuple[int, int]] = []  # (when it must have come, corpus)
    for place in range(period):
        while later and later[0][0] <= place:
            corpus = heappop(later)[1]
            heappush(ready, (-(-(given[corpus] + 1) * period // shares[corpus]), corpus))
        corpus = heappop(ready)[1]
        out[place] = corpus
        given[corpus] += 1
        if given[corpus] < shares[corpus]:
            heappush(later, (given[corpus] * period // shares[corpus], corpus))
    return out
