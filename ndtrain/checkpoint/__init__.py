"""Checkpoints that do not know which mesh wrote them.

A checkpoint is a folder `step-00000010`: the whole logical tensors under Hugging Face names (`model*.safetensors` in
master precision, `optimizer*.safetensors` with `exp_avg.<name>`, `exp_avg_sq.<name>` and, where the run averages its
weights, `ema.<name>`), `config.json` and the tokenizer, so that `transformers` opens it as it is, and `state.json` with
the step and the checksums. Every element has one owner, which writes it straight into place. The folder is written
under a temporary name, flushed, and published by one rename: a half-written one never has a checkpoint's name.
"""

from ndtrain.checkpoint.directory import candidates, inspect, list_checkpoints, older_checkpoints, set_aside_later
from ndtrain.checkpoint.elements import CheckpointError, DamagedCheckpoint, State, together
from ndtrain.checkpoint.loading import load
from ndtrain.checkpoint.pretrained import check_folder, load_weights, model_folder, read_model
from ndtrain.checkpoint.saver import Saved, Saver
from ndtrain.checkpoint.saving import save
from ndtrain.checkpoint.upcycling import load_start, starting_model

__all__ = [
    "CheckpointError",
    "DamagedCheckpoint",
    "Saved",
    "Saver",
    "State",
    "candidates",
    "check_folder",
    "inspect",
    "list_checkpoints",
    "load",
    "load_start",
    "load_weights",
    "model_folder",
    "older_checkpoints",
    "read_model",
    "save",
    "set_aside_later",
    "starting_model",
    "together",
]
