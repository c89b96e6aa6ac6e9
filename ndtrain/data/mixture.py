"""The corpora that `data=blend` names, each with the settings it has alone."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ndtrain.config import ConfigError, DataConfig
from ndtrain.config.checks import check_data
from ndtrain.config.near import near
from ndtrain.data.cache import digest
from ndtrain.data.documents import Corpus
from ndtrain.data.mixture_order import Turns
from ndtrain.data.store import SAMPLE
from ndtrain.data.tokenizer import Tokenizer, load_tokenizer

# for each kind of corpus the keys it reads, which are those of `data` where its entry has none of its own
_READS = {
    "python": ("validation",),
    "text": ("validation", "path"),
    "jsonl": ("validation", "path", "text_key"),
    "bin": ("path", "dtype", "eos_id", "validation_path"),
    "hf": ("validation", "path", "text_key", "subset", "split", "eval_split"),
}
_KEYS = ("name", "weight", *dict.fromkeys(key for keys in _READS.values() for key in keys))
_SHARED = ("tokenizer", "vocab_size", "shuffle", "pack", "cache", "prefetch")


@dataclass(frozen=True)
class Member:
    """A corpus of a blend. `label` names its entry in messages."""

    label: str
    data: DataConfig
    weight: float


def members(data: DataConfig) -> list[Member]:
    """The corpora of `data.blend`.

    Raises:
        ConfigError: an entry with a key that is unknown, missing, of the wrong type or without effect, or a weight that
            is not a positive number.
    """
    return [_member(data, entry, f"data.blend[{number}]") for number, entry in enumerate(data.blend)]


@contextmanager
def named(label: str) -> Iterator[None]:
    """Puts `label` before the message of a ConfigError."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{label}: {error}") from error


def turns_of(found: Sequence[Member]) -> Turns:
    """Raises ConfigError where a weight is too small beside the others."""
    try:
        return Turns([member.weight for member in found])
    except ValueError as error:
        member = found[error.args[1]]
        raise ConfigError(
            f"{member.label}.weight={member.weight}: less than a millionth of all weights: raise it, or leave it out"
        ) from error


def blend_tokenizer(data: DataConfig, corpora: Sequence[Corpus], weights: Sequence[float], cache: Path) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names for all `corpora` together; a bpe is trained on a sample of them, drawn
    in proportion to `weights`, and kept in `cache`.

    Raises:
        ConfigError: as `load_tokenizer`.
    """
    key = digest([(corpus.key(), weight) for corpus, weight in zip(corpora, weights, strict=True)])
    trained = cache / f"bpe-{digest(key, data.vocab_size, SAMPLE)}.json"
    return load_tokenizer(data, lambda: _samples(corpora, weights), trained)


def _samples(corpora: Sequence[Corpus], weights: Sequence[float]) -> Iterator[str]:
    for corpus, weight in zip(corpora, weights, strict=True):
        yield from corpus.sample(int(SAMPLE * weight / sum(weights)))


def _member(data: DataConfig, entry: dict[str, Any], label: str) -> Member:
    for key in entry:
        _check_key(key, label)
    name = entry.get("name")
    if name == "blend":
        raise ConfigError(f"{label}.name=blend: a blend cannot hold another: list its corpora here")
    if name not in _READS:
        what = " is missing: " if name is None else f"={name}: no such choice; {near(str(name), list(_READS))}"
        raise ConfigError(f"{label}.name{what}known: {', '.join(_READS)}")
    own = {key: _typed(key, value, label) for key, value in entry.items() if key not in ("name", "weight")}
    for key in own:
        if key not in _READS[name]:
            raise ConfigError(f"{label}.{key}={own[key]}: data={name} does not read it: remove it")
    inherited = {key: getattr(data, key) for key in _READS[name]}
    unread = dict.fromkeys(("path", "subset", "eval_split", "eos_id", "validation_path"))
    found = replace(data, blend=[], **(unread | inherited | own | {"name": name}))
    with named(label):
        check_data(found)
    return Member(label, found, _weight(entry, label))


def _check_key(key: str, label: str) -> None:
    if key in _SHARED:
        raise ConfigError(f"{label}.{key}: all corpora of a blend share it: set data.{key}")
    if key in ("blend", "streaming"):
        raise ConfigError(f"{label}.{key}: a blend takes neither blends nor streams: remove it")
    if key not in _KEYS:
        raise ConfigError(f"{label}.{key}: no such key; {near(str(key), list(_KEYS))}known: {', '.join(_KEYS)}")


def _typed(key: str, value: Any, label: str) -> Any:
    """`value` as the schema has it."""
    try:
        return OmegaConf.merge(OmegaConf.structured(DataConfig), {key: value})[key]
    except OmegaConfBaseException as error:
        raise ConfigError(f"{label}.{key}={value}: {str(error).splitlines()[0]}") from error


def _weight(entry: dict[str, Any], label: str) -> float:
    weight = entry.get("weight")
    if weight is None:
        raise ConfigError(f"{label}.weight is missing: give each corpus of a blend one, e.g. weight: 0.5")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight) or weight <= 0:
        raise ConfigError(f"{label}.weight={weight}: must be a positive number")
    return weight
