"""The mixture of corpora of `data=blend`. Each corpus has the settings that it would have alone."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ndtrain.arguments import near
from ndtrain.config import ConfigError, DataConfig, registry
from ndtrain.config.data_checks import check_data
from ndtrain.data.cache import digest
from ndtrain.data.documents import Corpus
from ndtrain.data.mixture_order import MixtureOrder
from ndtrain.data.store import TOKENIZER_SAMPLE, sample_texts
from ndtrain.data.tokenizer import Tokenizer, load_tokenizer

# kind of corpus -> the keys it reads; a key that an entry does not set is taken from `data`
_READS = {
    "python": ("validation",),
    "text": ("validation", "path"),
    "jsonl": ("validation", "path", "text_key"),
    "bin": ("path", "dtype", "eos_id", "validation_path"),
    "megatron": ("validation", "path", "paths", "eos_id", "validation_path"),
    "llmc": ("validation", "path", "paths", "eos_id", "validation_path"),
    "datatrove": ("validation", "path", "paths", "dtype", "eos_id", "validation_path"),
    "hf": ("validation", "path", "text_key", "subset", "split", "eval_split"),
}
_PLUGIN_READS = (
    "validation",
    "path",
    "text_key",
    "subset",
    "split",
)  # in addition to the keys of the source's own config
_SHARED = ("tokenizer", "vocab_size", "shuffle", "pack", "cache", "prefetch")


@dataclass(frozen=True)
class MixtureEntry:
    """One corpus of a mixture.

    Attributes:
        label: names the entry in messages, for example `data.blend[0]`.
        data: the settings that the corpus would have alone.
        weight: its share of the sequences, not normalised.
    """

    label: str
    data: DataConfig
    weight: float


def mixture_entries(data: DataConfig) -> list[MixtureEntry]:
    """Return the corpora of `data.blend`.

    Raises:
        ConfigError: a key of an entry is unknown, missing, of the wrong type or without effect, or a weight is not a
            positive number.
    """
    return [_entry(data, given, f"data.blend[{number}]") for number, given in enumerate(data.blend)]


@contextmanager
def label_errors(label: str) -> Iterator[None]:
    """Put `label` before the message of a ConfigError raised in the block."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{label}: {error}") from error


def order_entries(entries: Sequence[MixtureEntry]) -> MixtureOrder:
    """Return the order in which the sequences of the corpora follow each other.

    Raises:
        ConfigError: a weight is too small compared with the others.
    """
    try:
        return MixtureOrder([entry.weight for entry in entries])
    except ValueError as error:
        entry = entries[error.args[1]]
        raise ConfigError(
            f"{entry.label}.weight={entry.weight}: less than a millionth of all weights: raise it, or remove this "
            "corpus"
        ) from error


def mixture_tokenizer(data: DataConfig, corpora: Sequence[Corpus], weights: Sequence[float], cache: Path) -> Tokenizer:
    """Return the tokenizer that `data.tokenizer` names, for all `corpora` together.

    A bpe is trained on a sample of the corpora, drawn in proportion to `weights`, and kept in `cache`.

    Raises:
        ConfigError: as `load_tokenizer`.
    """
    key = digest([(corpus.key(), weight) for corpus, weight in zip(corpora, weights, strict=True)])
    trained = cache / f"bpe-{digest(key, data.vocab_size, TOKENIZER_SAMPLE)}.json"
    return load_tokenizer(data, lambda: _mixed_sample(corpora, weights), trained)


def _mixed_sample(corpora: Sequence[Corpus], weights: Sequence[float]) -> Iterator[str]:
    for corpus, weight in zip(corpora, weights, strict=True):
        yield from sample_texts(corpus, int(TOKENIZER_SAMPLE * weight / sum(weights)))


def _reads() -> dict[str, tuple[str, ...]]:
    """Return the keys that each kind of corpus reads, for the built-in kinds and the sources of plugins."""
    plugins = {name: (*_PLUGIN_READS, *registry.own_keys("source", name)) for name in registry.names("source")}
    return _READS | plugins


def _entry(data: DataConfig, given: dict[str, Any], label: str) -> MixtureEntry:
    reads = _reads()
    name = given.get("name")
    for key in given:
        _check_key(key, label, reads, name)
    if name == "blend":
        raise ConfigError(f"{label}.name=blend: a blend cannot contain another blend: list its corpora here")
    if name not in reads:
        what = " is missing: " if name is None else f"={name}: no such choice; {near(str(name), list(reads))}"
        raise ConfigError(f"{label}.name{what}known: {', '.join(reads)}")
    base = _settings_alone(data, name, reads[name])
    own = {key: _typed(key, value, label, base) for key, value in given.items() if key not in ("name", "weight")}
    for key in own:
        if key not in reads[name]:
            raise ConfigError(f"{label}.{key}={own[key]}: data={name} does not use this key: remove it")
    if {"path", "paths"} & own.keys():  # an entry that sets one names all its files
        own = {"path": None, "paths": None} | own
    alone = replace(base, **own)
    with label_errors(label):
        check_data(alone)
    return MixtureEntry(label, alone, _weight(given, label))


def _settings_alone(data: DataConfig, name: str, reads: Sequence[str]) -> DataConfig:
    """Return the settings of one corpus before its entry's own keys are applied.

    Keys such as `path` and `eos_id` are unset if the corpus does not read them. If `data` has the general default of a
    key, a plugin's source uses its own default.
    """
    base = dict.fromkeys(("path", "paths", "subset", "eval_split", "eos_id", "validation_path"))
    kind = (name in registry.names("source") and registry.config_of("source", name)) or DataConfig
    declared = {f.name: f for f in fields(DataConfig)}
    for key in declared:
        if key in reads or key not in base:
            base[key] = getattr(data, key)
    base |= {"blend": [], "name": name}
    if kind is DataConfig:
        return DataConfig(**base)
    untouched = [key for key in reads if key in declared and getattr(data, key) == declared[key].default]
    return kind(**{key: value for key, value in base.items() if key not in untouched})


def _check_key(key: str, label: str, reads: dict[str, tuple[str, ...]], name: str | None) -> None:
    if key in _SHARED:
        raise ConfigError(f"{label}.{key}: all corpora of a blend share this key: set data.{key} instead")
    if key in ("blend", "streaming"):
        raise ConfigError(f"{label}.{key}: a blend takes neither blends nor streaming datasets: remove it")
    known = list(dict.fromkeys(("name", "weight", *(key for keys in reads.values() for key in keys))))
    if key not in known:
        own = ["name", "weight", *reads.get(name or "", ())]
        hint = near(str(key), own) or near(str(key), known)
        raise ConfigError(f"{label}.{key}: no such key; {hint}known: {', '.join(known)}")


def _typed(key: str, value: Any, label: str, base: DataConfig) -> Any:
    """Return `value` converted to the type of the key in the config of the source."""
    try:
        converted = OmegaConf.merge(OmegaConf.structured(type(base)), {key: value})[key]
        return OmegaConf.to_object(converted) if OmegaConf.is_config(converted) else converted
    except OmegaConfBaseException as error:
        raise ConfigError(f"{label}.{key}={value}: {str(error).splitlines()[0]}") from error


def _weight(given: dict[str, Any], label: str) -> float:
    weight = given.get("weight")
    if weight is None:
        raise ConfigError(f"{label}.weight is missing: give each corpus of a blend a weight, e.g. weight: 0.5")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight) or weight <= 0:
        raise ConfigError(f"{label}.weight={weight}: must be a positive number")
    return weight
