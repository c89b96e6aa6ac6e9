"""The result of `open_data`: a corpus, a mixture or a streaming dataset that a run can train on."""

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

from ndtrain.config import Config, DataConfig
from ndtrain.data.batches import Source
from ndtrain.data.cache import digest
from ndtrain.data.hf import streaming_identity
from ndtrain.data.mixture_order import MixtureOrder
from ndtrain.data.order import Mixture, Sequences, corpus_seed
from ndtrain.data.streaming_source import StreamingSource
from ndtrain.data.token_array import Tokens
from ndtrain.data.token_reader import TokenReader
from ndtrain.data.tokenizer import Tokenizer
from ndtrain.data.validation import ValidationSet
from ndtrain.mesh.gloo import gloo_group_of_all_ranks
from ndtrain.mesh.mesh import Mesh

log = logging.getLogger(__name__)

_HISTORY = 8  # past steps that a streaming source remembers, in addition to the prefetched ones


@dataclass(frozen=True, kw_only=True)
class Data(ABC):
    """The data of a run.

    Attributes:
        tokenizer: None if token files do not name one.
        vocab_size: every id is smaller.
        fingerprint: changes with the training data and is the same on every machine. It is a digest of all ids; for a
            streaming dataset, of its settings and its tokenizer.
        eos_id: the token that ends a document; None: not known. A packed run separates documents at this token if there
            is no index of documents.
        validation: a flat array of ids, or packed conversations, for each corpus that has a validation split.
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    fingerprint: str
    eos_id: int | None
    validation: tuple[Any, ...] = ()

    @abstractmethod
    def describe(self) -> str:
        """Return a short description of the data, for messages."""

    def warnings(self, cfg: Config) -> list[str]:
        """Return warnings about training on this data with `cfg`, one line each."""
        return []

    def validation_set(self, arrays: Any, cfg: Config) -> Any:
        """Return the sequences of `arrays`, an object with the interface of `ValidationSet`. `arrays` have the form of
        `validation`.
        """
        return ValidationSet(arrays, cfg.train.seq_len, cfg.train.global_batch)

    def everything(self) -> tuple[Any, ...] | None:
        """Return all data that can be evaluated, in the form of `validation`; None if the training split has no end."""
        return None

    def epoch_sequences(self, cfg: Config) -> int | None:
        """Return the number of sequences in one pass over the training split; None if there is no such number."""
        return None

    @property
    def columns(self) -> frozenset[str]:
        """The names of the columns that `Tokens.columns` returns."""
        return frozenset()

    @property
    def turn_ends(self) -> frozenset[int] | None:
        """The special tokens that end the assistant's turns; None: the data has no assistant."""
        return None

    @abstractmethod
    def sequences(self, cfg: Config, mesh: Mesh, step: int, saved: dict[str, Any] | None) -> Source:
        """Return the source of the sequences of step `step` and later steps.

        Every rank has to call this after the process group has been created.

        Args:
            saved: `Source.state(step)` of the resumed run; None: there is no state.
        """


@dataclass(frozen=True)
class TokenCorpus:
    """A corpus as flat arrays of token ids.

    Attributes:
        name: for messages.
        train, validation: read-only arrays of unsigned integers, memory-mapped.
        fingerprint: a digest of all ids.
        eos_id: as in `Data`.
    """

    name: str
    train: Tokens
    validation: Tokens
    fingerprint: str
    eos_id: int | None


@dataclass(frozen=True, kw_only=True)
class IndexedData(Data):
    """Data with random access to all tokens: one corpus or, with `mixture_order`, a mixture of several."""

    corpora: tuple[TokenCorpus, ...]
    mixture_order: MixtureOrder | None = None

    @cached_property
    def train(self) -> tuple[Tokens, ...]:
        """The training tokens of each corpus."""
        return tuple(corpus.train for corpus in self.corpora)

    def everything(self) -> tuple[Any, ...]:
        return (*self.train, *self.validation)

    def epoch_sequences(self, cfg: Config) -> int | None:
        return None if self.mixture_order else (len(self.train[0]) - 1) // cfg.train.seq_len

    def describe(self) -> str:
        corpora = f"{len(self.corpora)} corpora, " if self.mixture_order else ""
        return f"{corpora}{sum(map(len, self.train)):,} training tokens"

    def warnings(self, cfg: Config) -> list[str]:
        """Warn about corpora that a single step reads more than once."""
        lines, t = [], cfg.train
        shares = self.mixture_order.shares if self.mixture_order else (1,)
        for corpus, share in zip(self.corpora, shares, strict=True):
            count = (len(corpus.train) - 1) // t.seq_len
            epochs = t.global_batch * share / sum(shares) / count
            if epochs > 1:
                held = f"it has {count:,} sequence{'s' * (count > 1)} of train.seq_len={t.seq_len}"
                reads = f"one step of train.global_batch={t.global_batch} reads it {epochs:.3g} times"
                lines.append(f"{corpus.name}: {reads}: {held}; lower train.global_batch, or give more data")
        return lines

    def sequences(self, cfg: Config, mesh: Mesh, step: int, saved: dict[str, Any] | None) -> Source:
        t, shuffle = cfg.train, cfg.data.shuffle
        sequences = [
            Sequences(c.train, t.seq_len, t.batch_sizes, corpus_seed(cfg.run.seed, number), shuffle, c.name)
            for number, c in enumerate(self.corpora)
        ]
        return Mixture(sequences, self.mixture_order, t.batch_sizes) if self.mixture_order else sequences[0]


@dataclass(frozen=True, kw_only=True)
class StreamingData(Data):
    """A streaming dataset.

    Attributes:
        dataset: a `datasets.IterableDataset` on rank 0, None on other ranks.
    """

    data: DataConfig
    dataset: Any

    def describe(self) -> str:
        return f"the streaming dataset {self.data.path}"

    def sequences(self, cfg: Config, mesh: Mesh, step: int, saved: dict[str, Any] | None) -> Source:
        world = mesh.spec.world_size
        timeout = timedelta(seconds=cfg.hardware.timeout_s)
        group = gloo_group_of_all_ranks(timeout=timeout) if world > 1 else None
        return StreamingSource(
            self._reader(cfg, saved) if mesh.rank == 0 else None,
            group,
            cfg.train.seq_len,
            cfg.train.batch_sizes,
            step,
            cfg.data.prefetch + _HISTORY,
            self._identity(cfg),
            f"the streaming dataset data.path={self.data.path}",
        )

    def _reader(self, cfg: Config, saved: dict[str, Any] | None) -> TokenReader:
        if saved is not None and saved.get("stream") != self._identity(cfg):
            log.warning(
                "data.path=%s: not the streaming dataset of the checkpoint: it is read from the beginning",
                self.data.path,
            )
            saved = None
        return TokenReader(self.dataset, self.data, self.tokenizer, cfg.run.seed, saved)

    def _identity(self, cfg: Config) -> str:
        """Return a digest of everything that determines the order of the tokens."""
        return digest(streaming_identity(self.data), self.data.shuffle and cfg.run.seed, self.tokenizer.digest())
