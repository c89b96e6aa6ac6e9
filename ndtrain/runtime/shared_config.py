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

_KEY = "configuration"  # in the store


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


def publish(store: dist.Store, world: int, cfg: Config, written: Written, claimed: list) -> None:
    """On rank 0: hands the resolved `cfg` to the other ranks, and waits for their answers.

    Args:
        written: `cfg` before it was resolved.
        claimed: the claim to the run folder, `Claim.as_message`.

    Raises:
        ConfigError: the overrides of a rank differ.
    """
    message = {"written": written.__dict__, "resolved": _plain(cfg), "claimed": claimed}
    store.set(_KEY, json.dumps(message))
    answers = [store.get(f"{_KEY}/{rank}").decode() for rank in range(1, world)]
    for answer in answers:
        if answer != "same":
            raise ConfigError(answer)


def adopt(store: dist.Store, rank: int, cfg: Config, written: Written) -> tuple[Config, list]:
    """On the other ranks: rank 0's configuration, frozen, and its claim to the run folder, for `Claim.from_message`.

    Raises:
        ConfigError: the overrides differ.
    """
    message = json.loads(store.get(_KEY))
    difference = _difference(written, Written(**message["written"]), rank)
    store.set(f"{_KEY}/{rank}", difference or "same")
    if difference:
        raise ConfigError(difference)
    adopted, resolved = cfg.unfrozen(), message["resolved"]
    for key, value in _plain(cfg).items():
        if resolved.get(key) != value:
            _assign(adopted, key, resolved.get(key))
    adopted.freeze()
    return adopted, message["claimed"]


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
