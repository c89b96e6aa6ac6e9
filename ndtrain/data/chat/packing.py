"""Whole conversations packed into sequences of one length, for training and validation.

A conversation is never split between two sequences, and attends only to itself. The rest of a sequence is padding that
is not learned.

Shapes: T tokens of a sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from ndtrain.config.batch_sizes import BatchSizes
from ndtrain.data.batches import Batch
from ndtrain.data.cache import atomic_write, digest, load_or_build
from ndtrain.data.chat.conversations import Conversations
from ndtrain.data.order import EndlessRun, epoch_indices
from ndtrain.data.token_array import Packing
from ndtrain.model.vocabulary import WEIGHTS

_PADDING = 0  # the id of padding: no conversation attends to it, and it is not learned


@dataclass(frozen=True)
class Plan:
    """The assignment of conversations to sequences.

    Attributes:
        order: int64 [packed]: the conversations of the first sequence, then the conversations of the second, and so on.
        ends: int64 [sequences]: the index in `order` after the last conversation of each sequence.
    """

    order: np.ndarray
    ends: np.ndarray


def pack(lengths: np.ndarray, capacity: int) -> Plan:
    """Pack items into bins by best fit decreasing: the longest first, each into the fullest bin that has room.

    Bins are ordered by their first items, and the items of each bin are sorted.

    Args:
        lengths: int [n], each in 1..capacity.
    """
    bins: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # bins by their free room
    rooms = 0  # bit r: there is a bin with room r
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        fitting = rooms >> length << length
        room = (fitting & -fitting).bit_length() - 1 if fitting else capacity
        if fitting:
            number = by_room[room].pop()
            rooms &= ~(0 if by_room[room] else 1 << room)
            bins[number].append(item)
        else:
            number = len(bins)
            bins.append([item])
        if left := room - length:
            by_room[left].append(number)
            rooms |= 1 << left
    ordered = sorted(sorted(held) for held in bins)
    order = np.array([item for held in ordered for item in held], np.int64)
    return Plan(order, np.cumsum(np.array([len(held) for held in ordered], np.int64)))


class PackedConversations:
    """The sequences of one split.

    A conversation of more than T tokens is truncated to T tokens. If it then has no token to learn, it is left out.

    Attributes:
        count: the number of sequences.
        cut, left_out: the numbers of conversations that are truncated and that are left out.
    """

    def __init__(self, conversations: Conversations, seq_len: int, cache: Path, fingerprint: str):
        """Pack the conversations of a split, or load their plan from the folder `cache`. `fingerprint` identifies the
        split.
        """
        self._conversations, self._seq_len = conversations, seq_len
        lengths, kept = conversations.lengths, np.flatnonzero(conversations.firsts < seq_len)
        self.cut = int((lengths[kept] > seq_len).sum())
        self.left_out = len(lengths) - len(kept)
        self._starts, self._lengths = conversations.starts, np.minimum(lengths, seq_len)
        entry = cache / f"packed-{digest(fingerprint, seq_len)}.npz"
        build = lambda: _save(entry, pack(self._lengths[kept], seq_len))
        plan = load_or_build(entry, partial(_load, entry), build)
        self._order, self._ends = kept[plan.order], plan.ends
        self.count = len(plan.ends)

    def __len__(self) -> int:
        return self.count

    def tokens(self, index: int) -> np.ndarray:
        """Return the tokens of a sequence and its padding, int64 [T + 1]."""
        out = np.full(self._seq_len + 1, _PADDING, np.int64)
        for at, piece in self._pieces(index):
            out[at : at + piece.stop - piece.start] = self._conversations.ids[piece]
        return out

    def weights(self, index: int) -> np.ndarray:
        """Return the weights of a sequence's tokens, float32 [T + 1].

        The first token of a conversation has weight 0, because it is not learned.
        """
        out, held = np.zeros(self._seq_len + 1, np.float32), self._conversations
        for at, piece in self._pieces(index):
            out[at + 1 : at + piece.stop - piece.start] = held.weights[held.learned[piece][1:]]
        return out

    def starts(self, index: int) -> np.ndarray:
        """Return where conversations and the padding start in a sequence, int64 [n], without the first conversation."""
        return np.array([at + piece.stop - piece.start for at, piece in self._pieces(index)], np.int64)

    def _pieces(self, index: int) -> list[tuple[int, slice]]:
        """Return for each conversation of a sequence its position there and its slice of the split's tokens."""
        first = int(self._ends[index - 1]) if index else 0
        held = self._order[first : int(self._ends[index])]
        lengths = self._lengths[held]
        places = (np.cumsum(lengths) - lengths).tolist()
        starts = self._starts[held].tolist()
        return [(at, slice(s, s + n)) for at, s, n in zip(places, starts, lengths.tolist(), strict=True)]


def _save(entry: Path, plan: Plan) -> None:
    with atomic_write(entry) as file:
        np.savez(file, order=plan.order, ends=plan.ends)


def _load(entry: Path) -> Plan | None:
    """Return the plan in the cache; None if it is absent or damaged."""
    try:
        with np.load(entry) as arrays:
            return Plan(arrays["order"], arrays["ends"])
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None


class PackedSequences(EndlessRun):
    """The sequences of a run: one split, epoch after epoch. With `shuffle`, each epoch has its own order."""

    def __init__(self, packed: PackedConversations, batch_sizes: BatchSizes, seed: int, shuffle: bool, name: str):
        super().__init__(batch_sizes)
        self._packed, self._name = packed, name
        self._indices = partial(epoch_indices, count=packed.count, seed=seed, shuffle=shuffle)

    def read(self, numbers: np.ndarray) -> np.ndarray:
        return np.stack([self._packed.tokens(int(index)) for index in self._indices(numbers)])

    def columns_of(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        return {WEIGHTS: np.stack([self._packed.weights(int(index)) for index in self._indices(numbers)])}

    def starts(self, numbers: np.ndarray, tokens: np.ndarray, packing: Packing) -> list[np.ndarray]:
        return [self._packed.starts(int(index)) for index in self._indices(numbers)]

    def name(self, number: int) -> str:
        return f"sequence {int(self._indices(np.array([number]))[0])} of {self._name}"


class PackedValidation:
    """The sequences of packed splits in order, with the interface of `ValidationSet`.

    Attributes:
        passes: the number of passes of `global_batch` sequences. The last pass is filled up with empty sequences.
    """

    def __init__(self, splits: Sequence[PackedConversations], seq_len: int, global_batch: int):
        self._seq_len, self._global_batch = seq_len, global_batch
        self._sequences = [(split, index) for split in splits for index in range(split.count)]
        self.passes = -(-len(self._sequences) // global_batch)

    def tokens(self, step: int, rows: Sequence[int]) -> np.ndarray:
        return np.stack([split.tokens(i) if split else self._nothing() for split, i in self._held(step, rows)])

    def columns(self, step: int, rows: Sequence[int]) -> dict[str, np.ndarray]:
        blank = self._nothing().astype(np.float32)
        return {WEIGHTS: np.stack([split.weights(i) if split else blank for split, i in self._held(step, rows)])}

    def document_starts(self, step: int, rows: Sequence[int], tokens: np.ndarray, packing: Packing) -> list[np.ndarray]:
        return [split.starts(i) if split else np.empty(0, np.int64) for split, i in self._held(step, rows)]

    def _held(self, step: int, rows: Sequence[int]) -> list[tuple[PackedConversations | None, int]]:
        numbers = [step * self._global_batch + row for row in rows]
        return [self._sequences[n] if n < len(self._sequences) else (None, 0) for n in numbers]

    def _nothing(self) -> np.ndarray:
        return np.full(self._seq_len + 1, _PADDING, np.int64)

    @staticmethod
    def readable(batch: Batch) -> Batch:
        """Return the batch unchanged: the id of its padding is valid for an embedding."""
        return batch
