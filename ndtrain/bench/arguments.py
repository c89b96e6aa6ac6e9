"""`key=value` arguments into a dataclass, every mistake one line."""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import torch

from ndtrain.config import ConfigError

Options = TypeVar("Options")
_SIZES = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}


def parse(cls: type[Options], args: Sequence[str]) -> Options:
    """An instance of the dataclass `cls`, whose fields may be `int` (1 or more), `bool`, `str` or a `Literal`.

    Raises:
        ConfigError: an argument that is no key=value, an unknown key or value, a missing key.
    """
    hints, given = get_type_hints(cls), {}
    for arg in args:
        key, equals, text = arg.partition("=")
        if not equals:
            raise ConfigError(f"{arg}: arguments are key=value; known keys: {', '.join(hints)}")
        key = one_of("key", key, list(hints))
        given[key] = _read(key, text, hints[key])
    for f in fields(cls):
        if f.default is MISSING and f.name not in given:
            known = ", ".join(map(str, get_args(hints[f.name])))
            raise ConfigError(f"{f.name} is missing" + f"; known: {known}" * bool(known))
    return cls(**given)


def one_of(what: str, word: str, known: list[str]) -> str:
    """`word` if it is known.

    Raises:
        ConfigError: with the near miss and the known ones.
    """
    if word in known:
        return word
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise ConfigError(f"{word or what}: no such {what}; {hint}known: {', '.join(known)}")


def require_folder(key: str, path: str) -> None:
    """The file `path` can be made, or is "".

    Raises:
        ConfigError: there is no folder for it.
    """
    if path and not Path(path).parent.is_dir():
        raise ConfigError(f"{key}={path}: there is no folder {Path(path).parent}")


def size_name(n: float) -> str:
    """Bytes in words: 4 KiB, 1.5 GiB."""
    unit = next((u for u, size in _SIZES.items() if n >= size), "B")
    return f"{n / _SIZES[unit]:.4g} {unit}"


def _read(key: str, text: str, kind: Any) -> Any:
    if get_origin(kind) is Literal:
        by_text = {str(choice): choice for choice in get_args(kind)}
        return by_text[one_of(key, text, list(by_text))]
    return _READERS[kind](key, text)


def _count(key: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{key}={text}: must be a whole number, at least 1")
    return int(text)


def _switch(key: str, text: str) -> bool:
    return one_of(key, text, ["true", "false"]) == "true"


_READERS: dict[Any, Callable[[str, str], Any]] = {int: _count, bool: _switch, str: lambda key, text: text}


def choose_device(asked: str) -> str:
    """cpu or cuda; auto: cuda where there is one.

    Raises:
        ConfigError: device=cuda where there is none.
    """
    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda: this machine has no CUDA device that torch can use; set it to cpu or auto")
    return ("cuda" if torch.cuda.is_available() else "cpu") if asked == "auto" else asked
