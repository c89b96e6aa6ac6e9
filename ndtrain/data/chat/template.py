"""The chat template of a tokenizer: jinja2 in a sandbox, with the functions that `transformers` gives to templates.

A template comes with a downloaded model, so it is not trusted. The sandbox lets it read no attribute that leads to
Python's internals, and change no argument. It sees only plain JSON values.
"""

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

Message = dict[str, Any]

_LARGEST = 64 << 20  # characters of a rendered conversation
_MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
TEMPLATES = "additional_chat_templates/"  # a folder of further templates
_SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")  # tokens that a template reads as bos_token, ...


class TemplateError(ValueError):
    """A template that cannot be compiled, or that cannot render a conversation. The message is one line."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as text.

    Attributes:
        spans: (start, end) in characters of the parts that the template marks with `{% generation %}`, in order.
    """

    text: str
    spans: tuple[tuple[int, int], ...]


class ChatTemplate:
    """The chat templates of a tokenizer: the default one, and optionally one for conversations with tools.

    Attributes:
        identity: everything besides the conversation that determines the rendered text, as JSON.
    """

    def __init__(self, texts: Mapping[str, str], special: Mapping[str, str], day: date):
        """
        Args:
            texts: name ("default", "tool_use") -> the template.
            special: e.g. `bos_token` -> its text.
            day: the day that `strftime_now` formats.

        Raises:
            TemplateError: a template cannot be compiled, or there is no default one.
        """
        if "default" not in texts:
            raise TemplateError(f"there are several chat templates ({', '.join(texts)}), and none is named default")
        self.identity = [dict(texts), dict(special), day.isoformat()]
        self._special = dict(special)
        mark = secrets.token_hex(8)  # no conversation contains it
        self._begin, self._end = f"\ufdd0{mark}<", f"\ufdd0{mark}>"
        self._edges = re.compile(f"{self._begin}|{self._end}")
        environment = _environment(day, self._begin, self._end)
        self._templates = {name: _compiled(environment, name, text) for name, text in texts.items()}
        self._marked = {name: bool(_MARKED.search(text)) for name, text in texts.items()}

    def marks(self, tools: Sequence[Any] | None) -> bool:
        """Return True if the template for a conversation with these tools marks the messages of the assistant."""
        return self._marked[self._name(tools)]

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        more: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> Rendered:
        """Render a conversation.

        Args:
            more: further variables for the template.

        Raises:
            TemplateError: the template refuses the conversation, fails, or renders too much text.
        """
        given = {"messages": list(messages), "tools": tools, "add_generation_prompt": add_generation_prompt}
        variables = self._special | {"documents": None} | dict(more or {}) | given
        try:
            return self._split("".join(_bounded(self._templates[self._name(tools)].generate(variables))))
        except TemplateError:
            raise
        except Exception as error:  # any exception of an expression in the template
            raise TemplateError(_line(error)) from error

    def _name(self, tools: Sequence[Any] | None) -> str:
        return "tool_use" if tools is not None and "tool_use" in self._templates else "default"

    def _split(self, text: str) -> Rendered:
        """Remove the marks from a rendered text and return the spans between them."""
        parts, spans, starts, length, at = [], [], [], 0, 0
        for edge in self._edges.finditer(text):
            parts.append(text[at : edge.start()])
            length, at = length + len(parts[-1]), edge.end()
            if edge[0] == self._begin:
                starts.append(length)
            else:
                spans.append((starts.pop(), length))
        return Rendered("".join([*parts, text[at:]]), tuple(sorted(s for s in spans if s[0] < s[1])))


def read_template(files: Mapping[str, bytes], day: date) -> ChatTemplate | None:
    """Return the chat template in the files of a tokenizer's folder; None if it has none.

    Raises:
        TemplateError: a file cannot be parsed, or a template cannot be compiled.
    """
    config = _json(files, "tokenizer_config.json")
    texts = _templates_of(config.get("chat_template") or _json(files, "chat_template.json").get("chat_template"))
    found = {
        name.removeprefix(TEMPLATES).removesuffix(".jinja"): _text(content, name)
        for name, content in files.items()
        if name.startswith(TEMPLATES) and name.endswith(".jinja")
    }
    if "chat_template.jinja" in files:
        found["default"] = _text(files["chat_template.jinja"], "chat_template.jinja")
    texts |= found
    special: dict[str, str] = {}
    for source in (_json(files, "special_tokens_map.json"), config):
        for key in (f"{name}_token" for name in _SPECIAL):
            token = source.get(key)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                special[key] = token
    return ChatTemplate(texts, special, day) if texts else None


def _templates_of(value: Any) -> dict[str, str]:
    """Return name -> template from `chat_template` in tokenizer_config.json, which is a text or a list of named
    templates.
    """
    if value is None:
        return {}
    named = [{"name": "default", "template": value}] if isinstance(value, str) else value
    try:
        texts = {entry["name"]: entry["template"] for entry in named}
    except (TypeError, KeyError):
        texts = {"": None}
    if not all(isinstance(part, str) for pair in texts.items() for part in pair):
        raise TemplateError("chat_template in tokenizer_config.json is neither a string nor a list of named templates")
    return texts


def _json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        fields = json.loads(files.get(name, b"{}"))
    except (ValueError, RecursionError) as error:
        raise TemplateError(f"{name} is not JSON: {_line(error)}") from error
    if not isinstance(fields, dict):
        raise TemplateError(f"{name} is not a JSON object")
    return fields


def _text(content: bytes, name: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise TemplateError(f"{name} is not UTF-8 text") from error


def _line(error: Exception) -> str:
    """Return the message of an exception in one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


# ------------------------------------------------------------------------------------------------------ environment


class _Generation(Extension):
    """The tag `{% generation %}`, which puts marks around its rendered content."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        begin, end = self.environment.marks  # type: ignore[attr-defined]
        return f"{begin}{caller()}{end}"


class _SafeNamespace(Namespace):
    """A `namespace` that rejects names with a leading underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no named self, so a template may call an entry "self"
        self, given = args[0], dict(*args[1:], **kwargs)
        for name in given:
            _check_name(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold a name with a leading underscore: {name}")


def _environment(day: date, begin: str, end: str) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.extend(marks=(begin, end))
    midnight = datetime(day.year, day.month, day.day)
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: midnight.strftime(form),
        "namespace": _SafeNamespace,
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),
    }
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _compiled(environment: ImmutableSandboxedEnvironment, name: str, text: str) -> jinja2.Template:
    try:
        return environment.from_string(text)
    except (jinja2.TemplateError, RecursionError) as error:
        raise TemplateError(f"the chat template {name} cannot be compiled: {_line(error)}") from error


def _bounded(parts: Iterator[str]) -> Iterator[str]:
    size = 0
    for part in parts:
        size += len(part)
        if size > _LARGEST:
            raise TemplateError(f"its output has more than {_LARGEST >> 20} Mi characters")
        yield part
