"""Reads a checkpoint on any mesh. Every rank reads its own elements and verifies them."""

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from ndtrain.checkpoint.directory import read_state
from ndtrain.checkpoint.elements import (
    AVERAGE,
    OUTER,
    CheckpointError,
    DamagedCheckpoint,
    biases_of,
    damaged,
    parts_of,
    read_biases,
    read_into,
    together,
)
from ndtrain.checkpoint.pieces import open_tensors
from ndtrain.mesh.mesh import Mesh
from ndtrain.parallel.build import Stages


def load(path: Path, stages: Stages, mesh: Mesh, optimizer: bool = True) -> list[str]:
    """Read this rank's elements of weights, moments, average and outer weights, and verify them. Call it on every rank.

    It takes some megabytes of host memory, in addition to the elements themselves.

    Args:
        optimizer: False to leave the optimizer's state as it is.

    Returns:
        Messages for the user: if the checkpoint has no average or no outer weights, these start from the weights.

    Raises:
        DamagedCheckpoint: on every rank. The message names the tensor whose content was changed, or the file that a
            rank cannot read.
    """
    written = _written_sums(path, mesh)
    plan = stages.units.plan
    contains = lambda copy: any(name.startswith(copy[0]) for name in written)
    no_average, no_outer = plan.ema and not contains(AVERAGE), plan.outer and not all(map(contains, OUTER))
    spec = plan.spec if optimizer else ()
    parts = parts_of(replace(plan, spec=spec, ema=plan.ema and not no_average, outer=plan.outer and not no_outer))
    sums = _read(path, stages, mesh, parts, list(written))
    layouts = [stages.layouts[n] for n in stages.layouts.names()]
    tensors = {p.prefix + t.name: (p, t) for ps in parts.values() for p in ps for t in p.of(layouts)}
    # Each element was read, and added to the sums, several times: by each rank that holds its shard, by each tp
    # replica, and by each stage that holds the tensor. State of a whole tensor has one owner on a stage.
    on_stage = lambda part, t: 1 if part.spec else stages.layouts.groups(t.name).replicas * t.tp_replicas
    readers_of = {name: on_stage(part, layout) * layout.pp_replicas for name, (part, layout) in tensors.items()} | {
        name: mesh.spec.world_size for stem in parts for name in biases_of(stages, stem)
    }
    for (name, words), got in zip(written.items(), sums.tolist(), strict=True):
        if name not in readers_of:
            continue
        readers = readers_of[name]
        if [(int(w, 16) * readers) % 2**64 for w in words] != [x % 2**64 for x in got]:
            raise damaged(path, f"the content of {name} does not match its checksum")
    stages.units.weights_changed()
    notes = []
    if no_average:
        stages.units.start_average()
        notes.append(f"optim.ema: {path} contains no average of the weights, so the average starts from the weights")
    if no_outer:
        stages.units.start_outer()
        notes.append(f"islands.sync: {path} contains no outer weights, so they start from the weights")
    return notes


def other_state(path: Path, stages: Stages, mesh: Mesh) -> str | None:
    """Return the name of a state tensor that a checkpoint has and the run has not, or the reverse. None: both have the
    same. Call it on every rank.

    Raises:
        DamagedCheckpoint: on every rank, if state.json cannot be read.
    """
    layouts = [stages.layouts[name] for name in stages.layouts.names()]
    parts = parts_of(replace(stages.units.plan, ema=False, outer=False))["optimizer"]
    own = {p.prefix + t.name for p in parts for t in p.of(layouts)}
    copies = tuple(prefix for prefix, _ in (AVERAGE, *OUTER))
    weights, written = {t.name for t in layouts}, _written_sums(path, mesh)
    if not weights <= written.keys():
        return None  # `load` refuses a damaged checkpoint
    of_state = lambda name: not name.startswith(copies) and name.partition(".")[2] in weights
    return min({name for name in written if of_state(name)} ^ own, default=None)


def _written_sums(path: Path, mesh: Mesh) -> dict[str, list[str]]:
    """Return the checksums in state.json. Every rank reads it."""
    sums: dict[str, list[str]] = {}
    try:
        together(mesh, lambda: sums.update(read_state(path)["checksums"]))
    except CheckpointError as error:
        raise DamagedCheckpoint(str(error)) from error
    return sums


def _read(path: Path, stages: Stages, mesh: Mesh, parts, written: list[str]) -> torch.Tensor:
    """Read the stages' tensors. Return the checksums of all ranks' elements, summed: int64 [len(written), 2]."""
    sums = torch.zeros(len(written), 2, dtype=torch.int64)
    rows = {name: i for i, name in enumerate(written)}

    def read() -> None:
        for stem, of_stem in parts.items():
            reader = open_tensors(path, stem)
            read_into(stages, reader, of_stem, sums, rows)
            read_biases(stages, reader, stem, sums, rows)

    try:
        together(mesh, read)
    except CheckpointError as error:
        raise damaged(path, error) from error
    if mesh.background is not None:
        dist.all_reduce(sums, group=mesh.background)
    return sums
