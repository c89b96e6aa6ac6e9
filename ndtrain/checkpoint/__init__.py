"""Checkpoints that do not depend on the mesh that wrote them.

A checkpoint is a folder `step-00000010` with unsharded tensors under Hugging Face names:

- `model*.safetensors`: the weights in master precision.
- `optimizer*.safetensors`: `exp_avg.<name>` and `exp_avg_sq.<name>`. If the run averages its weights, also
  `ema.<name>`.
- `config.json` and the tokenizer, so that `transformers` can load the folder as it is.
- `state.json`: the step and the checksums.

Every element has one owner, a rank that writes it straight to its position in the file. The folder is written under a
temporary name, flushed, and published by one rename. A half-written folder therefore never has a checkpoint's name.

With `checkpoint.layout=host` the tensors are in pieces, in files of each host (`pieces`). With `checkpoint.folder` they
may be in an object store, which has no rename: there state.json is uploaded last.
"""

from ndtrain.checkpoint.directory import (
    candidates,
    inspect,
    list_checkpoints,
    older_checkpoints,
    set_aside_later,
)
from ndtrain.checkpoint.elements import CheckpointError, DamagedCheckpoint, State, together
from ndtrain.checkpoint.loading import load, other_state
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
    "other_state",
    "read_model",
    "save",
    "set_aside_later",
    "starting_model",
    "together",
]
