"""What a checkpoint consists of: its tensors' elements, which rank has which, and the words for what goes wrong."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ndtrain.config import Config, ConfigError
from ndtrain.layout import REPLICA_AXES, even_cut
from ndtrain.mesh import Mesh
from ndtrain.parallel.apply import DTYPES, Stages
from ndtrain.parallel.fsdp import Unit
from ndtrain.safetensors_io import DamagedFile, PlannedFile, Reader, checksum, plan_files

FORMAT = 1
# what is saved: file stem -> (tensor-name prefix, which buffer of a unit), so that saving and loading are one loop each
PARTS: dict[str, tuple[tuple[str, str], ...]] = {
    "model": (("", "master"),),
    "optimizer": (("exp_avg.", "exp_avg"), ("exp_avg_sq.", "exp_avg_sq")),
}


class CheckpointError(ConfigError):
    """A checkpoint that cannot be used or written; the message is one line that names it."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint whose bytes are not those that were written."""


@dataclass
class State:
    """What a run is besides its tensors.

    Attributes:
        order: all that the data order depends on: corpus fingerprint, seed, seq_len, global_batch, shuffle.
    """

    step: int
    tokens: int
    order: dict[str, Any]


def pieces(stages: Stages, mesh: Mesh, owned_only: bool) -> Iterator[tuple[Unit, str, int, slice]]:
    """(unit, tensor name, first element in the whole tensor, slice of the unit's shard buffers) of all this rank
    holds, or of what it alone writes: replicas share a shard's elements out between them, and of copies and holders
    the first writes."""
    for unit in stages.units.units.values():
        start, stop = unit.layout.bounds(stages.units.index)
        first, last = start, stop
        if owned_only:
            cut = even_cut(stop - start, mesh.size(*REPLICA_AXES), mesh.index(*REPLICA_AXES))
            first, last = start + cut[0], start + cut[1]
        for tensor, runs in unit.layout.runs(first, last):
            if owned_only and not tensor.owned:
                continue
            for run in runs:
                at = first - start + run.local_start
                yield unit, tensor.name, run.global_start, slice(at, at + run.length)


def plans_of(stages: Stages, cfg: Config) -> dict[str, list[PlannedFile]]:
    shapes = {name: stages.layouts[name].shape for name in stages.layouts.names()}
    dtype = DTYPES[cfg.precision.params]
    return {
        stem: plan_files(
            stem, {p + n: s for p, _ in parts for n, s in shapes.items()}, dtype, cfg.checkpoint.max_file_bytes
        )
        for stem, parts in PARTS.items()
    }


def names(plans: dict[str, list[PlannedFile]]) -> list[str]:
    """Every tensor of every file, in the order of the checksums."""
    return [name for files in plans.values() for f in files for name in f.offsets]


def together(mesh: Mesh, work: Callable[[], Any]) -> None:
    """Runs a part of the work; where it fails on a rank, every rank raises CheckpointError with its reason."""
    mine = None
    try:
        work()
    except OSError as error:
        mine = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''} (rank {mesh.rank})"
    except DamagedFile as error:
        mine = str(error)
    found = [mine]
    if mesh.world is not None:
        found = [None] * mesh.spec.world_size
        dist.all_gather_object(found, mine, group=mesh.world)
    failed = [f for f in found if f]
    if failed:
        raise CheckpointError(failed[0])


def read_into(
    stages: Stages, mesh: Mesh, reader: Reader, parts, sums: Tensor | None = None, rows: dict[str, int] | None = None
) -> None:
    for unit, tensor, start, span in pieces(stages, mesh, owned_only=False):
        for prefix, buffer in parts:
            name = prefix + tensor
            if name not in reader:
                raise DamagedFile(f"tensor {name} is missing from the {prefix or 'model'} files")
            if reader.shape(name) != stages.layouts[tensor].shape:
                raise DamagedFile(
                    f"tensor {name} has shape {reader.shape(name)} there and {stages.layouts[tensor].shape} here"
                )
            data = reader.read(name, start, span.stop - span.start)
            getattr(unit, buffer)[span].copy_(data)
            if sums is not None:
                sums[rows[name]] += checksum(data, start)


def digest(body: dict) -> str:
    return sha256(json.dumps(body, sort_keys=True).encode())


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
