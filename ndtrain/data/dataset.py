"""What `open_data` gives: a corpus, a blend or a stream that is ready to be trained on."""

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import numpy as np
import torch.distributed as dist

from ndtrain.config import Config, DataConfig
from ndtrain.data.batches import Source
from ndtrain.data.cache import digest
from ndtrain.data.hf import stream_key
from ndtrain.data.mixture_order import Turns
from ndtrain.data.order import Blend, Sequences, seed_of
from ndtrain.data.reader import Reader
from ndtrain.data.stream import Stream
from ndtrain.data.tokenizer import Tokenizer
from ndtrain.distributed.mesh import Mesh

log = logging.getLogger(__name__)

_KEEP = 8  # steps behind those prefetched for which a stream can tell what they were


@dataclass(frozen=True, kw_only=True)
class Data(ABC):
    """What a run trains on.

    Every id lies below `vocab_size`. `tokenizer` is None for token files that say nothing of theirs. `fingerprint`
    changes with what is trained on: it is a digest of all ids (of a stream, of what names it), the same on every
    machine. `eos_id` is the token that ends a document, which a packed run splits at; None where it is not known.
    `validation` holds a flat array of ids for each corpus that has any held out.
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    fingerprint: str
    eos_id: int | None
    validation: tuple[np.ndarray, ...] = ()

    @abstractmethod
    def describe(self) -> str:
        """In words."""

    @abstractmethod
    def sequences(self, cfg: Config, mesh: Mesh, step: int, saved: dict[str, Any] | None) -> Source:
        """Where the sequences of each step come from, from `step` on. Every rank asks, once the process group exists.

        Args:
            saved: `Source.state(step)` of the run that is resumed.
        """


@dataclass(frozen=True)
class TokenCorpus:
    """A corpus as flat arrays of token ids (uint16 or uint32, memory-mapped, read-only). `name` is for messages."""

    name: str
    train: np.ndarray
    validation: np.ndarray
    fingerprint: str
    eos_id: int | None


@dataclass(frozen=True, kw_only=True)
class IndexedData(Data):
    """Corpora whose tokens are all there. With `turns` they are a blend, else there is one."""

    corpora: tuple[TokenCorpus, ...]
    turns: Turns | None = None

    @cached_property
    def train(self) -> tuple[np.ndarray, ...]:
        """The ids to train on, of each corpus."""
        return tuple(corpus.train for corpus in self.corpora)

    def describe(self) -> str:
        many = f"{len(self.corpora)} corpora, " if self.turns else ""
        return f"{many}{sum(map(len, self.train)):,} training tokens"

    def sequences(self, cfg: Config, mesh: Mesh, step: int, saved: dict[str, Any] | None) -> Source:
        t, shuffle = cfg.train, cfg.data.shuffle
        parts = [
            Sequences(c.train, t.seq_len, t.global_batch, seed_of(cfg.run.seed, number), shuffle, c.name)
            for number, c in enumerate(self.corpora)
        ]
        return Blend(parts, self.turns, t.global_batch) if self.turns else parts[0]


@dataclass(frozen=True, kw_only=True)
class StreamedData(Data):
    """A stream. `dataset` is a `datasets.IterableDataset` on rank 0, None elsewhere."""

    data: DataConfig
    dataset: Any

    def describe(self) -> str:
        return f"a stream of {self.data.path}"

    def sequences(self, cfg: Config, mesh: Mesh, step: int, saved: dict[str, Any] | None) -> Source:
        world = mesh.spec.world_size
        timeout = timedelta(seconds=cfg.hardware.timeout_s)
        group = dist.new_group(backend="gloo", timeout=timeout) if world > 1 else None
        return Stream(
            self._reader(cfg, saved) if mesh.rank == 0 else None,
            group,
            cfg.train.seq_len,
            cfg.train.global_batch,
            step,
            cfg.data.prefetch + _KEEP,
            self._key(cfg),
            f"the stream data.path={self.data.path}",
        )

    def _reader(self, cfg: Config, saved: dict[str, Any] | None) -> Reader:
        if saved is not None and saved.get("stream") != self._key(cfg):
            log.warning("data.path=%s: not the stream of the checkpoint: begins at its beginning", self.data.path)
            saved = None
        return Reader(self.dataset, self.data, self.tokenizer, cfg.run.seed, saved)

    def _key(self, cfg: Config) -> str:
        """Of all that a place in the stream depends on."""
        return digest(stream_key(self.data), self.data.shuffle and cfg.run.seed, self.tokenizer.digest())
