"""One configuration for all ranks: that of rank 0.

A resolver may give every rank another value, as `${now:...}` and `${oc.env:...}` do. So rank 0 publishes what it has
resolved, and the other ranks take it over. A difference that no resolver explains is a difference of the overrides.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch.distributed as dist

from ndtrain.config import Config, ConfigError
from ndtrain.runtime.signed_store import SignedStore

_KEY = "configuration"  # in the store
_SAME = "same"  # the answer of a rank whose overrides are those of rank 0


@dataclass(frozen=True)
class Written:
    """A configuration before it is resolved for the ranks.

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
    """On rank 0: hands the resolved `cfg` to the other ranks, and waits for their answers.

    Args:
        written: `cfg` before it was resolved.
        claimed: the claim to the run folder, `Claim.as_message`.

    Raises:
        ConfigError: the overrides of a rank differ.
        dist.DistError: a rank has not answered within `timeout_s` seconds.
    """
    messages.put(_KEY, {"written": written.__dict__, "resolved": _plain(cfg), "claimed": claimed})
    answers = messages.wait_all([_answer(rank) for rank in range(1, world)], timeout_s)
    for rank in range(1, world):
        answer = answers.get(_answer(rank))
        if answer is None:
            raise dist.DistStoreError(f"rank {rank} has not answered to the configuration within {timeout_s:g} s")
        if answer != _SAME:
            raise ConfigError(str(answer))


def adopt(messages: SignedStore, rank: int, cfg: Config, written: Written, timeout_s: float) -> tuple[Config, list]:
    """On the other ranks: rank 0's configuration, frozen, and its claim to the run folder, for `Claim.from_message`.

    Raises:
        ConfigError: the overrides differ, or what came is no configuration.
        dist.DistError: rank 0 has published none within `timeout_s` seconds.
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
    """(rank 0's configuration before it was resolved, resolved values by key, claim) of a message.

    Raises:
        ConfigError: a part is missing or of another kind.
    """
    match message:
        case {
            "written": {"values": dict(values), "interpolated": dict(interpolated)},
            "resolved": dict(resolved),
            "claimed": [str(), dict()] as claimed,
        }:
            return Written(values, interpolated), resolved, claimed
    raise ConfigError("what came from rank 0 is no configuration: start all ranks from the same version of ndtrain")


def _difference(mine: Written, theirs: Written, rank: int) -> str | None:
    """One line on the first key whose values differ although no resolver explains it."""
    for key in sorted(mine.values.keys() | theirs.values.keys()):
        here, there = mine.values.get(key), theirs.values.get(key)
        if here != there and (not _texts(mine, key) or _texts(mine, key) != _texts(theirs, key)):
            return f"{key}={there} on rank 0 but {here} on rank {rank}: give every rank the same overrides"
    return None


def _texts(written: Written, key: str) -> dict[str, str]:
    """The interpolations that a key's value may come from: its own, and those of a section above or an entry below."""
    near = lambda other: f"{key}.".startswith(f"{other}.") or other.startswith(f"{key}.")
    return {other: text for other, text in written.interpolated.items() if near(other)}


def _plain(cfg: Config) -> dict[str, Any]:
    """Dotted key -> value, as JSON holds it."""
    return json.loads(json.dumps(dict(_leaves(cfg)), default=str))


def _leaves(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values below a section; a dict counts as a section where it holds one."""
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
