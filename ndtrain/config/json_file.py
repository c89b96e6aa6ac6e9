"""Reading of JSON files that may be damaged or foreign: size and depth are bounded, and errors are one line."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ndtrain.config.schema import ConfigError

_LONGEST = 256 << 20  # bytes; the state.json of a model with 100,000 tensors has about 50 MB
_DEEPEST = 64  # levels of nested lists and objects


class JsonError(ConfigError):
    """The error of a JSON file that cannot be used. The message is one line that names the file."""


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Its strings can be encoded, and its depth is small enough for recursion.

    Raises:
        JsonError: the file cannot be read, is too large, is nested too deeply, or holds no JSON object.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_LONGEST + 1)
    except OSError as error:
        raise JsonError(f"{path} cannot be read ({error.strerror or error})") from error
    if len(text) > _LONGEST:
        raise JsonError(f"{path} does not parse: it has more than {_LONGEST:,} bytes")
    return parse_object(text, str(path))


def parse_object(text: bytes, source: str) -> dict[str, Any]:
    """Return the object in a JSON text, as `read_object` does for a file.

    Args:
        source: name of the text's origin, for error messages.

    Raises:
        JsonError: as in `read_object`.
    """
    try:
        content = json.loads(text)
        _check(content)
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise JsonError(f"{source} does not parse: {why}") from error
    if not isinstance(content, dict):
        raise JsonError(f"{source} does not parse: it is not a JSON object")
    return content


def _check(content: Any) -> None:
    """Check the depth and the strings, level by level.

    Raises:
        RecursionError: there are more than `_DEEPEST` levels.
        ValueError: a string contains half of a surrogate pair, which cannot be printed.
    """
    level = [content]
    for _ in range(_DEEPEST):
        for value in level:
            if isinstance(value, str):
                value.encode()
        level = [inner for value in level for inner in _inside(value)]
        if not level:
            return
    raise RecursionError


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return (*value, *value.values())
    return value if isinstance(value, list) else ()
