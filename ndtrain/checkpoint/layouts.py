"""The layouts of a checkpoint's files: which file holds the elements that a rank writes, and where.

- `shared`: whole tensors, as Hugging Face's tools read them. Many ranks write into one file, each at the positions of
  its elements.
- `host`: one file per host. Each rank writes one contiguous part of it.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ndtrain.checkpoint.elements import biases_of, described_of, parts_of, slices_of
from ndtrain.checkpoint.pieces import COLUMNS, host_file, write_index
from ndtrain.checkpoint.safetensors_io import (
    DTYPE_NAMES,
    Described,
    PlannedFile,
    index_json,
    plan_file,
    plan_files,
)
from ndtrain.config import CheckpointConfig, first_rank_of_host
from ndtrain.mesh.gloo import gather_rows
from ndtrain.mesh.mesh import Mesh
from ndtrain.mesh.row_map import Rows
from ndtrain.parallel.stages import Stages


class Place(NamedTuple):
    """The place of the elements of a tensor that a rank writes.

    Attributes:
        name: the tensor.
        file: the name of the file.
        offset: the byte in the file at which the tensor begins; if packed, at which these elements begin.
        rows: their positions in the whole tensor.
        packed: True: the elements follow one another in the file. False: they are at their positions in the tensor.
    """

    name: str
    file: str
    offset: int
    rows: Rows
    packed: bool

    def blocks(self, most: int) -> Iterator[tuple[Rows, Rows]]:
        """Yield the elements, at most `most` at a time: their positions in the tensor, and those counted from `offset`
        in the file."""
        at = 0
        for rows in self.rows.chunks(most):
            yield rows, Rows(at, rows.numel) if self.packed else rows
            at += rows.numel


class Owned(NamedTuple):
    """Elements of a tensor that this rank writes.

    Attributes:
        stem: stem of the files that hold the tensor.
        values: 1-D. Training changes them in place.
    """

    stem: str
    name: str
    rows: Rows
    values: Tensor


@dataclass(frozen=True)
class Files:
    """The files of a checkpoint, as one rank sees them.

    Attributes:
        layout: as in `CheckpointConfig`.
        described: the tensors of each stem of files.
        all: on rank 0: the files with tensors, of all ranks.
        own: those that this rank creates.
        owned: the elements that this rank writes.
        places: their places.
        size: bytes of the tensors, over all ranks.
        pieces: in the layout `host`, on rank 0: tensor -> its pieces (`pieces.write_index`).
    """

    layout: str
    described: dict[str, Described]
    all: list[PlannedFile]
    own: list[PlannedFile]
    owned: list[Owned]
    places: list[Place]
    size: int
    pieces: dict[str, np.ndarray]

    @property
    def names(self) -> list[str]:
        """The names of all tensors, in the order of their checksums."""
        return [name for tensors in self.described.values() for name in tensors]

    def write_index(self, folder: Path) -> None:
        """Write the index of each stem. Called on rank 0."""
        for stem, described in self.described.items():
            if self.layout == "host":
                write_index(folder, stem, described, {name: self.pieces[name] for name in described})
                continue
            files = [file for file in self.all if described.keys() & file.offsets.keys()]
            if len(files) > 1:
                write_json(folder / f"{stem}.safetensors.index.json", index_json(files))


def files_of(stages: Stages, mesh: Mesh, options: CheckpointConfig, each_rank_alone: bool = False) -> Files:
    """Return the files of this run's checkpoints. Call it on every rank.

    Args:
        each_rank_alone: in the layout `host`, whether each rank has files of its own.
    """
    described, owned = described_of(stages), list(owned_of(stages, writes_biases=mesh.rank == 0))
    if options.layout == "host":
        return _per_host(described, owned, mesh, mesh.rank if each_rank_alone else first_rank_of_host())
    plans = {stem: plan_files(stem, tensors, options.max_file_bytes) for stem, tensors in described.items()}
    files = [file for planned in plans.values() for file in planned]
    where = {name: file for file in files for name in file.offsets}
    places = [Place(o.name, where[o.name].name, where[o.name].offsets[o.name], o.rows, False) for o in owned]
    ordered = {s: {n: described[s][n] for f in planned for n in f.offsets} for s, planned in plans.items()}
    mine = files if mesh.rank == 0 else []
    return Files("shared", ordered, mine, mine, owned, places, sum(file.size for file in files), {})


def owned_of(stages: Stages, writes_biases: bool) -> Iterator[Owned]:
    """Yield the elements that this rank writes, in roughly the order of the files."""
    for stem, parts in parts_of(stages.units.plan).items():
        for part in parts:
            for held in slices_of(stages, part, owned_only=True):
                yield Owned(stem, part.prefix + held.tensor, held.rows, held.data)
        for name, bias_X in biases_of(stages, stem).items() if writes_biases else ():
            yield Owned(stem, name, Rows(0, bias_X.numel()), bias_X)


# -------------------------------------------------------------------------------------------------- one file per host


class _Kind(NamedTuple):
    """The elements that go into one tensor of a host's file."""

    stem: str
    dtype: torch.dtype


def _per_host(described: dict[str, Described], owned: Sequence[Owned], mesh: Mesh, first: int) -> Files:
    """Return the files of hosts.

    Args:
        first: the first rank of this rank's host, whose ranks are numbered consecutively.
    """
    kinds = sorted({_Kind(stem, dtype) for stem, of in described.items() for _, dtype in of.values()}, key=str)
    kind_of = {name: _Kind(stem, dtype) for stem, of in described.items() for name, (_, dtype) in of.items()}
    # in the order of the files, so that each of them is written from its beginning to its end
    owned = sorted(owned, key=lambda o: (o.stem, -kind_of[o.name].dtype.itemsize, str(kind_of[o.name])))
    own = dict.fromkeys(kinds, 0)
    for o in owned:
        own[kind_of[o.name]] += o.rows.numel
    table_RK = _of_all_ranks([first, *own.values()], mesh)
    hosts, host_R = np.unique(table_RK[:, 0], return_inverse=True)
    host = int(host_R[mesh.rank])
    numel_HK = np.zeros((len(hosts), len(kinds)), np.int64)
    np.add.at(numel_HK, host_R, table_RK[:, 1:])
    before_K = table_RK[first : mesh.rank, 1:].sum(axis=0)

    files = _planned(kinds, host, numel_HK[host])
    at = dict(zip(kinds, before_K.tolist(), strict=True))
    index = {name: i for i, name in enumerate(kind_of)}
    places, pieces = [], []
    for o in owned:
        kind = kind_of[o.name]
        file = files[kind.stem]
        offset = file.offsets[DTYPE_NAMES[kind.dtype]] + at[kind] * kind.dtype.itemsize
        places.append(Place(o.name, file.name, offset, o.rows, True))
        pieces.append([index[o.name], host, at[kind], *o.rows])
        at[kind] += o.rows.numel
    mine = torch.tensor(pieces, dtype=torch.int64).view(-1, 1 + len(COLUMNS))
    found = mine if mesh.background is None else gather_rows(mine, mesh.background)
    planned = (_planned(kinds, h, of_host) for h, of_host in enumerate(numel_HK if mesh.rank == 0 else ()))
    return Files(
        "host",
        described,
        all=[file for of_host in planned for file in of_host.values()],
        own=list(files.values()) if mesh.rank == first else [],
        owned=owned,
        places=places,
        size=int(numel_HK.sum(axis=0) @ np.array([kind.dtype.itemsize for kind in kinds])),
        pieces={} if found is None else _by_tensor(found.numpy(), index),
    )


def _planned(kinds: Sequence[_Kind], host: int, numel_K: np.ndarray) -> dict[str, PlannedFile]:
    """Return a host's files, by stem. There is none for a stem of which the host writes nothing."""
    tensors: dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {}
    for kind, numel in sorted(zip(kinds, numel_K.tolist(), strict=True), key=lambda k: -k[0].dtype.itemsize):
        if numel:
            tensors.setdefault(kind.stem, {})[DTYPE_NAMES[kind.dtype]] = ((numel,), kind.dtype)
    return {stem: plan_file(host_file(stem, host), of_stem) for stem, of_stem in tensors.items()}


def _by_tensor(found: np.ndarray, index: dict[str, int]) -> dict[str, np.ndarray]:
    """Return the pieces of each tensor, by their first position in it."""
    found = found[np.lexsort((found[:, 1 + COLUMNS.index("start")], found[:, 0]))]
    ends = np.searchsorted(found[:, 0], np.arange(len(index)), side="right")
    return dict(zip(index, np.split(found[:, 1:], ends[:-1]), strict=True))


def _of_all_ranks(mine_K: Sequence[int], mesh: Mesh) -> np.ndarray:
    """Return the numbers of all ranks [ranks, k], on every rank."""
    table_RK = torch.zeros(mesh.spec.world_size, len(mine_K), dtype=torch.int64)
    table_RK[mesh.rank] = torch.tensor(mine_K)
    if mesh.background is not None:
        dist.all_reduce(table_RK, group=mesh.background)
    return table_RK.numpy()


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
