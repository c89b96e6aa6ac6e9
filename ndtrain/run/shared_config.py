"""Sharing of rank 0's configuration with all ranks.

Resolvers such as `${now:...}` and `${oc.env:...}` may return different values on different ranks. Therefore rank 0
publishes its resolved configuration, and the other ranks adopt it. If no resolver explains a difference, the ranks have
different overrides, which is an error.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch.distributed as dist

from ndtrain.config import Config, ConfigError
from ndtrain.run.signed_store import SignedStore

_KEY = "configuration"  # key in the store
_SAME = "same"  # the answer of a rank with the same overrides as rank 0


@dataclass(frozen=True)
class Written:
    """A configuration as composed, before `resolve`.

    Attributes:
        values: dotted key -> value.
        interpolated: dotted key -> its text with `${...}`.
    """

    values: dict[str, Any]
    interpolated: dict[str, str]

    @classmethod
    def of(cls, cfg: Config) -> "Written":
        return cls(_plain(cfg), dict(cfg.interpolated))


def publish(messages: SignedStore, world: int, cfg: Config, written: Written, claimed: list, timeout_s: float) -> None:
    """Publish the resolved `cfg` to the other ranks, and wait for their answers. Call this on rank 0.

    Args:
        written: `cfg` before it was resolved.
        claimed: the claim to the run folder, as returned by `Claim.as_message`.

    Raises:
        ConfigError: a rank has different overrides.
        dist.DistError: a rank has not answered within `timeout_s` seconds.
    """
    messages.put(_KEY, {"written": written.__dict__, "resolved": _plain(cfg), "claimed": claimed})
    answers = messages.wait_all([_answer(rank) for rank in range(1, world)], timeout_s)
    for rank in range(1, world):
        answer = answers.get(_answer(rank))
        if answer is None:
            raise dist.DistStoreError(f"rank {rank} did not confirm the configuration within {timeout_s:g} s")
        if answer != _SAME:
            raise ConfigError(str(answer))


def adopt(messages: SignedStore, rank: int, cfg: Config, written: Written, timeout_s: float) -> tuple[Config, list]:
    """Wait for rank 0's configuration and adopt it. Call this on the other ranks.

    Return the frozen configuration, and rank 0's claim to the run folder for `Claim.from_message`.

    Raises:
        ConfigError: the overrides differ, or the message is not a configuration.
        dist.DistError: rank 0 has not published its configuration within `timeout_s` seconds.
    """
    theirs, resolved, claimed = _checked(messages.wait(_KEY, timeout_s))
    difference = _difference(written, theirs, rank)
    messages.put(_answer(rank), difference or _SAME)
    if difference:
        raise ConfigError(difference)
    adopted = cfg.unfrozen()
    for key, value in _plain(cfg).items():
        if resolved.get(key) != value:
            _assign(adopted, key, resolved.get(key))
    adopted.freeze()
    return adopted, claimed


def _answer(rank: int) -> str:
    return f"{_KEY}/{rank}"


def _checked(message: Any) -> tuple[Written, dict[str, Any], list]:
    """Unpack a message into (rank 0's configuration before it was resolved, resolved values by key, claim).

    Raises:
        ConfigError: a part is missing or has the wrong type.
    """
    match message:
        case {
            "written": {"values": dict(values), "interpolated": dict(interpolated)},
            "resolved": dict(resolved),
            "claimed": [str(), dict()] as claimed,
        }:
            return Written(values, interpolated), resolved, claimed
    raise ConfigError("rank 0 did not send a configuration: start all ranks with the same version of ndtrain")


def _difference(mine: Written, theirs: Written, rank: int) -> str | None:
    """Return one line about the first key whose values differ without a resolver as explanation, else None."""
    for key in sorted(mine.values.keys() | theirs.values.keys()):
        here, there = mine.values.get(key), theirs.values.get(key)
        if here != there and (not _texts(mine, key) or _texts(mine, key) != _texts(theirs, key)):
            return f"{key}={there} on rank 0 but {here} on rank {rank}: give every rank the same overrides"
    return None


def _texts(written: Written, key: str) -> dict[str, str]:
    """Return the interpolations that may determine a key's value: of the key, of its sections and of its entries."""
    near = lambda other: f"{key}.".startswith(f"{other}.") or other.startswith(f"{key}.")
    return {other: text for other, text in written.interpolated.items() if near(other)}


def _plain(cfg: Config) -> dict[str, Any]:
    """Return dotted key -> value, with values as they are after conversion to JSON and back."""
    return json.loads(json.dumps(dict(_leaves(cfg)), default=str))


def _leaves(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every value in a section. A dict that contains a section counts as a section too."""
    items = (
        section.items() if isinstance(section, dict) else ((f.name, getattr(section, f.name)) for f in fields(section))
    )
    for name, value in items:
        if is_dataclass(value) or (isinstance(value, dict) and any(map(is_dataclass, value.values()))):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _assign(cfg: Config, key: str, value: Any) -> None:
    *sections, name = key.split(".")
    place: Any = cfg
    for section in sections:
        place = place[section] if isinstance(place, dict) else getattr(place, section)
    if isinstance(place, dict):
        place[name] = value
    else:
        setattr(place, name, value)
