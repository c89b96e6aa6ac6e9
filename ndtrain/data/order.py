"""The tokens of each sequence of each step: a pure function of (seed, step) over one corpus or several.

Shapes: T tokens of a sequence.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np

from ndtrain.config.batch_sizes import BatchSizes
from ndtrain.data.mixture_order import MixtureOrder
from ndtrain.data.token_array import Packing, TokenArray, Tokens


class EndlessRun(ABC):
    """Sequences numbered 0, 1, 2, ... without end. The steps read them in this order."""

    def __init__(self, batch_sizes: BatchSizes):
        self._batch_sizes = batch_sizes

    @abstractmethod
    def read(self, numbers: np.ndarray) -> np.ndarray:
        """Return the tokens of sequences `numbers` of the run, int64 [n, T + 1]."""

    @abstractmethod
    def starts(self, numbers: np.ndarray, tokens: np.ndarray, packing: Packing) -> list[np.ndarray]:
        """Return for each sequence the positions in its `tokens` at which documents start, without position 0."""

    @abstractmethod
    def name(self, number: int) -> str:
        """Return a text that names a sequence of the run and its corpus, for messages."""

    def tokens(self, step: int, rows: Sequence[int]) -> np.ndarray:
        """Return the tokens of sequences `rows` of the step's global batch, int64 [len(rows), T + 1].

        Raises:
            IndexError: a row is outside the global batch.
        """
        return self.read(global_numbers(step, rows, self._batch_sizes))

    def document_starts(self, step: int, rows: Sequence[int], tokens: np.ndarray, packing: Packing) -> list[np.ndarray]:
        """Return for each row the positions in its `tokens` at which documents start, without position 0."""
        return self.starts(global_numbers(step, rows, self._batch_sizes), tokens, packing)

    def columns(self, step: int, rows: Sequence[int]) -> Mapping[str, np.ndarray]:
        """Return further data about the tokens of these rows: name -> [len(rows), T + 1, ...]."""
        return self.columns_of(global_numbers(step, rows, self._batch_sizes))

    def columns_of(self, numbers: np.ndarray) -> Mapping[str, np.ndarray]:
        """Return the columns of sequences `numbers` of the run: name -> [n, T + 1, ...]."""
        return {}

    def where(self, step: int, i: int) -> str:
        """Return a text that names sequence `i` of `step` and its corpus, for messages."""
        return self.name(int(global_numbers(step, [i], self._batch_sizes)[0]))

    def state(self, step: int) -> None:
        """Return None: a resumed run needs only the number of the step."""
        return None

    def close(self) -> None:
        """Do nothing: the run holds no resources."""
        return None


class Sequences(EndlessRun):
    """The sequences of one corpus.

    The corpus holds `count` sequences of `length` = `seq_len` + 1 tokens; neighbours share one token. Number k of the
    endless run has epoch k // count and position k % count. Without `shuffle` it is the sequence of the corpus at this
    position. With `shuffle`, a permutation that depends only on (seed, epoch) maps the position to a sequence.
    """

    def __init__(
        self,
        tokens: Tokens,
        seq_len: int,
        batch_sizes: BatchSizes,
        seed: int,
        shuffle: bool,
        name: str = "the corpus",
    ):
        """Divide `tokens` into sequences. `name` is for messages.

        Raises:
            ValueError: there are fewer tokens than one sequence needs.
        """
        super().__init__(batch_sizes)
        self.count = (len(tokens) - 1) // seq_len
        if self.count < 1:
            raise ValueError(f"{len(tokens)} tokens are fewer than one sequence of {seq_len} + 1")
        self.length = seq_len + 1
        # indexing a memmap is slow
        self._tokens = tokens if isinstance(tokens, TokenArray) else np.asarray(tokens)
        self._seed = seed
        self._shuffle = shuffle
        self._name = name

    def index(self, step: int, i: int) -> int:
        """Return the index in the corpus of sequence `i` of `step`."""
        return int(self._indices(global_numbers(step, [i], self._batch_sizes))[0])

    def read(self, numbers: np.ndarray) -> np.ndarray:
        out = np.empty((len(numbers), self.length), np.int64)
        for row, index in zip(out, self._indices(numbers), strict=True):
            start = int(index) * (self.length - 1)
            row[:] = self._tokens[start : start + self.length]
        return out

    def starts(self, numbers: np.ndarray, tokens: np.ndarray, packing: Packing) -> list[np.ndarray]:
        firsts = self._indices(numbers) * (self.length - 1)
        return [packing.starts(self._tokens, int(first), row) for first, row in zip(firsts, tokens, strict=True)]

    def name(self, number: int) -> str:
        return f"sequence {int(self._indices(np.array([number]))[0])} of {self._name}"

    def _indices(self, numbers: np.ndarray) -> np.ndarray:
        """Return the indices in the corpus of sequences `numbers` of the run, int64 [n]."""
        return epoch_indices(numbers, self.count, self._seed, self._shuffle)


class Mixture(EndlessRun):
    """The sequences of several corpora. `order` assigns each sequence of the run to a corpus."""

    def __init__(self, corpora: Sequence[Sequences], order: MixtureOrder, batch_sizes: BatchSizes):
        super().__init__(batch_sizes)
        self._corpora, self._order = corpora, order

    def read(self, numbers: np.ndarray) -> np.ndarray:
        corpus, own_numbers = self._order.locate(numbers)
        out = np.empty((len(corpus), self._corpora[0].length), np.int64)
        for c in np.unique(corpus):
            out[corpus == c] = self._corpora[c].read(own_numbers[corpus == c])
        return out

    def starts(self, numbers: np.ndarray, tokens: np.ndarray, packing: Packing) -> list[np.ndarray]:
        corpus, own_numbers = self._order.locate(numbers)
        of_row = lambda i: self._corpora[corpus[i]].starts(own_numbers[i : i + 1], tokens[i : i + 1], packing)[0]
        return [of_row(i) for i in range(len(numbers))]

    def name(self, number: int) -> str:
        corpus, own_number = self._order.locate(np.array([number]))
        return self._corpora[corpus[0]].name(int(own_number[0]))


def epoch_indices(numbers: np.ndarray, count: int, seed: int, shuffle: bool) -> np.ndarray:
    """Return the index of each sequence of an endless run in its epoch of `count` sequences, int64 [n].

    With `shuffle`, the order of each epoch depends only on the seed and the epoch.
    """
    epoch, position = np.divmod(numbers, count)
    return _permute(position, epoch, count, seed) if shuffle else position


def global_numbers(step: int, rows: Sequence[int], batch_sizes: BatchSizes) -> np.ndarray:
    """Return the numbers, counted over all steps, of sequences `rows` of a step's global batch, int64 [len(rows)].

    Raises:
        IndexError: a row is outside the global batch.
    """
    return batch_sizes.before(step) + rows_within(rows, batch_sizes.at(step))


def rows_within(rows: Sequence[int], size: int) -> np.ndarray:
    """Return the rows of a global batch of this size, int64 [len(rows)].

    Raises:
        IndexError: a row is outside the global batch.
    """
    rows = np.asarray(rows, np.int64)
    if rows.size and not (rows.min() >= 0 and rows.max() < size):
        raise IndexError(f"rows {rows.min()} to {rows.max()} of a global batch of {size}")
    return rows


# ------------------------------------------------------------------------------------------------------- permutation

_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def corpus_seed(seed: int, corpus: int) -> int:
    """Return the seed of one of several corpora that share `seed`. The first corpus has `seed` itself."""
    return seed + corpus * 0xD1B54A32D192ED03


def permutation(count: int, seed: int, *keys: int) -> np.ndarray:
    """Return a permutation of range(count) that depends only on `seed` and all `keys`, int64 [count]."""
    key = np.zeros(1, np.uint64)
    for part in keys:
        key = _mix(key + _GOLDEN + np.uint64(part))
    return _permute(np.arange(count), np.broadcast_to(key, count), count, seed)


def hash_fractions(key: int, count: int) -> np.ndarray:
    """Return for each number of range(count) a fraction in [0, 1), float64 [count]. It depends only on the number and
    `key`.
    """
    mixed = _mix(_mix(np.arange(count, dtype=np.uint64) + _GOLDEN) ^ np.uint64(key % 2**64))
    return (mixed >> np.uint64(11)).astype(np.float64) / 2**53


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply a bijection of uint64 that scatters neighbours (the finaliser of SplitMix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _permute(position: np.ndarray, epoch: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Return the image of each position in its epoch's permutation of range(count), int64 [n].

    This needs no memory of size `count`. A Feistel network permutes the numbers below the next power of four. A value
    outside range(count) is permuted again until it is inside, which gives a permutation of range(count).
    """
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    seed_key = _mix(np.full(1, seed % 2**64, np.uint64) + _GOLDEN)
    key = _mix(seed_key + epoch.astype(np.uint64))
    out = _feistel(position.astype(np.uint64), key, half)
    while (outside := np.flatnonzero(out >= np.uint64(count))).size:
        out[outside] = _feistel(out[outside], key[outside], half)
    return out.astype(np.int64)


def _feistel(x: np.ndarray, key: np.ndarray, half: np.uint64) -> np.ndarray:
    """Permute numbers of 2 * `half` bits, with one permutation for each key."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = x >> half, x & mask
    for _ in range(_ROUNDS):
        key = _mix(key + _GOLDEN)
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << half) | right
