"""Which tokens each sequence of each step is: a pure function of (seed, step) over one corpus or several.

Shapes: T tokens of a sequence.
"""

from collections.abc import Sequence

import numpy as np

from ndtrain.data.mixture_order import Turns


class Sequences:
    """Which tokens each sequence of each step is.

    A corpus holds `count` sequences of `length` = `seq_len` + 1 tokens, of which neighbours share one. Sequence `i` of
    step `s` (from 0) is number k = s * global_batch + i of an endless run through them: epoch k // count, position
    k % count. With `shuffle` a permutation that depends on (seed, epoch) alone maps the position to a sequence of the
    corpus.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        seq_len: int,
        global_batch: int,
        seed: int,
        shuffle: bool,
        name: str = "the corpus",
    ):
        """`name` is for messages. Raises ValueError where `tokens` are fewer than one sequence."""
        self.count = (len(tokens) - 1) // seq_len
        if self.count < 1:
            raise ValueError(f"{len(tokens)} tokens are fewer than one sequence of {seq_len} + 1")
        self.length = seq_len + 1
        self._tokens = np.asarray(tokens)  # without memmap's slow indexing
        self._global_batch = global_batch
        self._seed = seed
        self._shuffle = shuffle
        self._name = name

    def index(self, step: int, i: int) -> int:
        """Which sequence of the corpus sequence `i` of `step` is."""
        return int(self._indices(_numbers(step, [i], self._global_batch))[0])

    def tokens(self, step: int, rows: Sequence[int]) -> np.ndarray:
        """int64 [len(rows), T + 1]: the tokens of those sequences of the step's global batch."""
        return self.read(_numbers(step, rows, self._global_batch))

    def where(self, step: int, i: int) -> str:
        return self.name(int(_numbers(step, [i], self._global_batch)[0]))

    def state(self, step: int) -> None:
        """Nothing: a step says it all."""

    def close(self) -> None: ...

    def read(self, numbers: np.ndarray) -> np.ndarray:
        """int64 [n, T + 1]: the tokens of those sequences of the endless run."""
        out = np.empty((len(numbers), self.length), np.int64)
        for row, index in zip(out, self._indices(numbers), strict=True):
            start = int(index) * (self.length - 1)
            row[:] = self._tokens[start : start + self.length]
        return out

    def name(self, number: int) -> str:
        """That sequence of the endless run, in words."""
        return f"sequence {int(self._indices(np.array([number]))[0])} of {self._name}"

    def _indices(self, numbers: np.ndarray) -> np.ndarray:
        epoch, position = np.divmod(numbers, self.count)
        return _permute(position, epoch, self.count, self._seed) if self._shuffle else position


class Blend:
    """Sequences of several corpora in turns. Sequence `i` of step `s` is number k = s * global_batch + i of an endless
    run, of which `turns` says which corpus each belongs to and which of that corpus's own endless run it is."""

    def __init__(self, parts: Sequence[Sequences], turns: Turns, global_batch: int):
        self._parts, self._turns, self._global_batch = parts, turns, global_batch

    def tokens(self, step: int, rows: Sequence[int]) -> np.ndarray:
        """int64 [len(rows), T + 1]: the tokens of those sequences of the step's global batch."""
        corpus, number = self._turns.of(_numbers(step, rows, self._global_batch))
        out = np.empty((len(corpus), self._parts[0].length), np.int64)
        for c in np.unique(corpus):
            out[corpus == c] = self._parts[c].read(number[corpus == c])
        return out

    def where(self, step: int, i: int) -> str:
        corpus, number = self._turns.of(_numbers(step, [i], self._global_batch))
        return self._parts[corpus[0]].name(int(number[0]))

    def state(self, step: int) -> None:
        """Nothing: a step says it all."""

    def close(self) -> None: ...


def _numbers(step: int, rows: Sequence[int], global_batch: int) -> np.ndarray:
    """int64 [len(rows)]: which of the endless run those sequences of a step's global batch are."""
    rows = np.asarray(rows, np.int64)
    if rows.size and not (rows.min() >= 0 and rows.max() < global_batch):
        raise IndexError(f"rows {rows.min()} to {rows.max()} of a global batch of {global_batch}")
    return step * global_batch + rows


# ------------------------------------------------------------------------------------------------------- permutation

_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def seed_of(seed: int, corpus: int) -> int:
    """The seed of one of several corpora that share a seed; that of the first is the shared one."""
    return seed + corpus * 0xD1B54A32D192ED03


def permutation(count: int, seed: int, *keys: int) -> np.ndarray:
    """int64 [count]: a permutation of range(count) that depends on `seed` and on all of `keys`."""
    key = np.zeros(1, np.uint64)
    for part in keys:
        key = _mix(key + _GOLDEN + np.uint64(part))
    return _permute(np.arange(count), np.broadcast_to(key, count), count, seed)


def _mix(x: np.ndarray) -> np.ndarray:
    """A bijection of uint64 that scatters neighbours (the finaliser of SplitMix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _permute(position: np.ndarray, epoch: np.ndarray, count: int, seed: int) -> np.ndarray:
    """int64 [n]: where each position goes in its epoch's permutation of range(count). Needs no memory of size count.

    A Feistel network permutes the next power of four; a value outside the range is sent through again until it falls
    inside, which is a permutation of the range.
    """
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    seed_key = _mix(np.full(1, seed % 2**64, np.uint64) + _GOLDEN)
    key = _mix(seed_key + epoch.astype(np.uint64))
    out = _feistel(position.astype(np.uint64), key, half)
    while (outside := np.flatnonzero(out >= np.uint64(count))).size:
        out[outside] = _feistel(out[outside], key[outside], half)
    return out.astype(np.int64)


def _feistel(x: np.ndarray, key: np.ndarray, half: np.uint64) -> np.ndarray:
    """A permutation of the numbers of 2 * `half` bits, one for each key."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = x >> half, x & mask
    for _ in range(_ROUNDS):
        key = _mix(key + _GOLDEN)
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << half) | right
