"""The messages between the leaders of islands, and their form as JSON.

A message comes from the network. It is parsed field by field, and one of another form is refused.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from ndtrain.islands.epoch import MOST_ISLANDS, MOST_TEXT, Epoch, Member, epoch_of, member_of

Ballot = tuple[int, str]  # a counter, and the name of the proposer; the larger one wins
LOWEST: Ballot = (0, "")
MOST_KEYS = 1000


@dataclass(frozen=True)
class Start:
    """The state with which a process has started.

    Attributes:
        step: the number of finished steps.
        weights: a text that is equal for two processes only if their weights are equal; empty: it has lost them,
            because it did not read another island's state to the end.
        plan: everything that all islands must have in common, key -> value as text.
    """

    step: int
    weights: str
    plan: dict[str, str]


@dataclass(frozen=True)
class Beat:
    """A sign of life.

    Attributes:
        number: of the newest epoch that the sender knows.
        done: the number of steps that it has finished; None: it has no weights yet.
        speed: rows per second; 0: unknown.
        leaving: True if it wants to leave at the next opportunity.
        computed: the last step whose gradient it offers; 0: none.
    """

    number: int
    done: int | None
    speed: float
    leaving: bool
    computed: int = 0


@dataclass(frozen=True)
class Join:
    """The request of an island that is ready to become a member."""

    start: Start


@dataclass(frozen=True)
class Refuse:
    """The answer to a `Join` that can never succeed."""

    reason: str


@dataclass(frozen=True)
class Meet:
    """The answer of an island that is no member to a `Join`: the others that have asked it.

    After all islands were restarted, those that decide the next epoch find each other this way.
    """

    members: tuple[Member, ...]


@dataclass(frozen=True)
class Prepare:
    """The question for a promise: to accept no older ballot, and to finish no step after `limit` before the next epoch
    is decided. `number` is the number of the epoch to decide."""

    number: int
    ballot: Ballot
    limit: int


@dataclass(frozen=True)
class Promise:
    """The promise.

    Attributes:
        limit: the last step that it may finish before the decision. An older promise may have lowered it.
        done: as in `Beat`.
        has_sum: True if it can offer the summed gradient of step `done`. An island that has read its weights cannot.
        start: the state with which the process has started.
        accepted_ballot, accepted: the epoch that it has accepted before, if any.
    """

    number: int
    ballot: Ballot
    limit: int
    done: int | None
    has_sum: bool
    start: Start
    accepted_ballot: Ballot
    accepted: Epoch | None


@dataclass(frozen=True)
class Busy:
    """The answer to a `Prepare` or an `Accept` with a ballot that is too low."""

    number: int
    ballot: Ballot


@dataclass(frozen=True)
class Accept:
    """The question to accept an epoch."""

    ballot: Ballot
    epoch: Epoch


@dataclass(frozen=True)
class Accepted:
    """The acceptance. An epoch is decided if a quorum has accepted it with the same ballot."""

    number: int
    ballot: Ballot


@dataclass(frozen=True)
class Decided:
    """An epoch that is decided."""

    epoch: Epoch


Message = Beat | Join | Refuse | Meet | Prepare | Promise | Busy | Accept | Accepted | Decided
_KINDS: dict[str, type] = {kind.__name__: kind for kind in Message.__args__}


def to_json(message: Message) -> dict[str, Any]:
    """Return a message as JSON."""
    return {"kind": type(message).__name__} | {f.name: _written(getattr(message, f.name)) for f in fields(message)}


def from_json(data: Any) -> Message:
    """Return the message in JSON that `to_json` has made.

    Raises:
        ValueError: the data has another form.
    """
    name = data.get("kind") if isinstance(data, dict) else None
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None or data.keys() != {"kind", *(f.name for f in fields(kind))}:
        raise ValueError("not a message between islands")
    return kind(**{f.name: _READERS[f.name](data[f.name]) for f in fields(kind)})


def start_of(data: Any) -> Start:
    """Return the start in JSON.

    Raises:
        ValueError: the data has another form.
    """
    match data:
        case {"step": step, "weights": weights, "plan": dict(plan), **rest} if not rest and len(plan) <= MOST_KEYS:
            return Start(_count(step), _text(weights), {_text(k): _text(v) for k, v in plan.items()})
    raise ValueError("not a start")


def _written(value: Any) -> Any:
    if isinstance(value, Epoch):
        return value.to_json()
    return dict(value.__dict__) if isinstance(value, Start) else value


def _count(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53:
        return value
    raise ValueError("not a count")


def _text(value: Any) -> str:
    if isinstance(value, str) and len(value) <= MOST_TEXT:
        return value
    raise ValueError("not a short text")


def ballot_of(value: Any) -> Ballot:
    """Return the ballot in JSON.

    Raises:
        ValueError: the data has another form.
    """
    match value:
        case [number, name]:
            return _count(number), _text(name)
    raise ValueError("not a ballot")


def _number(value: Any) -> float:
    if isinstance(value, float | int) and not isinstance(value, bool) and 0 <= value < 1e12:
        return float(value)
    raise ValueError("not a number")


def _members(value: Any) -> tuple[Member, ...]:
    if isinstance(value, list) and len(value) <= MOST_ISLANDS:
        return tuple(member_of(x) for x in value)
    raise ValueError("not a list of members")


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError("not true or false")


def _optional(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else read(value)


_READERS: dict[str, Callable[[Any], Any]] = {
    "number": _count,
    "done": _optional(_count),
    "speed": _number,
    "leaving": _bool,
    "computed": _count,
    "has_sum": _bool,
    "start": start_of,
    "reason": _text,
    "members": _members,
    "ballot": ballot_of,
    "limit": _count,
    "accepted_ballot": ballot_of,
    "accepted": _optional(epoch_of),
    "epoch": epoch_of,
}
