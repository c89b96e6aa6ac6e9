"""Weights from a Hugging Face folder."""

import json
from pathlib import Path

from ndtrain.checkpoint.elements import PARTS, CheckpointError, read_into, together
from ndtrain.mesh import Mesh
from ndtrain.parallel.apply import Stages
from ndtrain.safetensors_io import Reader


def load_weights(folder: Path, stages: Stages, mesh: Mesh) -> None:
    """Reads this rank's elements of the weights from a Hugging Face folder, converted to master precision.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or the file is damaged.
    """
    files = weight_files(folder)
    try:
        together(mesh, lambda: read_into(stages, mesh, Reader(files), PARTS["model"]))
    except CheckpointError as error:
        raise CheckpointError(f"init_from={folder}: {error}") from error
    stages.units.weights_changed()


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder."""
    index = folder / "model.safetensors.index.json"
    names = (
        sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else ["model.safetensors"]
    )
    for name in names:
        if not (folder / name).is_file():
            raise CheckpointError(f"init_from={folder}: {name} is missing")
    return [folder / name for name in names]
