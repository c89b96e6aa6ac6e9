"""Reads `key=value` arguments into a dataclass.

A field of the dataclass is an option. Its type determines how its value is read: `int` (1 or more), `bool` (true or
false), `str` or a `Literal` of the known values. `option` adds the line for `--help` and, if needed, another key or
reader:

    @dataclass(frozen=True)
    class Options:
        ranks: int = option("processes on this machine", 2)

    options = parse(Options, ["ranks=4"])
"""

import difflib
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, field, fields
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")
Reader = Callable[[str, str], Any]  # (key, text) -> value; raises ArgumentError
_WIDTH = 118  # width of a line of help, in characters


class ArgumentError(ValueError):
    """Arguments that cannot be used. The message is one line: the key, what is wrong, and how to fix it."""


def option(text: str, default: Any = MISSING, key: str = "", read: Reader | None = None) -> Any:
    """Return a field of a dataclass of options.

    Args:
        text: its line of help.
        key: its key, if it is not the field's name.
        read: replaces the reader of the field's type.
    """
    return field(default=default, metadata={"help": text, "key": key, "read": read})


def parse(cls: type[Options], args: Sequence[str]) -> Options:
    """Return an instance of the dataclass `cls` with the values in `args`.

    Raises:
        ArgumentError: an argument is not key=value, a key or value is unknown, or a required key is missing.
    """
    options = {_key(f): f for f in fields(cls)}
    kinds, given = get_type_hints(cls), {}
    for arg in args:
        key, equals, text = arg.partition("=")
        if not equals:
            raise ArgumentError(f"{arg}: arguments are key=value; known keys: {', '.join(options)}")
        f = options[one_of("key", key, list(options))]
        if not text and f.default is None:
            raise ArgumentError(f"{arg}: arguments are key=value")
        given[f.name] = (f.metadata.get("read") or _reader(kinds[f.name]))(key, text)
    for key, f in options.items():
        if f.default is MISSING and f.name not in given:
            known = ", ".join(map(str, get_args(kinds[f.name])))
            raise ArgumentError(f"{key} is missing" + f"; known: {known}" * bool(known))
    return cls(**given)


def help_lines(cls: type) -> str:
    """Describe the options of the dataclass `cls`, one after the other: key, meaning, known values and default."""
    kinds = get_type_hints(cls)
    indent = max(len(_key(f)) for f in fields(cls)) + 4
    return "\n".join(_help_of(f, kinds[f.name], indent) for f in fields(cls))


def wants_help(args: Sequence[str]) -> bool:
    return not {"-h", "--help"}.isdisjoint(args)


def one_of(what: str, word: str, known: Sequence[str]) -> str:
    """Return `word` if it is known.

    Raises:
        ArgumentError: `word` is unknown. The message suggests a similar word and lists the known ones.
    """
    if word not in known:
        raise ArgumentError(unknown(what, word, known))
    return word


def unknown(what: str, word: str, known: Sequence[str]) -> str:
    """Return the error message for a word that is not among the known ones."""
    return f"{word or what}: no such {what}; {near(word, known)}known: {', '.join(known)}"


def near(word: str, known: Sequence[str], alike: float = 0.5) -> str:
    """Return `did you mean 'x'? ` for the closest known word, or "" if none is at least `alike` similar (1: equal)."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=alike)
    return f"did you mean {close[0]!r}? " if close else ""


def _key(f: Field) -> str:
    return f.metadata.get("key") or f.name


def _help_of(f: Field, kind: Any, indent: int) -> str:
    notes = [" | ".join(_choices(kind))] if _choices(kind) else []
    if f.default is MISSING:
        notes.append("required")
    elif f.default or f.default is False:
        notes.append(f"default {str(f.default).lower() if kind is bool else f.default}")
    text = f.metadata.get("help", "") + f" ({'; '.join(notes)})" * bool(notes)
    lines = textwrap.wrap(text.strip(), _WIDTH - indent, break_on_hyphens=False)
    return f"  {_key(f):{indent - 2}}" + f"\n{'':{indent}}".join(lines)


def _choices(kind: Any) -> list[str]:
    if kind is bool:
        return ["true", "false"]
    return [str(choice) for choice in get_args(kind)] if get_origin(kind) is Literal else []


def _reader(kind: Any) -> Reader:
    """Return the reader for values of a type. `X | None` is read like X."""
    if get_origin(kind) is Literal:
        by_text = {str(choice): choice for choice in get_args(kind)}
        return lambda key, text: by_text[one_of(key, text, list(by_text))]
    (kind,) = set(get_args(kind)) - {NoneType} or {kind}
    return _READERS[kind]


def _count(key: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentError(f"{key}={text}: must be a whole number, at least 1")
    return int(text)


_READERS: dict[Any, Reader] = {
    int: _count,
    bool: lambda key, text: one_of(key, text, ["true", "false"]) == "true",
    str: lambda key, text: text,
}
