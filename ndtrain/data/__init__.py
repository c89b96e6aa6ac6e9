"""Text to tokens to batches: corpora, tokenizers, and the batch as a pure function of (seed, step)."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ndtrain.config import Config, ConfigError
from ndtrain.data.batches import Batch, Prefetcher, Sequences, microbatches, rows_of
from ndtrain.data.cache import digest
from ndtrain.data.corpora import Corpus, open_corpus
from ndtrain.data.store import holds, open_bin, tokenise
from ndtrain.data.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "Batch",
    "Data",
    "Prefetcher",
    "Sequences",
    "Tokenizer",
    "load_tokenizer",
    "microbatches",
    "open_data",
    "rows_of",
]

_SAMPLE = 32 << 20  # bytes of text that a bpe is trained on


@dataclass(frozen=True)
class Data:
    """An opened corpus: flat arrays of token ids (uint16 or uint32, memory-mapped, read-only).

    `validation` may be empty. `tokenizer` is None for token files. Every id lies below `vocab_size`. `fingerprint`
    is a digest of all ids: it changes when the corpus does, and is the same on every machine that has the same one.
    `eos_id` is the token that ends a document, which a packed run splits at; None where a token file's is not given.
    """

    train: np.ndarray
    validation: np.ndarray
    tokenizer: Tokenizer | None
    vocab_size: int
    fingerprint: str
    eos_id: int | None = None


def open_data(cfg: Config) -> Data:
    """Opens `cfg.data`, tokenising it into the data cache if it is not there yet. Needs no process group.

    Processes that open the same corpus on one host at once share the work: one tokenises, the others wait.

    Raises:
        ConfigError: a missing or empty corpus, one shorter than a sequence, a document that cannot be read, an unusable
            tokenizer or cache, ids beyond `model.vocab_size`, or a `data.eos_id` that is missing, unusable or not read.
    """
    cache = Path(cfg.data.cache).expanduser()
    data = _open_bin(cfg, cache) if cfg.data.name == "bin" else _open_text(cfg, cache)
    least = cfg.train.seq_len + 1
    if len(data.train) < least:
        raise ConfigError(
            f"data={cfg.data.name}: the training split holds {len(data.train)} tokens, fewer than one sequence of "
            f"train.seq_len + 1 = {least}: lower train.seq_len or give more data"
        )
    return data


def _open_bin(cfg: Config, cache: Path) -> Data:
    tokens, scan = open_bin(cfg.data, cache)
    if scan.largest >= cfg.model.vocab_size:
        raise ConfigError(
            f"data.path={cfg.data.path}: token id {scan.largest} at offset {scan.offset} lies beyond "
            f"model.vocab_size={cfg.model.vocab_size}: set model.vocab_size to at least {scan.largest + 1}"
        )
    _check_eos(cfg, tokens)
    return Data(tokens, tokens[:0], None, scan.largest + 1, scan.fingerprint, cfg.data.eos_id)


def _check_eos(cfg: Config, tokens: np.ndarray) -> None:
    """Of a token file nothing but `data.eos_id` says where its documents end."""
    eos, pack = cfg.data.eos_id, cfg.data.pack
    if eos is None and pack:
        raise ConfigError(
            "data.eos_id is missing: data.pack=true needs it with data=bin, the id of the token that ends a document"
        )
    if eos is not None and not 0 <= eos < cfg.model.vocab_size:
        raise ConfigError(f"data.eos_id={eos}: must lie in [0, model.vocab_size={cfg.model.vocab_size})")
    if pack and not holds(tokens, eos):
        raise ConfigError(
            f"data.eos_id={eos}: no token of data.path={cfg.data.path} is {eos}, so nothing ends a document: give the "
            "file's end-of-text token, or set data.pack=false"
        )


def _open_text(cfg: Config, cache: Path) -> Data:
    if cfg.data.eos_id is not None:
        raise ConfigError(
            f"data.eos_id={cfg.data.eos_id}: data={cfg.data.name} takes it from data.tokenizer, only data=bin reads "
            "the key: set it to null"
        )
    corpus = open_corpus(cfg.data)
    tokenizer = _tokenizer(cfg, corpus, cache)
    tokens = tokenise(corpus, tokenizer, cache)
    if len(tokens.train) == 0:
        cause = "every document is in the validation split" if len(tokens.validation) else "no document has any text"
        raise ConfigError(f"{corpus.setting}: nothing to train on, {cause}: give more data or set data.validation=0")
    return Data(tokens.train, tokens.validation, tokenizer, tokenizer.vocab_size, tokens.fingerprint, tokenizer.eos_id)


def _tokenizer(cfg: Config, corpus: Corpus, cache: Path) -> Tokenizer:
    trained = cache / f"bpe-{digest(corpus.key(), cfg.data.vocab_size, _SAMPLE)}.json"
    tokenizer = load_tokenizer(cfg.data, lambda: corpus.sample(_SAMPLE), trained)
    if tokenizer.vocab_size > cfg.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={cfg.model.vocab_size} is less than the {tokenizer.vocab_size} tokens of "
            f"data.tokenizer={cfg.data.tokenizer}: set model.vocab_size to at least {tokenizer.vocab_size}"
        )
    return tokenizer
