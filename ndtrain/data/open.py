"""Opens what `cfg.data` names: tokenised into the data cache, memory-mapped or as a stream. Needs no process group."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ndtrain.config import Config, ConfigError, DataConfig, world_from_env
from ndtrain.data.cache import digest
from ndtrain.data.corpora import open_corpus
from ndtrain.data.dataset import Data, IndexedData, StreamedData, TokenCorpus
from ndtrain.data.documents import Corpus
from ndtrain.data.hf import StreamedCorpus, open_stream, read, stream_key, text_of
from ndtrain.data.manifest import Manifest, open_manifest
from ndtrain.data.mixture import Member, blend_tokenizer, members, named, turns_of
from ndtrain.data.store import SAMPLE, Scan, corpus_tokenizer, holds, map_tokens, open_bin, tokenise
from ndtrain.data.tokenizer import Tokenizer, saved_tokenizer

_VALIDATION = 64 << 20  # bytes of a stream's validation split that are read


def open_data(cfg: Config) -> Data:
    """Opens `cfg.data`, tokenising it into the data cache if it is not there yet. Needs no process group.

    Processes that open the same corpus on one host at once share the work: one tokenises, the others wait.

    Raises:
        ConfigError: a missing or empty corpus, one shorter than a sequence, a document that cannot be read, an unusable
            tokenizer or cache, ids beyond `model.vocab_size`, a `data.eos_id` that is missing, unusable or not read, or
            an entry of `data.blend` that is wrong.
    """
    cache = Path(cfg.data.cache).expanduser()
    if cfg.data.name == "blend":
        return _open_blend(cfg, cache)
    if cfg.data.streaming:
        return _open_stream(cfg, cache)
    if cfg.data.name == "bin":
        found = _token_file(cfg, cfg.data, cache)
        tokens, tokenizer, vocab_size = found.tokens, found.tokenizer, found.vocab_size
    else:
        corpus = _texts(cfg.data)
        tokenizer = corpus_tokenizer(cfg.data, corpus, cache)
        _check_vocabulary(cfg, tokenizer)
        tokens, vocab_size = _tokenised(corpus, tokenizer, cache), tokenizer.vocab_size
    _check_length(cfg, cfg.data.name, tokens)
    return IndexedData(
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        fingerprint=tokens.fingerprint,
        eos_id=tokens.eos_id,
        validation=_held_out([tokens]),
        corpora=(tokens,),
    )


def _held_out(corpora: Sequence[TokenCorpus]) -> tuple[np.ndarray, ...]:
    return tuple(corpus.validation for corpus in corpora if len(corpus.validation))


def _check_length(cfg: Config, name: str, tokens: TokenCorpus) -> None:
    least = cfg.train.seq_len + 1
    if len(tokens.train) < least:
        raise ConfigError(
            f"data={name}: the training split holds {len(tokens.train)} tokens, fewer than one sequence of "
            f"train.seq_len + 1 = {least}: lower train.seq_len or give more data"
        )


# -------------------------------------------------------------------------------------------------------------- texts


def _texts(data: DataConfig) -> Corpus:
    if data.eos_id is not None:
        raise ConfigError(
            f"data.eos_id={data.eos_id}: data={data.name} takes it from data.tokenizer, only data=bin reads "
            "the key: set it to null"
        )
    return open_corpus(data)


def _fix(cfg: Config, least: int) -> str:
    """What to do about a model with fewer tokens than `least`."""
    if cfg.init_from:
        return f"the model is that of init_from={cfg.init_from}: use its tokenizer, data.tokenizer={cfg.init_from}"
    return f"set model.vocab_size to at least {least}"


def _check_vocabulary(cfg: Config, tokenizer: Tokenizer) -> None:
    if tokenizer.vocab_size > cfg.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={cfg.model.vocab_size} is less than the {tokenizer.vocab_size} tokens of "
            f"data.tokenizer={cfg.data.tokenizer}: {_fix(cfg, tokenizer.vocab_size)}"
        )


def _tokenised(corpus: Corpus, tokenizer: Tokenizer, cache: Path) -> TokenCorpus:
    found = tokenise(corpus, tokenizer, cache)
    if len(found.train) == 0:
        cause = "every document is in the validation split" if len(found.validation) else "no document has any text"
        raise ConfigError(f"{corpus.setting}: nothing to train on, {cause}: give more data or set data.validation=0")
    return TokenCorpus(corpus.setting, found.train, found.validation, found.fingerprint, tokenizer.eos_id)


# --------------------------------------------------------------------------------------------------------- token files


@dataclass(frozen=True)
class _TokenFile:
    tokens: TokenCorpus
    tokenizer: Tokenizer | None  # where a manifest names it
    vocab_size: int


def _token_file(cfg: Config, data: DataConfig, cache: Path) -> _TokenFile:
    manifest = open_manifest(data)
    if manifest:
        return _prepared(cfg, data, manifest, cache)
    train, scan = _scanned(cfg, data.path, data.dtype, cache, "data.path")
    _check_eos(cfg, data, train)
    validation, vocab_size = train[:0], scan.largest + 1
    if data.validation_path is not None:
        validation, other = _scanned(cfg, data.validation_path, data.dtype, cache, "data.validation_path")
        vocab_size = max(vocab_size, other.largest + 1)
    tokens = TokenCorpus(f"data.path={data.path}", train, validation, scan.fingerprint, data.eos_id)
    return _TokenFile(tokens, None, vocab_size)


def _prepared(cfg: Config, data: DataConfig, manifest: Manifest, cache: Path) -> _TokenFile:
    """What `python -m ndtrain.data prepare` has written: the manifest says it all."""
    if manifest.vocab_size > cfg.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={cfg.model.vocab_size} is less than the {manifest.vocab_size} tokens that "
            f"data.path={data.path} was prepared with: {_fix(cfg, manifest.vocab_size)}"
        )
    dtype = np.dtype(manifest.dtype).newbyteorder("<")
    train, validation = (map_tokens(manifest.path(split), dtype) for split in ("train", "validation"))
    if data.validation_path is not None:
        validation, _ = _scanned(cfg, data.validation_path, manifest.dtype, cache, "data.validation_path")
    tokens = TokenCorpus(f"data.path={data.path}", train, validation, manifest.fingerprint, manifest.eos_id)
    return _TokenFile(tokens, saved_tokenizer(manifest.folder, manifest.eos_id), manifest.vocab_size)


def _scanned(cfg: Config, path: str, dtype: str, cache: Path, key: str) -> tuple[np.ndarray, Scan]:
    tokens, scan = open_bin(path, dtype, cache, key)
    if scan.largest >= cfg.model.vocab_size:
        raise ConfigError(
            f"{key}={path}: token id {scan.largest} at offset {scan.offset} lies beyond "
            f"model.vocab_size={cfg.model.vocab_size}: {_fix(cfg, scan.largest + 1)}"
        )
    return tokens, scan


def _check_eos(cfg: Config, data: DataConfig, tokens: np.ndarray) -> None:
    """Of a token file nothing but `data.eos_id` says where its documents end."""
    eos, pack = data.eos_id, data.pack
    if eos is None and pack:
        raise ConfigError(
            "data.eos_id is missing: data.pack=true needs it with data=bin, the id of the token that ends a document"
        )
    if eos is not None and not 0 <= eos < cfg.model.vocab_size:
        raise ConfigError(f"data.eos_id={eos}: must lie in [0, model.vocab_size={cfg.model.vocab_size})")
    if pack and not holds(tokens, eos):
        raise ConfigError(
            f"data.eos_id={eos}: no token of data.path={data.path} is {eos}, so nothing ends a document: give the "
            "file's end-of-text token, or set data.pack=false"
        )


# -------------------------------------------------------------------------------------------------------------- blends


def _open_blend(cfg: Config, cache: Path) -> IndexedData:
    found = members(cfg.data)
    turns = turns_of(found)
    files: dict[str, _TokenFile] = {}
    texts: dict[str, Corpus] = {}
    for member in found:
        with named(member.label):
            if member.data.name == "bin":
                files[member.label] = _token_file(cfg, member.data, cache)
            else:
                texts[member.label] = _texts(member.data)
    tokenizer = _one_tokenizer(cfg, found, files, texts, cache)
    corpora = []
    for member in found:
        with named(member.label):
            file = files.get(member.label)
            corpora.append(file.tokens if file else _tokenised(texts[member.label], tokenizer, cache))
            _check_length(cfg, member.data.name, corpora[-1])
    return IndexedData(
        tokenizer=tokenizer,
        vocab_size=max([f.vocab_size for f in files.values()] + ([tokenizer.vocab_size] if tokenizer else [])),
        fingerprint=digest([(c.fingerprint, share) for c, share in zip(corpora, turns.shares, strict=True)]),
        eos_id=_one_eos(cfg, found, corpora),
        validation=_held_out(corpora),
        corpora=tuple(corpora),
        turns=turns,
    )


def _one_tokenizer(
    cfg: Config, found: Sequence[Member], files: dict[str, _TokenFile], texts: dict[str, Corpus], cache: Path
) -> Tokenizer | None:
    """The tokenizer of all corpora; None where there are token files alone, and none says which made it.

    Raises:
        ConfigError: token files that were made with another one.
    """
    made = {label: file.tokenizer for label, file in files.items() if file.tokenizer}
    if not texts:
        tokenizer, origin = next(((t, label) for label, t in made.items()), (None, ""))
    else:
        if files and cfg.data.tokenizer == "bpe":
            raise ConfigError(
                f"data.tokenizer=bpe: would be trained anew, but {next(iter(files))} holds tokens already: name the "
                "tokenizer that made them"
            )
        weights = [member.weight for member in found if member.label in texts]
        tokenizer, origin = blend_tokenizer(cfg.data, list(texts.values()), weights, cache), "data.tokenizer"
        _check_vocabulary(cfg, tokenizer)
    for label, other in made.items():
        if other.digest() != tokenizer.digest():
            raise ConfigError(
                f"{label}: was prepared with another tokenizer than {origin}: prepare it again with the same one"
            )
    for label, file in files.items():
        if tokenizer and file.vocab_size > tokenizer.vocab_size:
            raise ConfigError(
                f"{label}: token id {file.vocab_size - 1} lies beyond the {tokenizer.vocab_size} tokens of {origin}: "
                "it was made with another tokenizer"
            )
    return tokenizer


def _one_eos(cfg: Config, found: Sequence[Member], corpora: Sequence[TokenCorpus]) -> int | None:
    """The token that ends a document in all corpora; None where they differ, which a packed run cannot do with."""
    ends = [corpus.eos_id for corpus in corpora]
    other = next((n for n, eos in enumerate(ends) if eos != ends[0]), None)
    if other is None:
        return ends[0]
    if cfg.data.pack:
        raise ConfigError(
            f"data.pack=true: documents end with token {ends[0]} in {found[0].label}, but with {ends[other]} in "
            f"{found[other].label}: make them with one tokenizer, or set data.pack=false"
        )
    return None


# ------------------------------------------------------------------------------------------------------------- streams


def _open_stream(cfg: Config, cache: Path) -> StreamedData:
    data = cfg.data
    if data.eos_id is not None:
        raise ConfigError(f"data.eos_id={data.eos_id}: data=hf takes it from data.tokenizer: set it to null")
    dataset = _checked_stream(data) if world_from_env()[0] == 0 else None
    tokenizer = corpus_tokenizer(data, StreamedCorpus(data, "split", SAMPLE), cache)
    _check_vocabulary(cfg, tokenizer)
    validation: tuple[np.ndarray, ...] = ()
    if data.eval_split is not None:
        held_out = StreamedCorpus(data, "eval_split", _VALIDATION, held_out=True)
        found = tokenise(held_out, tokenizer, cache).validation
        validation = (found,) if len(found) else ()
    return StreamedData(
        tokenizer=tokenizer,
        vocab_size=tokenizer.vocab_size,
        fingerprint=digest("stream", stream_key(data), tokenizer.digest()),
        eos_id=tokenizer.eos_id,
        validation=validation,
        data=data,
        dataset=dataset,
    )


def _checked_stream(data: DataConfig) -> Any:
    """The stream, of which the first row has been looked at.

    Raises:
        ConfigError: it cannot be read, is empty, or has no text there.
    """
    dataset = open_stream(data)
    row = next(read(dataset, f"data.path={data.path}"), None)
    if row is None:
        raise ConfigError(f"data.path={data.path}: split {data.split} is empty: give another")
    text_of(row, data, 0)
    return dataset
