"""Opens the data of a run: a corpus tokenised into the data cache, token files, chats, a mixture or a stream."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ndtrain.config import TOKEN_SOURCES, Config, ConfigError, DataConfig, world_from_env
from ndtrain.config.store import in_store
from ndtrain.data.cache import digest
from ndtrain.data.chat.dataset import open_chat
from ndtrain.data.corpora import open_corpus
from ndtrain.data.dataset import Data, IndexedData, StreamingData, TokenCorpus
from ndtrain.data.documents import Corpus, require_training_text
from ndtrain.data.formats import FORMATS
from ndtrain.data.hf import StreamingSample, iterate_rows, open_streaming_dataset, row_text, streaming_identity
from ndtrain.data.manifest import Manifest, open_manifest
from ndtrain.data.mixture import MixtureEntry, label_errors, mixture_entries, mixture_tokenizer, order_entries
from ndtrain.data.store import (
    TOKENIZER_SAMPLE,
    TokenFileScan,
    contains_token,
    corpus_tokenizer,
    map_tokens,
    open_token_file,
    tokenise,
)
from ndtrain.data.token_array import LazyFiles, StoredFile, Tokens, indexed_starts
from ndtrain.data.token_files import TokenFiles, open_token_files
from ndtrain.data.tokenizer import Tokenizer, saved_tokenizer

_VALIDATION_LIMIT = 64 << 20  # characters of a streaming dataset's validation split that are read


def open_data(cfg: Config) -> Data:
    """Open `cfg.data`, and tokenise it into the data cache if it is not there yet. No process group is needed.

    If several processes of one host open the same corpus at once, one tokenises it and shows its progress. The others
    wait.

    Raises:
        ConfigError: the corpus is missing, empty or shorter than a sequence; a document cannot be read; the tokenizer
            or the cache is unusable; an id exceeds `model.vocab_size`; `data.eos_id` is missing, unusable or not read;
            or an entry of `data.blend` is wrong.
    """
    cache = Path(cfg.data.cache).expanduser()
    if cfg.data.name == "blend":
        return _open_mixture(cfg, cache)
    if cfg.data.name == "chat":
        data = open_chat(cfg, cache)
        _check_vocabulary(cfg, data.tokenizer)
        return data
    if cfg.data.streaming:
        return _open_streaming(cfg, cache)
    if cfg.data.name in TOKEN_SOURCES:
        file = _token_file(cfg, cfg.data, cache)
        tokens, tokenizer, vocab_size = file.tokens, file.tokenizer, file.vocab_size
    else:
        corpus = _text_corpus(cfg.data)
        tokenizer = corpus_tokenizer(cfg.data, corpus, cache)
        _check_vocabulary(cfg, tokenizer)
        tokens, vocab_size = _tokenised(corpus, tokenizer, cache), tokenizer.vocab_size
    _check_length(cfg, cfg.data.name, tokens)
    return IndexedData(
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        fingerprint=tokens.fingerprint,
        eos_id=tokens.eos_id,
        validation=_validation_splits([tokens]),
        corpora=(tokens,),
    )


def _validation_splits(corpora: Sequence[TokenCorpus]) -> tuple[np.ndarray, ...]:
    return tuple(corpus.validation for corpus in corpora if len(corpus.validation))


def _check_length(cfg: Config, name: str, tokens: TokenCorpus) -> None:
    least = cfg.train.seq_len + 1
    if len(tokens.train) < least:
        raise ConfigError(
            f"data={name}: the training split holds {len(tokens.train)} tokens, fewer than one sequence of "
            f"train.seq_len + 1 = {least}: lower train.seq_len or give more data"
        )


# --------------------------------------------------------------------------------------------------------- text corpora


def _text_corpus(data: DataConfig) -> Corpus:
    if data.eos_id is not None:
        raise ConfigError(
            f"data.eos_id={data.eos_id}: data={data.name} takes it from data.tokenizer, and only "
            f"{', '.join(f'data={name}' for name in TOKEN_SOURCES)} use this key: set it to null"
        )
    return open_corpus(data)


def _vocabulary_fix(cfg: Config, least: int) -> str:
    """Return advice for a model whose vocabulary is smaller than `least`."""
    if cfg.init_from:
        return f"the model comes from init_from={cfg.init_from}: use its tokenizer, data.tokenizer={cfg.init_from}"
    return f"set model.vocab_size to at least {least}"


def _check_vocabulary(cfg: Config, tokenizer: Tokenizer) -> None:
    if tokenizer.vocab_size > cfg.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={cfg.model.vocab_size} is less than the {tokenizer.vocab_size} tokens of "
            f"data.tokenizer={cfg.data.tokenizer}: {_vocabulary_fix(cfg, tokenizer.vocab_size)}"
        )


def _tokenised(corpus: Corpus, tokenizer: Tokenizer, cache: Path) -> TokenCorpus:
    tokenised = tokenise(corpus, tokenizer, cache)
    require_training_text(corpus.setting, len(tokenised.train), len(tokenised.validation))
    train, validation, fingerprint = tokenised.train, tokenised.validation, tokenised.fingerprint
    return TokenCorpus(corpus.setting, train, validation, fingerprint, tokenizer.eos_id)


# --------------------------------------------------------------------------------------------------------- token files


@dataclass(frozen=True)
class _TokenFile:
    """A token file or a prepared folder. `tokenizer` is None if no manifest names it."""

    tokens: TokenCorpus
    tokenizer: Tokenizer | None
    vocab_size: int


def _token_file(cfg: Config, data: DataConfig, cache: Path) -> _TokenFile:
    if data.name in FORMATS:
        return _formatted(cfg, data, cache)
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
    """Open the folder that `python -m ndtrain.data prepare` wrote and `manifest` describes."""
    if manifest.vocab_size > cfg.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={cfg.model.vocab_size} is less than the {manifest.vocab_size} tokens that "
            f"data.path={data.path} was prepared with: {_vocabulary_fix(cfg, manifest.vocab_size)}"
        )
    train, validation = (_tokens_of(manifest, split) for split in ("train", "validation"))
    if data.validation_path is not None:
        validation, _ = _scanned(cfg, data.validation_path, manifest.dtype, cache, "data.validation_path")
    tokens = TokenCorpus(f"data.path={data.path}", train, validation, manifest.fingerprint, manifest.eos_id)
    return _TokenFile(tokens, saved_tokenizer(manifest.folder, manifest.eos_id), manifest.vocab_size)


def _tokens_of(manifest: Manifest, split: str) -> Tokens:
    """Return the tokens of a split. Several files, and files in an object store, are opened when they are read."""
    dtype, paths = np.dtype(manifest.dtype).newbyteorder("<"), manifest.paths(split)
    sizes = [shard.tokens for shard in manifest.files[split]]
    if in_store(manifest.folder):
        return LazyFiles(sizes, lambda n: StoredFile(paths[n], sizes[n], dtype, manifest.largest), dtype).array()
    if len(paths) == 1:
        return map_tokens(paths[0], dtype)
    return LazyFiles(sizes, lambda n: map_tokens(paths[n], dtype), dtype).array()


def _scanned(cfg: Config, path: str, dtype: str, cache: Path, key: str) -> tuple[np.ndarray, TokenFileScan]:
    tokens, scan = open_token_file(path, dtype, cache, key)
    if scan.largest >= cfg.model.vocab_size:
        raise ConfigError(
            f"{key}={path}: token id {scan.largest} at offset {scan.offset} is outside "
            f"model.vocab_size={cfg.model.vocab_size}: {_vocabulary_fix(cfg, scan.largest + 1)}"
        )
    return tokens, scan


def _formatted(cfg: Config, data: DataConfig, cache: Path) -> _TokenFile:
    """Open files in the format of another program. If their documents are known, a fraction of them can be held out."""
    settings, key = ([data.path], "data.path") if data.path else (list(data.paths), "data.paths")
    held_out = 0.0 if data.validation_path else data.validation
    opened = [open_token_files(data, settings, key, held_out, cache)]
    files = opened[0]
    require_training_text(files.setting, len(files.train), len(files.validation))
    validation = files.validation
    if data.validation_path:
        opened.append(open_token_files(data, [data.validation_path], "data.validation_path", 0.0, cache))
        validation = opened[1].train
    largest = max(_largest(cfg, files) for files in opened)
    eos_id = _formatted_eos(cfg, data, files)
    if data.pack and eos_id is None:
        _require_index(opened)
    tokens = TokenCorpus(files.setting, files.train, validation, files.fingerprint, eos_id)
    return _TokenFile(tokens, None, largest + 1)


def _largest(cfg: Config, files: TokenFiles) -> int:
    """Return the largest id in the files.

    Raises:
        ConfigError: an id exceeds the vocabulary.
    """
    for file, scan in zip(files.files, files.scans, strict=True):
        if scan.largest >= cfg.model.vocab_size:
            raise ConfigError(
                f"{files.setting}: token id {scan.largest} at offset {scan.offset} of {file.path} is outside "
                f"model.vocab_size={cfg.model.vocab_size}: {_vocabulary_fix(cfg, scan.largest + 1)}"
            )
    return max(scan.largest for scan in files.scans)


def _formatted_eos(cfg: Config, data: DataConfig, files: TokenFiles) -> int | None:
    """Return the token that ends a document: `data.eos_id`, else the token that ends all documents; None if there is
    none.
    """
    if data.eos_id is not None:
        _check_eos(cfg, data, files.train)
        return data.eos_id
    eos = files.summary.eos_id
    if eos is not None and not files.summary.documents and not contains_token(files.train, eos):
        eos = None  # the format's convention, which these files do not follow
    return eos


def _require_index(opened: Sequence[TokenFiles]) -> None:
    """Check that every file has an index of its documents, since no token ends them.

    Raises:
        ConfigError: a file has no index.
    """
    for files in opened:
        if indexed_starts(files.train) is None:
            raise ConfigError(
                f"data.pack=true: {files.setting} has no index of its documents and no known end-of-document token: "
                "set data.eos_id, or data.pack=false"
            )


def _check_eos(cfg: Config, data: DataConfig, tokens: Tokens) -> None:
    """Check `data.eos_id`, the only mark between the documents of a token file."""
    eos, pack = data.eos_id, data.pack
    if eos is None and pack:
        raise ConfigError(
            "data.eos_id is missing: with data=bin, data.pack=true needs the id of the end-of-document token"
        )
    if eos is not None and not 0 <= eos < cfg.model.vocab_size:
        raise ConfigError(f"data.eos_id={eos}: must be in [0, model.vocab_size={cfg.model.vocab_size})")
    if pack and not contains_token(tokens, eos):
        raise ConfigError(
            f"data.eos_id={eos}: data.path={data.path or data.paths} does not contain this token, so no document "
            "ends: give the file's end-of-text token, or set data.pack=false"
        )


# ------------------------------------------------------------------------------------------------------------- mixtures


def _open_mixture(cfg: Config, cache: Path) -> IndexedData:
    entries = mixture_entries(cfg.data)
    order = order_entries(entries)
    files: dict[str, _TokenFile] = {}
    texts: dict[str, Corpus] = {}
    for entry in entries:
        with label_errors(entry.label):
            if entry.data.name in TOKEN_SOURCES:
                files[entry.label] = _token_file(cfg, entry.data, cache)
            else:
                texts[entry.label] = _text_corpus(entry.data)
    tokenizer = _shared_tokenizer(cfg, entries, files, texts, cache)
    corpora = []
    for entry in entries:
        with label_errors(entry.label):
            file = files.get(entry.label)
            corpora.append(file.tokens if file else _tokenised(texts[entry.label], tokenizer, cache))
            _check_length(cfg, entry.data.name, corpora[-1])
    return IndexedData(
        tokenizer=tokenizer,
        vocab_size=max([f.vocab_size for f in files.values()] + ([tokenizer.vocab_size] if tokenizer else [])),
        fingerprint=digest([(c.fingerprint, share) for c, share in zip(corpora, order.shares, strict=True)]),
        eos_id=_shared_eos(cfg, entries, corpora),
        validation=_validation_splits(corpora),
        corpora=tuple(corpora),
        mixture_order=order,
    )


def _shared_tokenizer(
    cfg: Config, entries: Sequence[MixtureEntry], files: dict[str, _TokenFile], texts: dict[str, Corpus], cache: Path
) -> Tokenizer | None:
    """Return the tokenizer of all corpora; None if there are only token files and none of them names its tokenizer.

    Raises:
        ConfigError: token files were made with another tokenizer, or `data.tokenizer=bpe` would train a new one.
    """
    made = {label: file.tokenizer for label, file in files.items() if file.tokenizer}
    if not texts:
        tokenizer, origin = next(((t, label) for label, t in made.items()), (None, ""))
    else:
        if files and cfg.data.tokenizer == "bpe":
            raise ConfigError(
                f"data.tokenizer=bpe: would train a new tokenizer, but {next(iter(files))} already holds tokens: "
                "give the tokenizer that made them"
            )
        weights = [entry.weight for entry in entries if entry.label in texts]
        tokenizer, origin = mixture_tokenizer(cfg.data, list(texts.values()), weights, cache), "data.tokenizer"
        _check_vocabulary(cfg, tokenizer)
    for label, other in made.items():
        if other.digest() != tokenizer.digest():
            raise ConfigError(
                f"{label}: was prepared with another tokenizer than {origin}: prepare it again with the same one"
            )
    for label, file in files.items():
        if tokenizer and file.vocab_size > tokenizer.vocab_size:
            raise ConfigError(
                f"{label}: token id {file.vocab_size - 1} is outside the {tokenizer.vocab_size} tokens of {origin}: "
                "it was made with another tokenizer"
            )
    return tokenizer


def _shared_eos(cfg: Config, entries: Sequence[MixtureEntry], corpora: Sequence[TokenCorpus]) -> int | None:
    """Return the token that ends a document in all corpora; None if the corpora differ.

    If the run is packed, only corpora without an index of documents count, unless all have one.

    Raises:
        ConfigError: the run is packed, and corpora without an index differ.
    """
    labelled = list(zip(corpora, [entry.label for entry in entries], strict=True))
    unindexed = [pair for pair in labelled if indexed_starts(pair[0].train) is None]
    needed = unindexed if cfg.data.pack else []
    (first, label), *others = needed or labelled
    other = next((pair for pair in others if pair[0].eos_id != first.eos_id), None)
    if other is None:
        return first.eos_id
    if needed:
        raise ConfigError(
            f"data.pack=true: documents end with token {first.eos_id} in {label}, but with {other[0].eos_id} in "
            f"{other[1]}: tokenise both with one tokenizer, or set data.pack=false"
        )
    return None


# --------------------------------------------------------------------------------------------------- streaming datasets


def _open_streaming(cfg: Config, cache: Path) -> StreamingData:
    data = cfg.data
    if data.eos_id is not None:
        raise ConfigError(f"data.eos_id={data.eos_id}: data=hf takes it from data.tokenizer: set it to null")
    dataset = _checked_streaming_dataset(data) if world_from_env()[0] == 0 else None
    tokenizer = corpus_tokenizer(data, StreamingSample(data, "split", TOKENIZER_SAMPLE), cache)
    _check_vocabulary(cfg, tokenizer)
    validation: tuple[np.ndarray, ...] = ()
    if data.eval_split is not None:
        held_out = StreamingSample(data, "eval_split", _VALIDATION_LIMIT, held_out=True)
        tokens = tokenise(held_out, tokenizer, cache).validation
        validation = (tokens,) if len(tokens) else ()
    return StreamingData(
        tokenizer=tokenizer,
        vocab_size=tokenizer.vocab_size,
        fingerprint=digest("stream", streaming_identity(data), tokenizer.digest()),
        eos_id=tokenizer.eos_id,
        validation=validation,
        data=data,
        dataset=dataset,
    )


def _checked_streaming_dataset(data: DataConfig) -> Any:
    """Open the streaming dataset and check its first row.

    Raises:
        ConfigError: the dataset cannot be read, is empty, or has no text column.
    """
    dataset = open_streaming_dataset(data)
    row = next(iterate_rows(dataset, f"data.path={data.path}"), None)
    if row is None:
        raise ConfigError(f"data.path={data.path}: split {data.split} is empty: give another split")
    row_text(row, data, 0)
    return dataset
