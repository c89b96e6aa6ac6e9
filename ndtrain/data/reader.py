"""A stream of documents as one endless run of tokens, with the place to go on from at every token of it.

The stream is read shard by shard, and a shard in blocks of rows. With shuffling, a permutation of the shards in each
epoch and of the rows in each block depends on the seed alone. So a place is the beginning of a block and how much of
the block has been used: nothing that was read has to be kept for another process to go on there.
"""

import io
import itertools
import json
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ndtrain.config import ConfigError, DataConfig
from ndtrain.data.cache import digest
from ndtrain.data.documents import parts_of, pieces
from ndtrain.data.hf import text_of
from ndtrain.data.order import permutation
from ndtrain.data.store import encoded
from ndtrain.data.tokenizer import Tokenizer

log = logging.getLogger(__name__)

BLOCK_ROWS = 1000
BLOCK_CHARACTERS = 1 << 24  # after which a block ends early
_PLACE = ("epoch", "shard", "row")  # of a block
_BATCH = 1 << 18  # characters tokenised at a time: few, for the first step waits for them


@dataclass(frozen=True)
class Block:
    """Neighbouring rows of a shard. `at` says where they begin: epoch, shard (its position in the epoch's order), row
    (of the shard), place (what `datasets` needs to go there at once, if it can) and a digest of the texts."""

    at: dict[str, Any]
    texts: list[str]


@dataclass(frozen=True)
class Run:
    """Neighbouring tokens of one document, the first of them its token `start`. `document` counts the documents of the
    block in the order they are used in."""

    at: dict[str, Any]
    document: int
    start: int
    ids: np.ndarray
    name: str

    def state(self) -> dict[str, Any]:
        return {**self.at, "document": self.document, "token": self.start}

    def without(self, tokens: int) -> "Run":
        """All but its first tokens."""
        return replace(self, start=self.start + tokens, ids=self.ids[tokens:])


class Reader:
    """The tokens of a stream's documents, each ended by the end-of-text token, one after the other and without end.

    Args:
        dataset: a `datasets.IterableDataset`, or what has its `num_shards`, `shard`, `state_dict`, `load_state_dict`.
        saved: a state from which to go on; None: from the beginning.

    Attributes:
        reading: where in the stream it reads, in words.
    """

    def __init__(
        self, dataset: Any, data: DataConfig, tokenizer: Tokenizer, seed: int, saved: dict[str, Any] | None = None
    ):
        self._dataset, self._data, self._tokenizer, self._seed = dataset, data, tokenizer, seed
        self._saved = saved
        self.reading = "its beginning"
        self._runs: deque[Run] = deque()  # read but not yet taken
        self._held = 0  # tokens in them
        self._source = self._read(saved)

    def state(self) -> dict[str, Any] | None:
        """From where `take` goes on, as JSON; None: from the beginning."""
        return self._runs[0].state() if self._runs else self._saved

    def take(self, count: int) -> tuple[np.ndarray, list[tuple[int, str]]]:
        """The next `count` tokens and the one that follows them, which the next call starts with: int32 [count + 1];
        and for each document among them where it begins (at most 0 for the first) and its name.

        Raises:
            ConfigError: a row without text, or a whole epoch without a document.
            Exception: whatever `datasets` raises.
        """
        while self._held <= count:
            run = next(self._source)
            self._runs.append(run)
            self._held += len(run.ids)
        tokens = np.concatenate([run.ids[: count + 1] for run in self._runs])[: count + 1]
        ends = itertools.accumulate(len(run.ids) for run in self._runs)
        names = [(end - len(run.ids), run.name) for end, run in zip(ends, self._runs, strict=True)]
        self._drop(count)
        return tokens, names

    def _drop(self, count: int) -> None:
        self._held -= count
        while count >= len(self._runs[0].ids):
            count -= len(self._runs.popleft().ids)
        self._runs[0] = self._runs[0].without(count)

    def _read(self, saved: dict[str, Any] | None) -> Iterator[Run]:
        """From the token that `saved` names on."""
        for block, shard in self._blocks(saved):
            place = tuple(block.at[key] for key in _PLACE)
            order = permutation(len(block.texts), self._seed, *place) if self._data.shuffle else range(len(block.texts))
            if saved and place == tuple(saved[key] for key in _PLACE):
                yield from _without(self._encoded(block, shard, order, saved["document"]), saved["token"])
            else:
                yield from self._encoded(block, shard, order, 0)

    def _encoded(self, block: Block, shard: int, order: Sequence[int], first: int) -> Iterator[Run]:
        """The block's texts in `order`, from document `first` on."""
        parts = [
            (document, int(row), part)
            for document, row in enumerate(order)
            if document >= first
            for part in parts_of(pieces(io.StringIO(block.texts[row]).read))
        ]
        last, start = -1, 0
        for (document, row, _), (_, ids) in zip(
            parts, encoded((part for _, _, part in parts), self._tokenizer, _BATCH), strict=True
        ):
            start = start if document == last else 0
            name = f"row {block.at['row'] + row} of shard {shard} in epoch {block.at['epoch']}"
            yield Run(block.at, document, start, np.asarray(ids, np.int32), name)
            last, start = document, start + len(ids)

    def _blocks(self, saved: dict[str, Any] | None) -> Iterator[tuple[Block, int]]:
        """Epoch after epoch, each with the shard that it is of."""
        for epoch in itertools.count(saved["epoch"] if saved else 0):
            count = self._dataset.num_shards
            order = permutation(count, self._seed, epoch) if self._data.shuffle else np.arange(count)
            found = saved is not None  # the epoch had documents before
            for position in range(saved["shard"] if saved else 0, count):
                self.reading = f"shard {order[position]} of {count}, epoch {epoch}"
                for block in self._blocks_of(epoch, position, int(order[position]), saved):
                    found = found or any(block.texts)
                    yield block, int(order[position])
                saved = None
            saved = None
            if not found:
                raise ConfigError(
                    f"data.path={self._data.path}: the stream held no text in a whole epoch: give another"
                )

    def _blocks_of(self, epoch: int, position: int, index: int, saved: dict[str, Any] | None) -> Iterator[Block]:
        if saved:
            shard, block = self._go_on(index, saved)
        else:
            shard = self._open(index)
            block = shard.block(epoch, position)
        while block is not None:
            yield block
            block = shard.block(epoch, position)

    def _open(self, index: int, row: int = 0, place: Any = None) -> "_Shard":
        return _Shard(self._dataset.shard(self._dataset.num_shards, index), self._data, row, place)

    def _go_on(self, index: int, saved: dict[str, Any]) -> tuple["_Shard", Block | None]:
        """The shard behind the block that `saved` names, and that block. `datasets` goes there at once where it can;
        what it finds is checked, for not every version of it goes where it should, and else the rows are counted."""
        if saved["place"] is not None:
            try:
                shard, block = self._first(index, saved, saved["place"])
                if block and block.at["digest"] == saved["digest"]:
                    return shard, block
            except ConfigError:
                raise
            except Exception as error:  # another version's state
                log.info("data.path=%s: counts rows, for its state cannot be loaded: %r", self._data.path, error)
        shard, block = self._first(index, saved, None)
        if block is None or block.at["digest"] != saved["digest"]:
            log.warning(
                "data.path=%s has changed since the checkpoint: the stream goes on at row %d of shard %d, where other "
                "texts were",
                self._data.path,
                saved["row"],
                index,
            )
        return shard, block

    def _first(self, index: int, saved: dict[str, Any], place: Any) -> tuple["_Shard", Block | None]:
        shard = self._open(index, saved["row"], place)
        return shard, shard.block(saved["epoch"], saved["shard"])


def _without(runs: Iterable[Run], tokens: int) -> Iterator[Run]:
    """All but the first `tokens` tokens."""
    for run in runs:
        left_out = min(tokens, len(run.ids))
        tokens -= left_out
        if left_out < len(run.ids):
            yield run.without(left_out)


class _Shard:
    """A shard from row `row` on, to which `place` leads; without one the rows before are read and dropped."""

    def __init__(self, dataset: Any, data: DataConfig, row: int = 0, place: Any = None):
        if place is not None:
            dataset.load_state_dict(place)
        self._dataset, self._data, self._row, self._place = dataset, data, row, place
        self._rows = iter(dataset)
        if place is None and row:
            for _ in itertools.islice(self._rows, row):
                pass
            self._place = self._state()

    def block(self, epoch: int, position: int) -> Block | None:
        """The next block; None at the end."""
        at = {"epoch": epoch, "shard": position, "row": self._row, "place": self._place}
        texts: list[str] = []
        characters = 0
        while len(texts) < BLOCK_ROWS and characters < BLOCK_CHARACTERS:
            row = next(self._rows, None)
            if row is None:
                break
            texts.append(text_of(row, self._data, self._row + len(texts)))
            characters += len(texts[-1])
        if not texts:
            return None
        self._row += len(texts)
        self._place = self._state()
        return Block(at | {"digest": digest(*texts)}, texts)

    def _state(self) -> Any:
        """The place behind the row read last, as `datasets` describes it; None if it does not, or not as JSON."""
        state = getattr(self._dataset, "state_dict", lambda: None)()
        try:
            return state if json.loads(json.dumps(state)) == state else None
        except (TypeError, ValueError):
            return None
