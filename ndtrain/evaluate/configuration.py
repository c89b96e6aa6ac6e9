"""The configuration of an evaluation: that of the checkpoint, with overrides of data, mesh and precision."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from ndtrain.arguments import near
from ndtrain.checkpoint import DamagedCheckpoint, read_model
from ndtrain.checkpoint.directory import plugins_of, read_state
from ndtrain.config import AXES, Config, ConfigError, load_config, to_config

# section -> the keys that come from the checkpoint; None: all. The loss does not depend on the other sections
_KEPT: dict[str, tuple[str, ...] | None] = {
    "run": ("name", "seed"), "model": None, "data": None, "layout": None, "precision": None,
    "train": ("seq_len", "micro_batch", "loss_chunk"),
}  # fmt: skip
_ALLOWED = ("data", "mesh", "layout", "train", "precision", "schedule", "tp", "cp", "hardware", "plugins")


def configuration(checkpoint: Path, overrides: Sequence[str], world: int) -> Config:
    """The unresolved configuration that evaluates a checkpoint on `world` ranks.

    All that the loss depends on comes from the checkpoint, unless `overrides` give it. With other data, the tokenizer
    is the checkpoint's. The mesh is `mesh.fsdp=-1`, unless `overrides` say otherwise.

    Args:
        checkpoint: a folder step-*, or a Hugging Face folder, whose config.json says what the model is.
        overrides: in Hydra's grammar.

    Raises:
        ConfigError: an override is wrong or plays no part, or the folder is neither.
    """
    given = [word.lstrip("+~").partition("=")[0] for word in overrides]
    _check_keys(given)
    words = list(overrides)
    if "mesh.fsdp" not in given:
        words.append("mesh.fsdp=-1")
    if not (checkpoint / "state.json").is_file():
        return _of_hf_folder(checkpoint, words, given, world)
    state = read_state(checkpoint)
    saved, plugins = _sections(checkpoint, state["config"]), plugins_of(state)
    if plugins and "plugins" not in given:
        words.append(f"plugins=[{','.join(plugins)}]")
    container = asdict(load_config(words))
    for section, keys in _KEPT.items():
        _take(container[section], saved[section], section, keys, given)
    if "data" in given and "data.vocab_size" not in given:
        container["data"]["vocab_size"] = saved["model"].get("vocab_size")
    _use_tokenizer(container["data"], checkpoint, given)
    cfg = to_config(OmegaConf.create(container))
    _set_batch(cfg, given, world)
    return cfg


def _sections(checkpoint: Path, config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The sections of the run's configuration that are taken over.

    Raises:
        DamagedCheckpoint: one of them is not there.
    """
    for section in _KEPT:
        if not isinstance(config.get(section), dict):
            raise DamagedCheckpoint(f"{checkpoint} is damaged: the config of state.json has no section {section}")
    return {section: config[section] for section in _KEPT}


def _check_keys(given: Sequence[str]) -> None:
    for key in given:
        section = key.partition(".")[0]
        if section == "model":
            raise ConfigError(f"{key}: the checkpoint says what the model is: leave model.* out")
        if section not in _ALLOWED:
            raise ConfigError(
                f"{key}: plays no part in an evaluation; {near(section, _ALLOWED)}known: {', '.join(_ALLOWED)}"
            )


def _of_hf_folder(folder: Path, words: list[str], given: Sequence[str], world: int) -> Config:
    if not (folder / "config.json").is_file():
        what = "neither a checkpoint (state.json) nor a Hugging Face folder (config.json)"
        raise ConfigError(f"{folder}: {what if folder.exists() else 'no such folder'}")
    if not any(key.partition(".")[0] == "data" for key in given):
        raise ConfigError(f"{folder}: does not say which data it was trained on: give data=... and train.seq_len=...")
    cfg = load_config(words)
    cfg.model = read_model(folder)
    data = asdict(cfg.data)
    _use_tokenizer(data, folder, [*given, "data"])
    cfg.data.tokenizer = data["tokenizer"]
    _set_batch(cfg, given, world)
    return cfg


def _take(target: dict, saved: dict, section: str, keys: tuple[str, ...] | None, given: Sequence[str]) -> None:
    """Copies a section's keys from the checkpoint, unless they are given or their whole group is."""
    if section in given:
        return
    for key, value in saved.items():
        name = f"{section}.{key}"
        if (keys is None or key in keys) and not any(g == name or g.startswith(f"{name}.") for g in given):
            target[key] = value


def _use_tokenizer(data: dict[str, Any], folder: Path, given: Sequence[str]) -> None:
    """Other data is tokenised as the model's training data was. (A bpe would be trained anew on the other corpus.)"""
    other = any(g.partition(".")[0] == "data" for g in given)
    if other and "data.tokenizer" not in given and (folder / "tokenizer.json").is_file():
        data["tokenizer"] = str(folder)


def _set_batch(cfg: Config, given: Sequence[str], world: int) -> None:
    """The smallest global batch of microbatches as large as the training's: the loss does not depend on it."""
    if "train.global_batch" in given:
        cfg.train.micro_batch = cfg.train.micro_batch if "train.micro_batch" in given else None
        return
    sizes = {axis: getattr(cfg.mesh, axis) for axis in AXES}
    known = math.prod(n for n in sizes.values() if n > 0)
    sizes = {axis: n if n > 0 else max(1, world // known) for axis, n in sizes.items()}
    microbatches = 2 * sizes["pp"] if sizes["pp"] > 1 else 1
    cfg.train.micro_batch = cfg.train.micro_batch or 1
    cfg.train.global_batch = cfg.train.micro_batch * sizes["dp"] * sizes["fsdp"] * microbatches
