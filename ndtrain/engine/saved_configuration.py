"""The configuration of an evaluation: the checkpoint's configuration, with overrides of data, mesh and precision."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ndtrain.arguments import near
from ndtrain.checkpoint import read_model
from ndtrain.checkpoint.directory import plugins_of, read_state
from ndtrain.checkpoint.elements import damaged
from ndtrain.config import AXES, Config, ConfigError, load_config
from ndtrain.config.saved_run import SavedRun

# section -> the keys that come from the checkpoint; None: all. The loss does not depend on the other sections
_KEPT: dict[str, tuple[str, ...] | None] = {
    "run": ("name", "seed"), "model": None, "data": None, "layout": None, "precision": None,
    "train": ("seq_len", "micro_batch", "loss_chunk"),
}  # fmt: skip
_ALLOWED = ("data", "mesh", "layout", "train", "precision", "schedule", "tp", "cp", "hardware", "plugins")


def configuration(checkpoint: Path, overrides: Sequence[str], world: int) -> Config:
    """Return the unresolved configuration that evaluates a checkpoint on `world` ranks.

    All settings that the loss depends on come from the checkpoint, unless `overrides` set them. Other data is tokenised
    with the checkpoint's tokenizer. The mesh is `mesh.fsdp=-1`, unless `overrides` set it.

    Args:
        checkpoint: a folder step-*, or a Hugging Face folder, whose config.json describes the model.
        overrides: in Hydra's grammar.

    Raises:
        ConfigError: an override is wrong or has no effect, or the folder is neither.
    """
    given = [word.lstrip("+~").partition("=")[0] for word in overrides]
    _check_keys(given)
    words = list(overrides)
    if "mesh.fsdp" not in given:
        words.append("mesh.fsdp=-1")
    if not (checkpoint / "state.json").is_file():
        return _of_hf_folder(checkpoint, words, given, world)
    saved = SavedRun(_kept(checkpoint, given), str(checkpoint / "state.json"), follows=False)
    cfg = load_config(words, base=saved)
    _use_tokenizer(cfg, checkpoint, given)
    _set_batch(cfg, given, world)
    return cfg


def _check_keys(given: Sequence[str]) -> None:
    for key in given:
        section = key.partition(".")[0]
        if section == "model":
            raise ConfigError(f"{key}: the model comes from the checkpoint: remove model.*")
        if section not in _ALLOWED:
            raise ConfigError(
                f"{key}: not used by an evaluation; {near(section, _ALLOWED)}known: {', '.join(_ALLOWED)}"
            )


def _of_hf_folder(folder: Path, words: list[str], given: Sequence[str], world: int) -> Config:
    if not (folder / "config.json").is_file():
        what = "neither a checkpoint (state.json) nor a Hugging Face folder (config.json)"
        raise ConfigError(f"{folder}: {what if folder.exists() else 'no such folder'}")
    if not any(key.partition(".")[0] == "data" for key in given):
        raise ConfigError(f"{folder}: does not name its training data: give data=... and train.seq_len=...")
    cfg = load_config(words)
    cfg.model = read_model(folder)
    _use_tokenizer(cfg, folder, [*given, "data"])
    _set_batch(cfg, given, world)
    return cfg


def _kept(checkpoint: Path, given: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a checkpoint that the loss depends on.

    A given group, such as `data=text`, replaces its whole section.

    Raises:
        DamagedCheckpoint: a section is missing.
    """
    state = read_state(checkpoint)
    kept: dict[str, Any] = {"plugins": plugins_of(state)}
    for name, keys in _KEPT.items():
        section = state["config"].get(name)
        if not isinstance(section, dict):
            raise damaged(checkpoint, f"the config of state.json has no section {name}")
        if name not in given:
            kept[name] = {k: v for k, v in section.items() if keys is None or k in keys}
    return kept


def _use_tokenizer(cfg: Config, folder: Path, given: Sequence[str]) -> None:
    """Tokenise other data with the model's tokenizer. (A bpe would be trained anew on the other corpus.)"""
    other = any(g.partition(".")[0] == "data" for g in given)
    if other and "data.tokenizer" not in given and (folder / "tokenizer.json").is_file():
        cfg.data.tokenizer = str(folder)


def _set_batch(cfg: Config, given: Sequence[str], world: int) -> None:
    """Set the smallest global batch with the microbatch size of the training. The loss does not depend on the batch
    size.
    """
    if "train.global_batch" in given:
        cfg.train.micro_batch = cfg.train.micro_batch if "train.micro_batch" in given else None
        return
    sizes = {axis: getattr(cfg.mesh, axis) for axis in AXES}
    known = math.prod(n for n in sizes.values() if n > 0)
    sizes = {axis: n if n > 0 else max(1, world // known) for axis, n in sizes.items()}
    microbatches = 2 * sizes["pp"] if sizes["pp"] > 1 else 1
    cfg.train.micro_batch = cfg.train.micro_batch or 1
    cfg.train.global_batch = cfg.train.micro_batch * sizes["dp"] * sizes["fsdp"] * microbatches
