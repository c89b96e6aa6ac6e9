"""What a checkpoint consists of: its tensors' elements, which rank has which, and the words for what goes wrong."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ndtrain.checkpoint.checksum import checksum
from ndtrain.checkpoint.safetensors_io import DamagedFile, PlannedFile, Reader, Rows, plan_files
from ndtrain.config import Config, ConfigError
from ndtrain.distributed.mesh import Mesh
from ndtrain.distributed.sharding import REPLICA_AXES, TensorLayout, even_cut
from ndtrain.parallel.build import DTYPES, Stages, moments_dtype
from ndtrain.parallel.fsdp import Unit

FORMAT = 2
# what is saved: file stem -> (tensor-name prefix, which buffer of a unit), so that saving and loading are one loop each
Parts = dict[str, tuple[tuple[str, str], ...]]
PARTS: Parts = {
    "model": (("", "master"),),
    "optimizer": (("exp_avg.", "exp_avg"), ("exp_avg_sq.", "exp_avg_sq")),
}
AVERAGE = ("ema.", "ema")
MOMENTS = ("exp_avg", "exp_avg_sq")  # the buffers in `optim.state_dtype`
BLOCK = 2 << 20  # bytes worked on at one time: they stay in the cache from reading to checksum to writing
AHEAD = 16  # blocks that the disk is asked for before they are read


class CheckpointError(ConfigError):
    """A checkpoint that cannot be used or written; the message is one line that names it."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint whose bytes are not those that were written."""


@dataclass
class State:
    """What a run is besides its tensors.

    Attributes:
        step, tokens: done and seen so far.
        order: all that the data order depends on: corpus fingerprint, seed, seq_len, global_batch, shuffle.
        skipped: steps so far that changed nothing, because something in them was not finite.
        stream: where a data stream stands, as JSON; None: the data need no more than the step. Rank 0's is written.
    """

    step: int
    tokens: int
    order: dict[str, Any]
    skipped: int = 0
    stream: dict[str, Any] | None = None


def parts_of(average: bool) -> Parts:
    """What is saved; `average`: also that of the weights (`optim.ema`)."""
    return PARTS | {"optimizer": (*PARTS["optimizer"], AVERAGE)} if average else PARTS


# ------------------------------------------------------------------------------------------------------ who has what


class Piece(NamedTuple):
    """Elements of a tensor that this rank holds, one behind the other, in its shard of a unit."""

    unit: Unit
    tensor: str
    at: int  # in the unit's shard buffers
    rows: Rows  # of the whole tensor

    @property
    def span(self) -> slice:
        return slice(self.at, self.at + self.rows.numel)

    def cut(self, most: int) -> Iterator["Piece"]:
        """The same elements in the same order, at most `most` at a time."""
        at = self.at
        for rows in self.rows.cut(most):
            yield self._replace(at=at, rows=rows)
            at += rows.numel


def pieces(stages: Stages, mesh: Mesh, owned_only: bool) -> Iterator[Piece]:
    """All this rank holds, or what it alone writes: replicas share a shard's elements out between them, and of copies
    and holders the first writes."""
    for unit in stages.units.units.values():
        start, stop = unit.layout.bounds(stages.units.index)
        first, last = start, stop
        if owned_only:
            cut = even_cut(stop - start, mesh.size(*REPLICA_AXES), mesh.index(*REPLICA_AXES))
            first, last = start + cut[0], start + cut[1]
        for tensor, a, b in unit.layout.tensors_in(first, last):
            if owned_only and not tensor.owned:
                continue
            at, offset = a - start, unit.layout.offsets[tensor.name]
            for rows in rows_of(tensor, a - offset, b - offset):
                yield Piece(unit, tensor.name, at, rows)
                at += rows.numel


def rows_of(tensor: TensorLayout, start: int, stop: int) -> Iterator[Rows]:
    """Where the elements [start, stop) of a local tensor stand in the whole one, as `tensor.runs` has it run by run:
    the end of a piece between two cuts, whole pieces, the beginning of one."""
    inner = 0 if tensor.shard_dim is None else tensor.shard_dim
    length, stride = math.prod(tensor.local_shape[inner:]), math.prod(tensor.shape[inner:])
    (first, _, _), *_ = tensor.runs(0, 1)
    while start < stop:
        row, column = divmod(start, length)
        begin = first + row * stride + column
        if column == 0 and stop - start >= length:
            yield Rows(begin, length, (stop - start) // length, stride)
            start += (stop - start) // length * length
        else:
            n = min(length - column, stop - start)
            yield Rows(begin, n)
            start += n


def plans_of(stages: Stages, cfg: Config) -> dict[str, list[PlannedFile]]:
    """The files of a checkpoint by their stem; the same on every mesh."""
    shapes = {name: stages.layouts[name].shape for name in stages.layouts.names()}
    master, moments = DTYPES[cfg.precision.params], moments_dtype(cfg)
    found = {}
    for stem, parts in parts_of(cfg.optim.ema is not None).items():
        of_part = [(prefix, moments if buffer in MOMENTS else master) for prefix, buffer in parts]
        described = {prefix + name: (shape, dtype) for prefix, dtype in of_part for name, shape in shapes.items()}
        found[stem] = plan_files(stem, described, cfg.checkpoint.max_file_bytes)
    return found


def names(plans: dict[str, list[PlannedFile]]) -> list[str]:
    """Every tensor of every file, in the order of the checksums."""
    return [name for files in plans.values() for f in files for name in f.offsets]


# ----------------------------------------------------------------------------------------------------------- reading


def read_into(
    stages: Stages, mesh: Mesh, reader: Reader, parts, sums: Tensor | None = None, rows: dict[str, int] | None = None
) -> None:
    """Fills this rank's elements, converted to the precision they are held in.

    Args:
        parts: (tensor-name prefix, which buffer of a unit) to fill.
        sums, rows: where to add each tensor's checksum, int64 [n, 2], and in which row.

    Raises:
        DamagedFile: a tensor is missing or has another shape.
    """
    wanted = list(_wanted(stages, mesh, reader, parts))
    expected = 0
    for i, (name, target, there) in enumerate(wanted):
        while expected < min(i + AHEAD, len(wanted)):
            reader.expect(wanted[expected][0], wanted[expected][2])
            expected += 1
        data = reader.read(name, there)
        target.view(data.shape).copy_(data)
        if sums is not None:
            as_read = target.device.type == "cpu" and target.dtype == data.dtype
            sums[rows[name]] += checksum(target if as_read else data.contiguous().view(-1), there)
        reader.release(name, there)


def _wanted(stages: Stages, mesh: Mesh, reader: Reader, parts) -> Iterator[tuple[str, Tensor, Rows]]:
    """(name in the files, where it goes, which elements of it), a block at a time."""
    for prefix, buffer in parts:  # about the order of the files
        for piece in pieces(stages, mesh, owned_only=False):
            name, shape = prefix + piece.tensor, stages.layouts[piece.tensor].shape
            if name not in reader:
                raise DamagedFile(f"tensor {name} is missing from the {prefix or 'model'} files")
            if reader.shape(name) != shape:
                raise DamagedFile(f"tensor {name} has shape {reader.shape(name)} there and {shape} here")
            whole: Tensor = getattr(piece.unit, buffer)
            for block in piece.cut(BLOCK // whole.element_size()):
                yield name, whole[block.span], block.rows


# ------------------------------------------------------------------------------------------------------ all together


def together(mesh: Mesh, work: Callable[[], Any]) -> None:
    """Runs a part of the work; where it fails on a rank, every rank raises CheckpointError with that rank's reason.

    It talks through `mesh.background`, so a thread may call it; one at a time."""
    mine = None
    try:
        work()
    except OSError as error:
        mine = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''} (rank {mesh.rank})"
    except (DamagedFile, CheckpointError) as error:
        mine = str(error)
    if reason := _first(mesh, mine):
        raise CheckpointError(reason)


_LONGEST = 2000  # bytes of a reason


def _first(mesh: Mesh, mine: str | None) -> str | None:
    """The reason of the first rank that has one, on every rank."""
    if mesh.background is None:
        return mine
    ranks = mesh.spec.world_size
    who = torch.tensor(ranks if mine is None else mesh.rank)
    dist.all_reduce(who, op=dist.ReduceOp.MIN, group=mesh.background)
    if who == ranks:
        return None
    text = torch.zeros(_LONGEST, dtype=torch.uint8)
    if who == mesh.rank:
        said = mine.encode()[:_LONGEST]
        text[: len(said)] = torch.tensor(list(said), dtype=torch.uint8)
    dist.broadcast(text, src=int(who), group=mesh.background)
    return bytes(text.tolist()).rstrip(b"\0").decode(errors="ignore")


def digest(body: dict) -> str:
    return sha256(json.dumps(body, sort_keys=True).encode())


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
