"""Tokenizers: bytes, a BPE trained on the corpus, or a given one. `transformers` can open each of them after `save`."""

import json
from collections.abc import Callable, Iterable, Iterator
from datetime import date
from fnmatch import fnmatch
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from ndtrain.config import ConfigError, DataConfig
from ndtrain.config.json_file import JsonError, read_object
from ndtrain.config.store import folder_at
from ndtrain.data.cache import atomic_write, digest, load_or_build
from ndtrain.data.chat.template import TEMPLATES, ChatTemplate, read_template
from ndtrain.data.hf_code import without_code
from ndtrain.data.progress import elapsed_on_stderr

EOS = "<|endoftext|>"
_LARGEST_ID = 2**32 - 1  # that the library accepts
_KNOWN_EOS = (EOS, "<|end_of_text|>", "</s>", "<eos>")
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
# tokenizer files that ndtrain does not read
_OTHER_FILES = (
    "vocab.txt",
    "tekken.json",
    "*.model",
    "*.tiktoken",
    "added_tokens*.json",
    f"{TEMPLATES}*",
)


class Tokenizer:
    """Turns text into token ids and back.

    Attributes:
        eos_id: the token that ends a document.
        vocab_size: the largest id + 1.
    """

    def __init__(self, files: dict[str, bytes], eos_id: int):
        """Load a tokenizer from the files of a Hugging Face folder: name -> content. `tokenizer.json` has to be among
        them.
        """
        self.eos_id = eos_id
        self._files = files
        self._backend = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True  # "<|endoftext|>" spelled out in a corpus is plain text
        self.vocab_size = max(self._backend.get_vocab().values()) + 1

    def __reduce__(self):  # settings such as encode_special_tokens do not survive the library's own pickling
        return Tokenizer, (self._files, self.eos_id)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text, without adding special tokens."""
        return [e.ids for e in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_markup(self, texts: list[tuple[str, bool]]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Return the ids of each text and, for each id, the (start, end) of its characters.

        A special token that is spelled out in a text becomes that token.

        Args:
            texts: (text, True to add the tokenizer's own special tokens, such as one that begins a text).
        """
        made: list[Any] = [None] * len(texts)
        for special in (False, True):
            places = [i for i, (_, added) in enumerate(texts) if added == special]
            encoded = self._markup.encode_batch([texts[i][0] for i in places], add_special_tokens=special)
            for i, e in zip(places, encoded, strict=True):
                made[i] = e.ids, e.offsets
        return made

    @cached_property
    def _markup(self) -> tokenizers.Tokenizer:
        backend = tokenizers.Tokenizer.from_str(self._files["tokenizer.json"].decode())
        backend.no_truncation()
        backend.no_padding()
        return backend

    def special_ids(self) -> list[int]:
        """Return the ids of all special tokens."""
        return [i for i, token in self._backend.get_added_tokens_decoder().items() if token.special]

    def token(self, token_id: int) -> str:
        """Return the text of one token."""
        return self._backend.id_to_token(token_id)

    def chat_template(self, day: date) -> ChatTemplate | None:
        """Return the tokenizer's chat template; None if it has none.

        Args:
            day: the day that the template takes to be today.

        Raises:
            TemplateError: as `read_template`.
        """
        return read_template(self._files, day)

    def decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        """Write the files that `transformers.AutoTokenizer.from_pretrained(folder)` needs.

        Remove files of another tokenizer, because `transformers` would mix them in.
        """
        for name in set(_TOKENIZER_FILES) - set(self._files):
            (folder / name).unlink(missing_ok=True)
        for name, content in self._files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)

    def same_ids(self, tokenizer_json: bytes) -> bool:
        """Return True if another tokenizer.json gives every token the same id."""
        if tokenizer_json == self._files["tokenizer.json"]:
            return True
        try:
            return tokenizers.Tokenizer.from_str(tokenizer_json.decode()).get_vocab() == self._backend.get_vocab()
        except Exception:  # the library raises bare Exception
            return False

    def digest(self) -> str:
        """Return a digest of everything that determines the ids of a text and the end-of-text token."""
        return digest(self._files["tokenizer.json"].decode(), self.eos_id)


def is_tokenizer_file(name: str) -> bool:
    """Return True if a file of a Hugging Face folder belongs to its tokenizer."""
    return any(fnmatch(name, pattern) for pattern in (*_TOKENIZER_FILES, *_OTHER_FILES))


def load_tokenizer(data: DataConfig, texts: Callable[[], Iterable[str]], cache: Path) -> Tokenizer:
    """Return the tokenizer that `data.tokenizer` names.

    Args:
        texts: returns the sample for training a bpe.
        cache: the file that keeps a trained bpe. Its name must change with the sample and with `data.vocab_size`.

    Raises:
        ConfigError: there is no such tokenizer, it is damaged, it has no end-of-text token, or `data.vocab_size` is too
            small for a bpe.
    """
    if data.tokenizer == "byte":
        return _own_tokenizer(_byte_level(_byte_vocab()))
    if data.tokenizer == "bpe":
        least = len(_byte_vocab())
        if data.vocab_size < least:
            raise ConfigError(
                f"data.vocab_size={data.vocab_size} is too small for data.tokenizer=bpe: set it (or "
                f"model.vocab_size) to at least {least} (256 bytes and {EOS})"
            )
        return load_or_build(cache, partial(_load_trained, cache), lambda: _train(texts(), data.vocab_size, cache))
    return _given_tokenizer(data.tokenizer)


def saved_tokenizer(folder: Path, eos_id: int) -> Tokenizer:
    """Return the tokenizer that `Tokenizer.save` wrote into `folder`.

    Raises:
        ConfigError: the folder has no tokenizer, or a damaged one.
    """
    files = {name: (folder / name).read_bytes() for name in _TOKENIZER_FILES if (folder / name).is_file()}
    try:
        return Tokenizer(files, eos_id)
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{folder}: its tokenizer.json is missing or damaged: {error}") from error


# ------------------------------------------------------------------------------------------------------ byte and bpe


def _byte_vocab() -> dict[str, int]:
    """Return token -> id. Byte b has id b; its token is the printable character that byte-level tokenizers use for it.

    EOS has the last id.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    vocab = {chr(b if b in printable else next(others)): b for b in range(256)}
    return vocab | {EOS: 256}


def _byte_level(vocab: dict[str, int] | None) -> tokenizers.Tokenizer:
    """Return a byte-level BPE without merges. With a `vocab` it is complete; without one it still has to be trained."""
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=vocab and []))
    # Only merges need words. Without merges, splitting into words would only cost time.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=vocab is None)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([EOS])
    return backend


def _train(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Train a byte-level BPE and write it to the file `path`."""
    backend = _byte_level(None)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with elapsed_on_stderr(f"training the tokenizer: building {vocab_size:,} tokens") as begin:
        backend.train_from_iterator(_then(texts, begin), trainer)
    with atomic_write(path) as file:
        file.write(backend.to_str().encode())


def _then(texts: Iterable[str], begin: Callable[[], None]) -> Iterator[str]:
    """Yield the texts, then call `begin`."""
    yield from texts
    begin()


def _load_trained(path: Path) -> Tokenizer | None:
    """Return the trained tokenizer in the cache; None if it is absent or damaged."""
    try:
        return _own_tokenizer(tokenizers.Tokenizer.from_str(path.read_bytes().decode()))
    except Exception:  # the library raises bare Exception
        return None


def _own_tokenizer(backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(
        {"tokenizer.json": backend.to_str().encode(), "tokenizer_config.json": _tokenizer_config(EOS)},
        backend.token_to_id(EOS),
    )


def _tokenizer_config(eos: str) -> bytes:
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "clean_up_tokenization_spaces": False}
    return (json.dumps(fields, indent=2) + "\n").encode()


# ---------------------------------------------------------------------------------------------------- given by the user


def _given_tokenizer(setting: str) -> Tokenizer:
    path = folder_at(setting)
    main = path / "tokenizer.json" if path.is_dir() else path
    if not path.exists():
        raise ConfigError(
            f"data.tokenizer={setting}: no such file: give byte, bpe, a tokenizer.json or a Hugging Face folder"
        )
    if not main.is_file():
        raise ConfigError(
            f"data.tokenizer={setting}: this folder has no tokenizer.json: write one with "
            "transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    files = {name: _content(main.with_name(name)) for name in _TOKENIZER_FILES if main.with_name(name).is_file()}
    files |= {f"{TEMPLATES}{p.name}": _content(p) for p in main.parent.glob(f"{TEMPLATES}*.jinja")}
    files = {name: without_code(content) for name, content in files.items()}
    files["tokenizer.json"] = _content(main)
    try:
        backend = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"data.tokenizer={setting}: {main} is not a tokenizer.json: {error}") from error
    eos_id = _eos_id(backend, main.parent)
    if eos_id is None or backend.id_to_token(eos_id) is None:
        raise ConfigError(
            f"data.tokenizer={setting}: its end-of-text token is unknown: set eos_token in "
            f"{main.with_name('tokenizer_config.json')}"
        )
    files.setdefault("tokenizer_config.json", _tokenizer_config(backend.id_to_token(eos_id)))
    return Tokenizer(files, eos_id)


def _eos_id(backend: tokenizers.Tokenizer, folder: Path) -> int | None:
    """Return the end-of-text token that the files next to a tokenizer.json name, else a token with a usual name.

    Return None if there is neither, or if the files name something that is not a token.
    """
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _read_json(folder / name).get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None:
            return backend.token_to_id(token) if isinstance(token, str) else None
    ids = _read_json(folder / "config.json").get("eos_token_id")
    if ids is not None:
        first = ids[0] if isinstance(ids, list) and ids else ids
        return first if type(first) is int and 0 <= first <= _LARGEST_ID else None
    return next((i for i in map(backend.token_to_id, _KNOWN_EOS) if i is not None), None)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"data.tokenizer: {path} cannot be read ({error.strerror})") from error


def _read_json(path: Path) -> dict:
    try:
        return read_object(path) if path.is_file() else {}
    except JsonError as error:
        raise ConfigError(f"data.tokenizer: {error}") from error
