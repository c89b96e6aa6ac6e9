"""What `open_data` returns: a corpus, a mixture or a streaming dataset that a run can train on."""

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch.distributed as dist

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
from ndtrain.distributed.mesh import Mesh

log = logging.getLogger(__name__)

_HISTORY = 8  # steps before those prefetched that a streaming source remembers


@dataclass(frozen=True, kw_only=True)
class Data(ABC):
    """What a run trains on.

    Attributes:
        tokenizer: None for token files that name none.
        vocab_size: every id lies below it.
        fingerprint: changes with what is trained on and is the same on every machine. It is a digest of all ids; for a
            streaming dataset, of the settings that name it.
        eos_id: the token that ends a document, at which a packed run separates documents where no index names them;
            None: not known.
        validation: a flat array of ids, or packed conversations, for each corpus that has a validation split.
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    fingerprint: str
    eos_id: int | None
    validation: tuple[Any, ...] = ()

    @abstractmethod
    def describe(self) -> str:
        """Says in words what is trained on."""

    def warnings(self, cfg: Config) -> list[str]:
        """Says in words what is remarkable about training on it as `cfg` says, a line each."""
        return []

    def validation_set(self, arrays: Any, cfg: Config) -> Any:
        """Returns the sequences of `arrays`, which are like `validation`, with the interface of `ValidationSet`."""
        return ValidationSet(arrays, cfg.train.seq_len, cfg.train.global_batch)

    def everything(self) -> tuple[Any, ...] | None:
        """Returns all that can be evaluated, as `validation`; None: the training split has no end."""
        return None

    def epoch_sequences(self, cfg: Config) -> int | None:
        """Returns how many sequences one pass over the training split has; None: there is no such number."""
        return None

    @property
    def columns(self) -> frozenset[str]:
        """The names of what `Tokens.columns` gives."""
        return frozenset()

    @property
    def turn_ends(self) -> frozenset[int] | None:
        """The special tokens with which the turns of an assistant end; None: there is no assistant."""
        return None

    @abstractmethod
    def sequences(self, cfg: Config, mesh: Mesh, step: int, saved: dict[str, Any] | None) -> Source:
        """Returns the source of the sequences of each step, from `step` on.

        Every rank calls this, once the process group exists.

        Args:
            saved: `Source.state(step)` of the run that is resumed; None: there is none.
        """


@dataclass(frozen=True)
class TokenCorpus:
    """A corpus as flat arrays of token ids.

    Attributes:
        name: for messages.
        train, validation: read-only and memory-mapped, unsigned integers.
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
    """Corpora all of whose tokens are at hand: one corpus or, with `mixture_order`, a mixture of several."""

    corpora: tuple[TokenCorpus, ...]
    mixture_order: MixtureOrder | None = None

    @cached_property
    def train(self) -> tuple[Tokens, ...]:
        """The ids to train on, of each corpus."""
        return tuple(corpus.train for corpus in self.corpora)

    def everything(self) -> tuple[Any, ...]:
        return (*self.train, *self.validation)

    def epoch_sequences(self, cfg: Config) -> int | None:
        return None if self.mixture_order else (len(self.train[0]) - 1) // cfg.train.seq_len

    def describe(self) -> str:
        corpora = f"{len(self.corpora)} corpora, " if self.mixture_order else ""
        return f"{corpora}{sum(map(len, self.train)):,} training tokens"

    def warnings(self, cfg: Config) -> list[str]:
        """Names the corpora that a single step reads more than once."""
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
            Sequences(c.train, t.seq_len, t.global_batch, corpus_seed(cfg.run.seed, number), shuffle, c.name)
            for number, c in enumerate(self.corpora)
        ]
        return Mixture(sequences, self.mixture_order, t.global_batch) if self.mixture_order else sequences[0]


@dataclass(frozen=True, kw_only=True)
class StreamingData(Data):
    """A streaming dataset.

    Attributes:
        dataset: a `datasets.IterableDataset` on rank 0, None on the others.
    """

    data: DataConfig
    dataset: Any

    def describe(self) -> str:
        return f"the streaming dataset {self.data.path}"

    def sequences(self, cfg: Config, mesh: Mesh, step: int, saved: dict[str, Any] | None) -> Source:
        world = mesh.spec.world_size
        timeout = timedelta(seconds=cfg.hardware.timeout_s)
        group = dist.new_group(backend="gloo", timeout=timeout) if world > 1 else None
        return StreamingSource(
            self._reader(cfg, saved) if mesh.rank == 0 else None,
            group,
            cfg.train.seq_len,
            cfg.train.global_batch,
            step,
            cfg.data.prefetch + _HISTORY,
            self._identity(cfg),
            f"the streaming dataset data.path={self.data.path}",
        )

    def _reader(self, cfg: Config, saved: dict[str, Any] | None) -> TokenReader:
        if saved is not None and saved.get("stream") != self._identity(cfg):
            log.warning(
                "data.path=%s: not the streaming dataset of the checkpoint: begins at its beginning", self.data.path
            )
            saved = None
        return TokenReader(self.dataset, self.data, self.tokenizer, cfg.run.seed, saved)

    def _identity(self, cfg: Config) -> str:
        """Returns a digest of all that the order of the tokens depends on."""
        return digest(streaming_identity(self.data), self.data.shuffle and cfg.run.seed, self.tokenizer.digest())
