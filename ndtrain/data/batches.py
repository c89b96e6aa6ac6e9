"""Microbatches of the sequences of a step, and a thread that prefetches them.

Shapes: B sequences of a microbatch (or of a rank's step), T tokens of a sequence (or of this rank's part of it).
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from ndtrain.data.token_array import Packing
from ndtrain.device.gpu import use_gpu
from ndtrain.mesh.sequence_sharding import SequenceSharding
from ndtrain.model.vocabulary import IGNORE, WEIGHTS, Targets

Item = TypeVar("Item")


@dataclass(frozen=True)
class Batch:
    """One microbatch of token ids. All tensors but `columns` are int64.

    Attributes:
        tokens: [B, T].
        labels: [B, T], the next token of the same document (`IGNORE`: not counted in the loss).
        positions: [T] or [B, T], the position of each token in its document; None: 0 to T - 1 in every row.
        documents: for each row the positions at which documents start in the whole, unsharded sequence; the first is
            0. None: each row is one document.
        columns: further inputs of the objective: name -> [B, T, ...], aligned with the labels.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor | None = None
    documents: tuple[tuple[int, ...], ...] | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def targets(self) -> Targets:
        """The labels and the columns."""
        return Targets(self.labels, self.columns)

    def pin(self) -> "Batch":
        """Return a copy in page-locked memory, from which copies to a GPU overlap with its work."""
        return self._map(Tensor.pin_memory)

    def to(self, device: torch.device) -> "Batch":
        """Return a copy on `device`, without waiting for it."""
        return self._map(lambda x: x.to(device, non_blocking=True))

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the allocator from reusing the memory before the work that is now queued on `stream` has run."""
        for x in (self.tokens, self.labels, self.positions, *self.columns.values()):
            if x is not None:
                x.record_stream(stream)

    def _map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        positions = None if self.positions is None else change(self.positions)
        return Batch(
            change(self.tokens), change(self.labels), positions, self.documents, self.targets.map(change).columns
        )


class Tokens(Protocol):
    """A source of the tokens of each step's sequences."""

    def tokens(self, step: int, rows: Sequence[int]) -> np.ndarray:
        """Return the tokens of sequences `rows` of the step's global batch, int64 [len(rows), T + 1].

        A streaming dataset needs exactly one call for each step, in order.
        """
        ...

    def document_starts(
        self, step: int, rows: Sequence[int], tokens: np.ndarray, packing: Packing
    ) -> Sequence[np.ndarray]:
        """Return for each row the positions at which documents start, int64 [n], ascending. Position 0 is left out.

        Args:
            tokens: the result of `tokens` for these rows.
        """
        return [packing.starts_in(row) for row in tokens]

    def columns(self, step: int, rows: Sequence[int]) -> Mapping[str, np.ndarray]:
        """Return further data about the tokens of these rows: name -> [len(rows), T + 1, ...].

        A token whose `weights` are 0 is not learned. Without weights all tokens are learned.
        """
        return {}


class Source(Tokens, Protocol):
    """The training data. Every rank has a source, and all ranks see the same sequences."""

    def where(self, step: int, i: int) -> str:
        """Return a text that names sequence `i` of `step` and its corpus, for messages."""
        ...

    def state(self, step: int) -> dict[str, Any] | None:
        """Return the state, as JSON, from which another process resumes at `step`; None if the step's number is enough.

        Only the state of rank 0 is used. It is available for steps near the last ones requested.
        """
        ...

    def close(self) -> None:
        """Release all resources. No other method is called afterwards."""
        ...


def rows_of(replica: int, replicas: int, global_batch: int) -> range:
    """Return the contiguous rows of a global batch that one of `replicas` data replicas processes.

    Raises:
        ValueError: `replicas` does not divide the global batch.
    """
    share, rest = divmod(global_batch, replicas)
    if rest:
        raise ValueError(f"global_batch {global_batch} is not a multiple of {replicas} replicas")
    return range(replica * share, (replica + 1) * share)


def microbatches(
    source: Tokens,
    step: int,
    rows: Sequence[int],
    micro_batch: int,
    sharding: SequenceSharding | None = None,
    part: int = 0,
    packing: Packing | None = None,
    columns: Iterable[str] = (),
) -> list[Batch]:
    """Return the rows of a step as microbatches of `micro_batch` sequences, in order.

    Args:
        sharding, part: the microbatches hold part `part` of each sequence; None: whole sequences.
        packing: finds the documents of a row, which do not attend to each other; None: each row is one document.
        columns: the names of the columns to include.

    Raises:
        ValueError: the rows do not divide into microbatches, or the sharding is for another sequence length.
    """
    if len(rows) % micro_batch:
        raise ValueError(f"{len(rows)} rows do not divide into microbatches of {micro_batch}")
    tokens = source.tokens(step, rows)
    starts = packing and source.document_starts(step, rows, tokens, packing)
    batch = _full_batch(tokens, starts, source.columns(step, rows), columns)
    if sharding is not None and sharding.length != batch.tokens.shape[1]:
        raise ValueError(f"a sharding of {sharding.length} tokens does not fit sequences of {batch.tokens.shape[1]}")
    if sharding is not None and sharding.parts > 1:
        batch = _sequence_shard(batch, torch.from_numpy(sharding.index(part)))
    return [_rows(batch, slice(i, i + micro_batch)) for i in range(0, len(rows), micro_batch)]


def positions_of(documents: Sequence[int], length: int) -> np.ndarray:
    """Return the position of each token of a sequence in its document, int64 [length].

    Args:
        documents: the positions at which documents start.
    """
    starts = np.asarray(documents, np.int64)
    return np.arange(length) - np.repeat(starts, np.diff(starts, append=length))


def _full_batch(
    tokens: np.ndarray, starts: Sequence[np.ndarray] | None, known: Mapping[str, np.ndarray], names: Iterable[str]
) -> Batch:
    """Return sequences [B, T + 1] as one batch.

    Args:
        starts: for each row the positions after 0 at which documents start. The label just before a start belongs to
            the next document, so it is ignored. None: each row is one document.
        known: the result of `Tokens.columns`. The labels of tokens whose weight is 0 are ignored.
        names: the columns to include.
    """
    tokens_BT, labels_BT = torch.from_numpy(tokens[:, :-1]), torch.from_numpy(tokens[:, 1:])
    columns = {name: torch.from_numpy(known[name][:, 1:]) for name in names}
    if WEIGHTS in known:
        labels_BT = labels_BT.masked_fill(torch.from_numpy(known[WEIGHTS][:, 1:] == 0), IGNORE)
    if starts is None:
        return Batch(tokens_BT, labels_BT, columns=columns)
    length = tokens_BT.shape[1]
    documents = tuple((0, *row[row < length].tolist()) for row in starts)
    positions_BT = np.stack([positions_of(row, length) for row in documents])
    labels_BT = labels_BT.clone()
    for labels_T, row in zip(labels_BT, starts, strict=True):
        labels_T[torch.from_numpy(row) - 1] = IGNORE
    return Batch(tokens_BT, labels_BT, torch.from_numpy(positions_BT), documents, columns)


def _sequence_shard(batch: Batch, index_T: Tensor) -> Batch:
    """Return the batch with only the tokens `index_T` of each sequence."""
    select = lambda x: x.index_select(1, index_T)
    positions = index_T if batch.positions is None else select(batch.positions)
    targets = batch.targets.map(select)
    return Batch(select(batch.tokens), targets.labels, positions, batch.documents, targets.columns)


def _rows(batch: Batch, rows: slice) -> Batch:
    positions, documents = batch.positions, batch.documents
    targets = batch.targets.map(lambda x: x[rows].contiguous())
    return Batch(
        batch.tokens[rows].contiguous(),
        targets.labels,
        positions if positions is None or positions.dim() == 1 else positions[rows],
        documents and documents[rows],
        targets.columns,
    )


# ---------------------------------------------------------------------------------------------------------- prefetch


class Prefetcher(Generic[Item]):
    """Calls `make(step)` for start <= step < stop in a background thread, at most `depth` items ahead.

    If `device` is a GPU, items are lists of `Batch` and are moved to it. They are copied from page-locked memory on a
    separate CUDA stream, so the copies overlap with earlier steps. The thread is a daemon: it never keeps the process
    alive.
    """

    def __init__(
        self, make: Callable[[int], Item], start: int, stop: int, depth: int, device: torch.device | None = None
    ):
        self._make = make
        self._next = start
        self._stop = stop
        self._depth = depth
        self._device = device if device is not None and device.type == "cuda" else None
        self._stream = torch.cuda.Stream(device) if self._device else None
        self._ready: deque[tuple[Item, torch.cuda.Event | None]] = deque()
        self._failure: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, args=(start,), name="prefetch", daemon=True)
        self._thread.start()

    def get(self, step: int) -> tuple[Item, float]:
        """Return the item of `step` and the seconds waited for it. Steps have to be requested in order.

        Raises:
            ValueError: `step` is not the next step, or it is `stop` or later.
            RuntimeError: the prefetcher is closed.
            Exception: `make` raised it.
        """
        if step != self._next or step >= self._stop:
            raise ValueError(f"step {step} was requested, but the next step is {self._next} (end: {self._stop})")
        began = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._failure or self._closed)
            if self._closed:
                raise RuntimeError("the prefetcher is closed")
            if not self._ready:
                raise self._failure
            item, copied = self._ready.popleft()
            self._next += 1
            self._changed.notify_all()
        if copied:
            self._wait_for_copies(item, copied)
        return item, time.perf_counter() - began

    def close(self) -> None:
        """Stop the thread. Wait at most one second for an item in progress."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join(timeout=1.0)

    def _run(self, start: int) -> None:
        try:
            use_gpu(self._device)
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
        copied = None
        if self._device is not None:
            with torch.cuda.stream(self._stream):
                item = [batch.pin().to(self._device) for batch in item]
                copied = self._stream.record_event()
        with self._changed:
            self._ready.append((item, copied))
            self._changed.notify_all()

    def _wait_for_copies(self, item: Sequence[Batch], copied: torch.cuda.Event) -> None:
        """Make the caller's CUDA stream wait for the copies, and keep their memory until this stream has read them."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(copied)
        for batch in item:
            batch.record_stream(stream)
