"""Reads the documents of a streaming dataset as one endless run of tokens, and can resume at every token of it.

The reader goes through the dataset shard by shard, and through a shard in blocks of rows. With shuffling, it permutes
the shards of each epoch and the rows of each block, as the seed determines. A state therefore records only where a
block begins and how much of it has been used. Another process can resume there without any stored text.
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
from ndtrain.data.documents import document_chunks, text_chunks
from ndtrain.data.hf import row_text
from ndtrain.data.order import permutation
from ndtrain.data.store import encode_chunks
from ndtrain.data.tokenizer import Tokenizer

log = logging.getLogger(__name__)

BLOCK_ROWS = 1000
BLOCK_CHARACTERS = 1 << 24  # after which a block ends early
_BLOCK_KEYS = ("epoch", "shard", "row")  # of a state: the position at which its block begins
_BATCH_CHARACTERS = 1 << 18  # tokenised at a time: few, because the first step waits for them


@dataclass(frozen=True)
class RowBlock:
    """Consecutive rows of a shard.

    Attributes:
        start: the position of the first row, with the keys of a state: epoch, shard (its position in the epoch's
            order), row (in the shard), place (the state with which `datasets` jumps there; None: it cannot) and a
            digest of the texts.
        texts: one for each row.
    """

    start: dict[str, Any]
    texts: list[str]


@dataclass(frozen=True)
class TokenSpan:
    """Consecutive tokens of one document.

    Attributes:
        block: `RowBlock.start` of the document's block.
        document: the number of the document in the block, in reading order.
        start: the index in the document of the first of these tokens.
        ids: int32 [n].
        name: of the document, for messages.
    """

    block: dict[str, Any]
    document: int
    start: int
    ids: np.ndarray
    name: str

    def state(self) -> dict[str, Any]:
        """Return the state from which a reader resumes at the first of these tokens."""
        return {**self.block, "document": self.document, "token": self.start}

    def without(self, tokens: int) -> "TokenSpan":
        """Return the span without its first `tokens` tokens."""
        return replace(self, start=self.start + tokens, ids=self.ids[tokens:])


class TokenReader:
    """The endless run of tokens of a streaming dataset's documents. The end-of-text token ends each document.

    Args:
        dataset: a `datasets.IterableDataset`, or an object that has its `num_shards`, `shard`, `state_dict` and
            `load_state_dict`.
        saved: the state from which to resume; None: from the beginning.

    Attributes:
        location: names the shard that is being read, for messages.
    """

    def __init__(
        self, dataset: Any, data: DataConfig, tokenizer: Tokenizer, seed: int, saved: dict[str, Any] | None = None
    ):
        self._dataset, self._data, self._tokenizer, self._seed = dataset, data, tokenizer, seed
        self._saved = saved
        self.location = "its beginning"
        self._spans: deque[TokenSpan] = deque()  # tokenised but not yet returned
        self._buffered = 0  # number of tokens in `_spans`
        self._source = self._tokenise(saved)

    def state(self) -> dict[str, Any] | None:
        """Return the state at which `read` continues, as JSON; None: from the beginning."""
        return self._spans[0].state() if self._spans else self._saved

    def read(self, count: int) -> tuple[np.ndarray, list[tuple[int, str]]]:
        """Read the next `count` tokens and the token after them, with which the next call starts.

        Returns:
            The tokens, int32 [count + 1]. For each document among them, (index of its first token, name); the index of
            the first document is at most 0.

        Raises:
            ConfigError: a row has no text column, or a whole epoch has no text.
            Exception: `datasets` raised it.
        """
        while self._buffered <= count:
            span = next(self._source)
            self._spans.append(span)
            self._buffered += len(span.ids)
        tokens = np.concatenate([span.ids[: count + 1] for span in self._spans])[: count + 1]
        ends = itertools.accumulate(len(span.ids) for span in self._spans)
        names = [(end - len(span.ids), span.name) for end, span in zip(ends, self._spans, strict=True)]
        self._drop(count)
        return tokens, names

    def _drop(self, count: int) -> None:
        self._buffered -= count
        while count >= len(self._spans[0].ids):
            count -= len(self._spans.popleft().ids)
        self._spans[0] = self._spans[0].without(count)

    def _tokenise(self, saved: dict[str, Any] | None) -> Iterator[TokenSpan]:
        """Yield all tokens, beginning at the position `saved`."""
        for block, shard in self._blocks(saved):
            start = tuple(block.start[key] for key in _BLOCK_KEYS)
            order = permutation(len(block.texts), self._seed, *start) if self._data.shuffle else range(len(block.texts))
            if saved and start == tuple(saved[key] for key in _BLOCK_KEYS):
                yield from _skip_tokens(self._tokenise_block(block, shard, order, saved["document"]), saved["token"])
            else:
                yield from self._tokenise_block(block, shard, order, 0)

    def _tokenise_block(self, block: RowBlock, shard: int, order: Sequence[int], first: int) -> Iterator[TokenSpan]:
        """Yield the tokens of the block's texts in `order`, beginning with document `first`."""
        chunks = [
            (document, int(row), chunk)
            for document, row in enumerate(order)
            if document >= first
            for chunk in document_chunks(text_chunks(io.StringIO(block.texts[row]).read))
        ]
        encoded = encode_chunks((chunk for _, _, chunk in chunks), self._tokenizer, _BATCH_CHARACTERS)
        previous, start = -1, 0
        for (document, row, _), (_, ids) in zip(chunks, encoded, strict=True):
            start = start if document == previous else 0
            name = f"row {block.start['row'] + row} of shard {shard} in epoch {block.start['epoch']}"
            yield TokenSpan(block.start, document, start, np.asarray(ids, np.int32), name)
            previous, start = document, start + len(ids)

    def _blocks(self, saved: dict[str, Any] | None) -> Iterator[tuple[RowBlock, int]]:
        """Yield (block, index of its shard) for epoch after epoch, beginning with the block of `saved`."""
        for epoch in itertools.count(saved["epoch"] if saved else 0):
            count = self._dataset.num_shards
            order = permutation(count, self._seed, epoch) if self._data.shuffle else np.arange(count)
            any_text = saved is not None  # a resumed epoch has already had documents
            for position in range(saved["shard"] if saved else 0, count):
                self.location = f"shard {order[position]} of {count}, epoch {epoch}"
                for block in self._shard_blocks(epoch, position, int(order[position]), saved):
                    any_text = any_text or any(block.texts)
                    yield block, int(order[position])
                saved = None
            saved = None
            if not any_text:
                raise ConfigError(
                    f"data.path={self._data.path}: the streaming dataset had no text in a whole epoch: give another "
                    "dataset"
                )

    def _shard_blocks(self, epoch: int, position: int, index: int, saved: dict[str, Any] | None) -> Iterator[RowBlock]:
        if saved:
            shard, block = self._resume_shard(index, saved)
        else:
            shard = self._open_shard(index)
            block = shard.next_block(epoch, position)
        while block is not None:
            yield block
            block = shard.next_block(epoch, position)

    def _open_shard(self, index: int, row: int = 0, dataset_state: Any = None) -> "_ShardReader":
        return _ShardReader(self._dataset.shard(self._dataset.num_shards, index), self._data, row, dataset_state)

    def _resume_shard(self, index: int, saved: dict[str, Any]) -> tuple["_ShardReader", RowBlock | None]:
        """Return the reader of a shard, positioned after the block of `saved`, and this block.

        `datasets` jumps there if it can. Some of its versions jump elsewhere, so check the digest of the block. If it
        differs, count the rows instead.
        """
        if saved["place"] is not None:
            try:
                shard, block = self._first_block(index, saved, saved["place"])
                if block and block.start["digest"] == saved["digest"]:
                    return shard, block
            except ConfigError:
                raise
            except Exception as error:  # a state of another version of `datasets`
                log.info(
                    "data.path=%s: its saved state cannot be loaded, so rows are counted instead: %r",
                    self._data.path,
                    error,
                )
        shard, block = self._first_block(index, saved, None)
        if block is None or block.start["digest"] != saved["digest"]:
            log.warning(
                "data.path=%s has changed since the checkpoint: the streaming dataset resumes at row %d of shard %d, "
                "which held other texts",
                self._data.path,
                saved["row"],
                index,
            )
        return shard, block

    def _first_block(
        self, index: int, saved: dict[str, Any], dataset_state: Any
    ) -> tuple["_ShardReader", RowBlock | None]:
        shard = self._open_shard(index, saved["row"], dataset_state)
        return shard, shard.next_block(saved["epoch"], saved["shard"])


def _skip_tokens(spans: Iterable[TokenSpan], tokens: int) -> Iterator[TokenSpan]:
    """Yield all tokens except the first `tokens`."""
    for span in spans:
        skipped = min(tokens, len(span.ids))
        tokens -= skipped
        if skipped < len(span.ids):
            yield span.without(skipped)


class _ShardReader:
    """Reads a shard from row `row` on.

    `dataset_state` is the state with which `datasets` jumps there. Without it, the earlier rows are read and dropped.
    """

    def __init__(self, dataset: Any, data: DataConfig, row: int = 0, dataset_state: Any = None):
        if dataset_state is not None:
            dataset.load_state_dict(dataset_state)
        self._dataset, self._data, self._row, self._dataset_state = dataset, data, row, dataset_state
        self._rows = iter(dataset)
        if dataset_state is None and row:
            for _ in itertools.islice(self._rows, row):
                pass
            self._dataset_state = self._current_state()

    def next_block(self, epoch: int, position: int) -> RowBlock | None:
        """Read and return the next block. Return None at the end of the shard."""
        start = {"epoch": epoch, "shard": position, "row": self._row, "place": self._dataset_state}
        texts: list[str] = []
        characters = 0
        while len(texts) < BLOCK_ROWS and characters < BLOCK_CHARACTERS:
            row = next(self._rows, None)
            if row is None:
                break
            texts.append(row_text(row, self._data, self._row + len(texts)))
            characters += len(texts[-1])
        if not texts:
            return None
        self._row += len(texts)
        self._dataset_state = self._current_state()
        return RowBlock(start | {"digest": digest(*texts)}, texts)

    def _current_state(self) -> Any:
        """Return the state of `datasets` after the last row read; None if it has none that JSON can hold."""
        state = getattr(self._dataset, "state_dict", lambda: None)()
        try:
            return state if json.loads(json.dumps(state)) == state else None
        except (TypeError, ValueError):
            return None
