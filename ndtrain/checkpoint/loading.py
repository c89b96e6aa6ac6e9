"""Reads a checkpoint: every rank its elements, on whatever mesh, each of them verified."""

from pathlib import Path

import torch

from ndtrain.checkpoint.elements import PARTS, CheckpointError, DamagedCheckpoint, read_into, together
from ndtrain.checkpoint.shelf import read_state
from ndtrain.collectives import all_reduce
from ndtrain.layout import REPLICA_AXES
from ndtrain.mesh import Mesh
from ndtrain.parallel.apply import Stages
from ndtrain.safetensors_io import Reader


def load(path: Path, stages: Stages, mesh: Mesh) -> None:
    """Reads this rank's elements of weights and moments and verifies every element read. Every rank calls it.

    Raises:
        CheckpointError: on every rank, naming the tensor whose content is not what was written.
    """
    expected = read_state(path)["checksums"]
    sums = torch.zeros(len(expected), 2, dtype=torch.int64)
    rows = {name: i for i, name in enumerate(expected)}

    def read() -> None:
        for stem, parts in PARTS.items():
            read_into(stages, mesh, Reader(sorted(path.glob(f"{stem}*.safetensors"))), parts, sums, rows)

    try:
        together(mesh, read)
    except CheckpointError as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error}") from error
    whole = sums.to(mesh.device)
    all_reduce(whole.view(-1), mesh.world).wait()
    tensors = {
        prefix + n: stages.layouts[n] for n in stages.layouts.names() for ps in PARTS.values() for prefix, _ in ps
    }
    for (name, words), got in zip(expected.items(), whole.tolist(), strict=True):
        # each element was read, and summed, by each replica, copy and holder
        readers = mesh.size(*REPLICA_AXES) * tensors[name].copies * tensors[name].holders
        if [(int(w, 16) * readers) % 2**64 for w in words] != [x % 2**64 for x in got]:
            raise DamagedCheckpoint(f"{path} is damaged: the content of {name} is not what was written")
    stages.units.weights_changed()
