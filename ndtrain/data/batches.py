"""The batch as a pure function of (seed, step), and a thread that makes the next ones ahead of time.

Shapes: B sequences of a microbatch (or of a rank's step), T tokens of a sequence (or of this rank's part of it).
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from ndtrain.model.loss import IGNORE
from ndtrain.sequence import SequenceCut

Item = TypeVar("Item")


@dataclass(frozen=True)
class Batch:
    """One microbatch of token ids. All tensors are int64.

    Attributes:
        tokens: [B, T].
        labels: [B, T], the token that follows each in its document (`IGNORE`: not counted).
        positions: [T] or [B, T], the place of each token in its document; None: 0 to T - 1 in every row.
        documents: for each row the places in the whole sequence, before any cut, where a document starts, the first
            of them 0; None: each row is one document.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor | None = None
    documents: tuple[tuple[int, ...], ...] | None = None

    def pin(self) -> "Batch":
        """A copy in page-locked memory, from which copies to a GPU run beside its work."""
        return self._each(Tensor.pin_memory)

    def to(self, device: torch.device) -> "Batch":
        """On `device`, without waiting for the copy."""
        return self._each(lambda x: x.to(device, non_blocking=True))

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        positions = None if self.positions is None else change(self.positions)
        return Batch(change(self.tokens), change(self.labels), positions, self.documents)


class Sequences:
    """Which tokens each sequence of each step is.

    A corpus holds `count` sequences of `seq_len` + 1 tokens, of which neighbours share one. Sequence `i` of step `s`
    (from 0) is number k = s * global_batch + i of an endless run through them: epoch k // count, position k % count.
    With `shuffle` a permutation that depends on (seed, epoch) alone maps the position to a sequence of the corpus.
    """

    def __init__(self, tokens: np.ndarray, seq_len: int, global_batch: int, seed: int, shuffle: bool):
        """Raises ValueError where `tokens` are fewer than one sequence."""
        self.count = (len(tokens) - 1) // seq_len
        if self.count < 1:
            raise ValueError(f"{len(tokens)} tokens are fewer than one sequence of {seq_len} + 1")
        self._tokens = np.asarray(tokens)  # without memmap's slow indexing
        self._seq_len = seq_len
        self._global_batch = global_batch
        self._seed = seed
        self._shuffle = shuffle

    def index(self, step: int, i: int) -> int:
        """Which sequence of the corpus sequence `i` of `step` is."""
        return int(self._indices(step, [i])[0])

    def tokens(self, step: int, rows: Sequence[int]) -> np.ndarray:
        """int64 [len(rows), T + 1]: the tokens of those sequences of the step's global batch."""
        length = self._seq_len + 1
        out = np.empty((len(rows), length), np.int64)
        for row, index in zip(out, self._indices(step, rows), strict=True):
            start = int(index) * self._seq_len
            row[:] = self._tokens[start : start + length]
        return out

    def _indices(self, step: int, rows: Sequence[int]) -> np.ndarray:
        rows = np.asarray(rows, np.int64)
        if rows.size and not (rows.min() >= 0 and rows.max() < self._global_batch):
            raise IndexError(f"rows {rows.min()} to {rows.max()} of a global batch of {self._global_batch}")
        epoch, position = np.divmod(step * self._global_batch + rows, self.count)
        return _permute(position, epoch, self.count, self._seed) if self._shuffle else position


def rows_of(replica: int, replicas: int, global_batch: int) -> range:
    """The contiguous share of a global batch's rows that one of `replicas` data replicas works on."""
    share, rest = divmod(global_batch, replicas)
    if rest:
        raise ValueError(f"global_batch {global_batch} is not a multiple of {replicas} replicas")
    return range(replica * share, (replica + 1) * share)


def microbatches(
    sequences: Sequences,
    step: int,
    rows: Sequence[int],
    micro_batch: int,
    cut: SequenceCut | None = None,
    part: int = 0,
    eos: int | None = None,
) -> list[Batch]:
    """The rows of a step as microbatches of `micro_batch` sequences, in order.

    Args:
        cut, part: only the tokens of part `part` of `cut`, a cut of whole sequences (None: all of them).
        eos: the token that ends a document, for rows of several documents that are not to see each other; None: each
            row is one document, whatever its tokens.

    Raises:
        ValueError: rows that do not divide into microbatches, or a cut of sequences of another length.
    """
    if len(rows) % micro_batch:
        raise ValueError(f"{len(rows)} rows do not divide into microbatches of {micro_batch}")
    batch = _whole(sequences.tokens(step, rows), eos)
    if cut is not None and cut.length != batch.tokens.shape[1]:
        raise ValueError(f"a cut of {cut.length} tokens does not fit sequences of {batch.tokens.shape[1]}")
    if cut is not None and cut.parts > 1:
        batch = _local(batch, torch.from_numpy(cut.index(part)))
    return [_rows(batch, slice(i, i + micro_batch)) for i in range(0, len(rows), micro_batch)]


def documents_of(tokens_T: np.ndarray, eos: int) -> tuple[int, ...]:
    """Where the documents of a sequence start: at 0, and after each of its tokens `eos` that others follow."""
    return (0, *(np.flatnonzero(tokens_T[:-1] == eos) + 1).tolist())


def positions_of(documents: Sequence[int], length: int) -> np.ndarray:
    """int64 [length]: the place of each token of a sequence in its document, from where `documents` start."""
    starts = np.asarray(documents, np.int64)
    return np.arange(length) - np.repeat(starts, np.diff(starts, append=length))


def _whole(tokens: np.ndarray, eos: int | None) -> Batch:
    """Sequences [B, T + 1] as one batch. The label of `eos` would be the next document's first token: ignored."""
    tokens_BT, labels_BT = torch.from_numpy(tokens[:, :-1]), torch.from_numpy(tokens[:, 1:])
    if eos is None:
        return Batch(tokens_BT, labels_BT)
    documents = tuple(documents_of(row, eos) for row in tokens[:, :-1])
    positions_BT = np.stack([positions_of(starts, tokens_BT.shape[1]) for starts in documents])
    labels_BT = labels_BT.masked_fill(tokens_BT == eos, IGNORE)
    return Batch(tokens_BT, labels_BT, torch.from_numpy(positions_BT), documents)


def _local(batch: Batch, index_T: Tensor) -> Batch:
    """The tokens `index_T` of each whole sequence."""
    take = lambda x: x.index_select(-1, index_T)
    positions = index_T if batch.positions is None else take(batch.positions)
    return Batch(take(batch.tokens), take(batch.labels), positions, batch.documents)


def _rows(batch: Batch, rows: slice) -> Batch:
    positions, documents = batch.positions, batch.documents
    return Batch(
        batch.tokens[rows].contiguous(),
        batch.labels[rows].contiguous(),
        positions if positions is None or positions.dim() == 1 else positions[rows],
        documents and documents[rows],
    )


# ------------------------------------------------------------------------------------------------------- permutation

_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


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


# ---------------------------------------------------------------------------------------------------------- prefetch


class Prefetcher(Generic[Item]):
    """Calls `make(step)` for start <= step < stop in a background thread, at most `depth` items ahead.

    With `pin`, items are lists of `Batch` and arrive in page-locked memory. The thread is a daemon: it never keeps the
    process alive.
    """

    def __init__(self, make: Callable[[int], Item], start: int, stop: int, depth: int, pin: bool = False):
        self._make = make
        self._next = start
        self._stop = stop
        self._depth = depth
        # A thread starts on device 0, where pinning would open a context of its own.
        self._device = torch.cuda.current_device() if pin else None
        self._ready: deque[Item] = deque()
        self._failure: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, args=(start,), name="prefetch", daemon=True)
        self._thread.start()

    def get(self, step: int) -> tuple[Item, float]:
        """The item of `step` and the seconds waited for it. Steps are to be asked for in order.

        Raises:
            ValueError: not the next step, or one from `stop` on.
            RuntimeError: the prefetcher is closed.
            Exception: what `make` raised.
        """
        if step != self._next or step >= self._stop:
            raise ValueError(f"step {step} was asked for, but {self._next} is next (and {self._stop} the end)")
        began = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._failure or self._closed)
            if self._closed:
                raise RuntimeError("the prefetcher is closed")
            if not self._ready:
                raise self._failure
            item = self._ready.popleft()
            self._next += 1
            self._changed.notify_all()
        return item, time.perf_counter() - began

    def close(self) -> None:
        """Ends the thread. An item it is in the middle of making delays this by a second at most."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join(timeout=1.0)

    def _run(self, start: int) -> None:
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            for step in range(start, self._stop):
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or len(self._ready) < self._depth)
                    if self._closed:
                        return
                self._add(self._make(step))
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _add(self, item: Item) -> None:
        if self._device is not None:
            item = [batch.pin() for batch in item]
        with self._changed:
            self._ready.append(item)
            self._changed.notify_all()
