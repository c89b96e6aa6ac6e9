"""A row of a chat dataset as text, and the spans of characters that are learned: the assistant's messages."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

from ndtrain.data.chat.template import ChatTemplate, Message, TemplateError

ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool", "function", "ipython")
_WEIGHT = "weight"  # of a row, or of a message of the assistant
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one field; templates read the first one


class RowError(ValueError):
    """A row that cannot be trained on. The message is one line, and does not name the row."""


class Span(NamedTuple):
    """A range of characters that is learned, and its weight in the loss (above 0)."""

    start: int
    end: int
    weight: float = 1.0


@dataclass(frozen=True)
class Sample:
    """A text and its learned spans.

    Attributes:
        spans: in order.
        special: True if the tokenizer adds its special tokens, as for a text without a template.
    """

    text: str
    spans: tuple[Span, ...]
    special: bool = False


def samples_of(row: Mapping[str, Any], template: ChatTemplate | None, eos: str) -> list[Sample]:
    """Return the samples of a row.

    There is one sample, or several if the template renders earlier turns differently from the last turn.

    Args:
        row: has `messages`, or `prompt` and `completion`: two lists of messages, or two texts.
        template: None: the tokenizer has no template.
        eos: the end-of-text token, which ends a completion that is a text.

    Raises:
        RowError: the row has another form, or the template cannot render it.
    """
    if "messages" in row and ("prompt" in row or "completion" in row):
        raise RowError("has both messages and prompt or completion: keep one of them")
    weight = _weight(row.get(_WEIGHT), "the row")
    if not weight:
        raise RowError("has weight 0: remove the row")
    if "messages" in row:
        messages, first, whole = _messages(row["messages"], "messages"), 0, True
    elif "prompt" in row and "completion" in row:
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return [_plain(prompt, completion, eos, weight)]
        messages = _messages(prompt, "prompt")
        first, whole = len(messages), False
        messages += _messages(completion, "completion")
    else:
        fields = ", ".join(row) or "none"
        raise RowError(f"has neither messages nor prompt and completion: rename its fields ({fields})")
    if template is None:
        raise RowError("has messages, but the tokenizer has no chat template to render them")
    weights = [weight * _weight(m.pop(_WEIGHT, None), f"message {n} of the row") for n, m in enumerate(messages, 1)]
    tools, more = _tools(row.get("tools")), _more(row.get("chat_template_kwargs"))
    conversation = _Conversation(template, messages, weights, tools, more)
    try:
        return conversation.marked() if whole and conversation.is_marked else list(conversation.turns(first))
    except TemplateError as error:
        raise RowError(f"the chat template cannot render it: {error}") from error


def _plain(prompt: str, completion: str, eos: str, weight: float) -> Sample:
    if not completion:
        raise RowError("completion is empty, so there is nothing to train on: remove the row")
    text = prompt + completion
    text += "" if completion.endswith(eos) else eos
    return Sample(text, (Span(len(prompt), len(text), weight),), special=True)


@dataclass(frozen=True)
class _Conversation:
    template: ChatTemplate
    messages: list[Message]
    weights: list[float]  # of the messages
    tools: list[Any] | None
    more: Mapping[str, Any]

    @property
    def is_marked(self) -> bool:
        return self.template.marks(self.tools)

    def marked(self) -> list[Sample]:
        """Return the whole conversation as one sample, in which the parts that the template marks are learned."""
        weights = [w for w, message in zip(self.weights, self.messages, strict=True) if message["role"] == ASSISTANT]
        if not any(weights):
            raise RowError(_NO_ANSWER)
        rendered = self.template.render(self.messages, self.tools, self.more)
        if not rendered.spans:
            raise RowError("the chat template marks no part of the conversation with {% generation %}")
        if len(set(weights)) == 1:
            weights = weights[:1] * len(rendered.spans)
        if len(weights) != len(rendered.spans):
            raise RowError(
                f"the chat template marks {len(rendered.spans)} parts in {len(weights)} assistant messages, so their "
                "weights cannot be assigned: give all these messages the same weight"
            )
        spans = (Span(*span, weight) for span, weight in zip(rendered.spans, weights, strict=True) if weight)
        return [Sample(rendered.text, tuple(spans))]

    def turns(self, first: int) -> Iterator[Sample]:
        """Yield samples that together learn each turn of the assistant from message `first` on once.

        A turn is the text that the template adds after the prompt, which is the conversation so far with the generation
        prompt. A sample grows as long as the template renders earlier turns as before. Otherwise the next turn begins a
        new sample, in which earlier turns are not learned again.
        """
        text, spans = "", []
        for number in range(first, len(self.messages)):
            if self.messages[number]["role"] != ASSISTANT or not self.weights[number]:
                continue
            start, after = self._turn(number)
            if spans and not after.startswith(text):
                yield Sample(text, tuple(spans))
                spans = []
            text = after
            if start < len(after):
                spans.append(Span(start, len(after), self.weights[number]))
        if not spans:
            raise RowError(_NO_ANSWER)
        yield Sample(text, tuple(spans))

    def _turn(self, number: int) -> tuple[int, str]:
        """Return (start, text): the conversation up to and including message `number`, and where in it this message
        begins.
        """
        after = self._text(number + 1)
        before = self._text(number, add_generation_prompt=True)
        if after.startswith(before):
            return len(before), after
        # the generation prompt may contain more than the header of the message
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False)))
        if after.startswith(so_far := self._text(number)) and shared >= len(so_far):
            return shared, after
        raise RowError(
            f"the chat template renders the messages before message {number + 1} differently once it follows: mark "
            "the assistant's text in the template with {% generation %} and {% endgeneration %}"
        )

    def _text(self, count: int, add_generation_prompt: bool = False) -> str:
        return self.template.render(self.messages[:count], self.tools, self.more, add_generation_prompt).text


_NO_ANSWER = "has no assistant message with a weight above 0: remove the row"
_WEIGHTS = 1e-6, 1e6  # the bounds of weights other than 0


# ------------------------------------------------------------------------------------------------------------ fields


def _messages(value: Any, key: str) -> list[Message]:
    if not isinstance(value, list):
        raise RowError(f"{key} must be a list of messages, not {_kind(value)}")
    if not value:
        raise RowError(f"{key} is empty: remove the row")
    return [_message(message, f"message {number} of {key}") for number, message in enumerate(value, 1)]


def _message(message: Any, name: str) -> Message:
    """Return a message without null fields, in the form that `transformers` passes to templates."""
    if not isinstance(message, dict):
        raise RowError(f"{name} must be an object, not {_kind(message)}")
    role = message.get("role")
    if role not in ROLES:
        known = ", ".join(ROLES)
        raise RowError(
            f"{name} has no role" if role is None else f"{name} has the unknown role {role!r}; known: {known}"
        )
    content = message.get("content")
    if content is not None and not isinstance(content, str | list):
        raise RowError(f"the content of {name} must be a string, not {_kind(content)}")
    if content is None and not message.get("tool_calls"):
        raise RowError(f"{name} has neither content nor tool_calls")
    kept = {key: value for key, value in message.items() if value is not None}
    reasoning = next((kept[key] for key in _REASONING if key in kept), None)
    return kept if reasoning is None else {"thinking": reasoning, **kept, _REASONING[0]: reasoning}


def _tools(value: Any) -> list[Any] | None:
    """Return the tools of a row, which may also be JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowError("tools is a string that is not JSON") from error
    if value is not None and not isinstance(value, list):
        raise RowError(f"tools must be a list, not {_kind(value)}")
    return value


def _more(value: Any) -> Mapping[str, Any]:
    value = {} if value is None else value
    if not isinstance(value, dict):
        raise RowError(f"chat_template_kwargs must be an object, not {_kind(value)}")
    return value


def _weight(value: Any, name: str) -> float:
    """Return a weight; 1 if there is none."""
    if value is None:
        return 1.0
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (value == 0 or _WEIGHTS[0] <= value <= _WEIGHTS[1]):
        least, most = _WEIGHTS
        raise RowError(f"{name} has weight {_kind(value)}: it must be 0, or a number from {least:g} to {most:g}")
    return float(value)


def _kind(value: Any) -> str:
    return {type(None): "null", list: "a list", dict: "an object", str: "a string"}.get(type(value), repr(value)[:40])


def token_weights(offsets: Sequence[tuple[int, int]], spans: Sequence[Span]) -> list[float]:
    """Return the weight of each token: the weight of the span that it overlaps, or 0 if there is none.

    Args:
        offsets: (start, end) in characters of each token, in order.
        spans: as `Sample.spans`.
    """
    weights, at = [], 0
    for start, end in offsets:
        while at < len(spans) and start >= spans[at].end:
            at += 1
        weights.append(spans[at].weight if at < len(spans) and end > spans[at].start else 0.0)
    return weights
