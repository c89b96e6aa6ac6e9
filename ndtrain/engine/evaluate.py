"""Evaluates a checkpoint: loads its weights on a mesh and runs the same evaluation as a training."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ndtrain import checkpoint
from ndtrain.checkpoint.directory import list_checkpoints
from ndtrain.config import Config, ConfigError, resolve, world_from_env
from ndtrain.data import Data, open_data
from ndtrain.engine.saved_configuration import configuration
from ndtrain.engine.setup import check_columns, device_of, meet
from ndtrain.engine.validation import Validation
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.observe import keep_freed_memory
from ndtrain.parallel.build import build_stages, weights_only

log = logging.getLogger("ndtrain")


@dataclass(frozen=True)
class Result:
    """The figures of one evaluation.

    Attributes:
        checkpoint: the folder that was evaluated.
        loss: mean over the tokens of the validation split, in nats.
        tokens: the number of predicted tokens.
        seconds: of the evaluation, without start-up and loading.
    """

    checkpoint: Path
    loss: float
    tokens: int
    seconds: float


def evaluate(path: Path, overrides: Sequence[str] = (), everything: bool = False) -> Result:
    """Return the validation loss of a checkpoint. Under torchrun, every rank has to call this and gets the same result.

    Args:
        path: a checkpoint, a run folder (its newest checkpoint), or a Hugging Face folder.
        overrides: of the checkpoint's configuration, in Hydra's grammar: data, mesh, precision.
        everything: True to evaluate all documents, False for the held-out ones.

    Raises:
        ConfigError: the evaluation cannot start, or the checkpoint is damaged. The message is one line.
    """
    rank, local_rank, world = world_from_env()
    path = next(iter(list_checkpoints(path / "checkpoints") or list_checkpoints(path)), path)
    cfg = resolve(configuration(path, overrides, world), world)
    own = (path / "state.json").is_file()
    if rank == 0:
        checkpoint.inspect(path, cfg.model) if own else checkpoint.check_folder(path, cfg.model)
    data = open_data(cfg)
    check_columns(cfg, data)
    arrays = _arrays(cfg, data, everything)
    device = device_of(cfg, local_rank)
    keep_freed_memory()
    meet(cfg, rank, world, device)
    mesh = Mesh(MeshSpec.of(cfg.mesh), rank, device)
    stages = build_stages(cfg, mesh, weights_only(cfg.mesh.zero, cfg.precision))
    if own:
        checkpoint.load(path, stages, mesh)
    else:
        checkpoint.load_weights(path, stages, mesh)
    validation = Validation(cfg, mesh, stages, data, arrays)
    began = time.perf_counter()
    result = Result(path, *validation.run(), time.perf_counter() - began)
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


def _arrays(cfg: Config, data: Data, everything: bool) -> tuple[Any, ...]:
    """Return the data to evaluate, in the form of `Data.validation`.

    Raises:
        ConfigError: no document is held out, or all documents of a stream are requested.
    """
    if everything:
        if (arrays := data.everything()) is None:
            raise ConfigError("split=all: a stream has no end: remove split=all to evaluate data.eval_split")
        return arrays
    if not data.validation:
        raise ConfigError(
            f"data.validation={cfg.data.validation:g}: no document is held out: give split=all, or raise "
            "data.validation (data=bin needs data.validation_path, a stream data.eval_split)"
        )
    return data.validation
