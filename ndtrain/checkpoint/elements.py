"""The parts of a checkpoint: the elements of its tensors, the rank that holds each of them, and the errors."""

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ndtrain.checkpoint.checksum import checksum
from ndtrain.checkpoint.safetensors_io import DamagedFile, Described
from ndtrain.checkpoint.safetensors_reader import Reader
from ndtrain.config import ConfigError, ModelConfig
from ndtrain.mesh.mesh import Mesh
from ndtrain.mesh.row_map import Rows
from ndtrain.mesh.sharding import TensorLayout, Tensors, even_split
from ndtrain.model import params, tensor_shapes
from ndtrain.model.spec import Role
from ndtrain.model.transformer import bias_names, names_of
from ndtrain.optim import StateSpec
from ndtrain.parallel.stages import Stages
from ndtrain.parallel.unit import StatePlan, Unit

FORMAT = 2
AVERAGE = ("ema.", "ema")
OUTER = (("outer.", "outer"), ("outer_momentum.", "outer_momentum"))  # of islands.sync=diloco
BLOCK = 2 << 20  # bytes processed at a time: they stay in the cache from reading to checksum to writing
_BUFFER = 4 * BLOCK  # bytes: holds a block of 2-byte elements whose file has 8-byte elements
AHEAD = 16  # number of blocks that are requested from the disk before they are read


class CheckpointError(ConfigError):
    """A checkpoint that cannot be used or written. The message is one line that names it."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint whose bytes differ from the bytes that were written."""


def damaged(path: Path, why: object) -> DamagedCheckpoint:
    """Return the error for a damaged checkpoint.

    Args:
        why: which of its files is damaged, and how.
    """
    return DamagedCheckpoint(f"{path} is damaged: {why}".replace(f" {path}/", " "))


@dataclass
class State:
    """The state of a run besides its tensors.

    Attributes:
        step: number of steps done.
        tokens: number of tokens seen.
        order: everything that the data order depends on: corpus fingerprint, seed, seq_len, global_batch, shuffle.
        skipped: number of steps whose update was skipped, because the loss or a gradient was not finite.
        stream: the position in a streaming dataset, as JSON. None: the step is enough. Rank 0 writes its own position.
        reset_at: the number of updates before the optimizer's state last began from zero (`optim.reset`).
    """

    step: int
    tokens: int
    order: dict[str, Any]
    skipped: int = 0
    stream: dict[str, Any] | None = None
    reset_at: int = 0


class Part(NamedTuple):
    """One kind of tensor in a checkpoint. Each of some parameters has one tensor of this kind.

    Attributes:
        prefix: prefix of the tensors' names: `exp_avg.` in `exp_avg.<parameter>`.
        buffer: the name of the unit's buffer that holds it, as `Unit.buffer` takes it.
        dtype: its dtype in the files.
        spec: the spec of optimizer state that the owners of whole tensors hold, else None.
        tensors: the parameters that have one.
    """

    prefix: str
    buffer: str
    dtype: torch.dtype
    spec: StateSpec | None = None
    tensors: Tensors = Tensors.ALL

    def shape_of(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the tensor of a parameter."""
        return self.spec.shape_of(parameter) if self.spec else parameter

    def of(self, layouts: Iterable[TensorLayout]) -> Iterator[TensorLayout]:
        """Yield the layouts of the parameters that have such a tensor."""
        return (t for t in layouts if self.tensors.has(t.hidden))


Parts = dict[str, tuple[Part, ...]]  # file stem -> what the files hold


def parts_of(plan: StatePlan) -> Parts:
    """Return the kinds of tensors that are saved, as the plan and the optimizer declare them."""
    whole = lambda s: None if s.shape is None else s
    state = [Part(f"{s.name}.", s.name, s.dtype or plan.master, whole(s), s.tensors) for s in plan.spec]
    state += [Part(*copy, plan.master) for copy in (*[AVERAGE] * plan.ema, *OUTER * plan.outer)]
    return {"model": (model_part(plan),), "optimizer": tuple(state)}


def model_part(plan: StatePlan) -> Part:
    """Return the part for the weights, in master precision."""
    return Part("", "master", plan.master)


def checkpoint_bytes(m: ModelConfig, plan: StatePlan) -> int:
    """Return the bytes of one checkpoint: weights, copies of them and the optimizer's state."""
    shapes, hidden = tensor_shapes(m), names_of(params(m), Role.HIDDEN)
    parts = [part for of_stem in parts_of(plan).values() for part in of_stem]
    numel = lambda part: sum(math.prod(part.shape_of(s)) for n, s in shapes.items() if part.tensors.has(n in hidden))
    biases = len(bias_names(m)) * (m.num_experts or 0) * BIAS.itemsize
    return sum(numel(part) * part.dtype.itemsize for part in parts) + biases


BIAS = torch.float32  # dtype of selection biases


def biases_of(stages: Stages, stem: str) -> dict[str, Tensor]:
    """Return the selection biases [X] that files of this stem hold, by name. Training changes them in place.

    Every rank has all of them. Rank 0 writes them."""
    of_stem = bias_names(stages.model).items()
    return {name: b for (name, its), b in zip(of_stem, stages.balance.bias_LX, strict=True) if its == stem}


# ------------------------------------------------------------------------------------------------------ placement


class ShardSlice(NamedTuple):
    """Elements of a tensor that this rank holds, contiguous in memory.

    Attributes:
        data: [rows.numel]. Training changes it in place.
        rows: their positions in the whole tensor.
    """

    tensor: str
    data: Tensor
    rows: Rows

    def chunks(self, most: int) -> Iterator["ShardSlice"]:
        """Split the elements into slices of at most `most`, in the same order."""
        at = 0
        for rows in self.rows.chunks(most):
            yield ShardSlice(self.tensor, self.data[at : at + rows.numel], rows)
            at += rows.numel


def slices_of(stages: Stages, part: Part, owned_only: bool) -> Iterator[ShardSlice]:
    """Yield the elements of a part that this rank holds, or with `owned_only` the elements that it writes."""
    if part.spec is None:
        for unit, tensor, at, rows in shard_rows(stages, owned_only):
            if part.tensors.has(stages.layouts[tensor].hidden):
                yield ShardSlice(tensor, unit.part(part.buffer, at, rows.numel), rows)
        return
    for t in stages.units.owners.owned if stages.units.owners is not None else ():
        state = t.state.get(part.buffer)
        if state is not None and state.numel() and (stages.layouts[t.name].pp_replica == 0 or not owned_only):
            yield ShardSlice(t.name, state.view(-1), Rows(0, state.numel()))


def shard_rows(stages: Stages, owned_only: bool) -> Iterator[tuple[Unit, str, int, Rows]]:
    """Yield (unit, tensor, offset in the unit's shard, positions in the whole tensor) of the elements on this rank.

    With `owned_only`, yield only the elements that this rank writes. Ranks with the same shard divide its elements
    among them. Of tp replicas the first one writes. Of stages that hold the same tensor, the first one writes.
    """
    for unit in stages.units.units.values():
        start, stop = unit.layout.own
        groups = unit.layout.groups
        first, last = start, stop
        if owned_only:
            own = even_split(stop - start, groups.replicas, groups.replica)
            first, last = start + own[0], start + own[1]
        for tensor, held in unit.layout.held(first, last):
            if tensor.owned or not owned_only:
                yield unit, tensor.name, held.at + first - start, held.rows


def described_of(stages: Stages) -> dict[str, Described]:
    """Return the tensors of a checkpoint, by stem of their files: name -> shape, dtype. They are the same on every
    mesh."""
    layouts = [stages.layouts[name] for name in stages.layouts.names()]
    described: dict[str, Described] = {}
    for stem, parts in parts_of(stages.units.plan).items():
        of_stem = {p.prefix + t.name: (p.shape_of(t.shape), p.dtype) for p in parts for t in p.of(layouts)}
        of_stem |= {name: (tuple(b.shape), BIAS) for name, b in biases_of(stages, stem).items()}
        if of_stem:
            described[stem] = of_stem
    return described


# ----------------------------------------------------------------------------------------------------------- reading


def read_into(
    stages: Stages,
    reader: Reader,
    parts: Sequence[Part],
    sums: Tensor | None = None,
    rows: dict[str, int] | None = None,
    left: Collection[str] = (),
    finite: bool = False,
) -> None:
    """Read this rank's elements of some parts, and convert them to the precision of the run.

    Args:
        sums: each tensor's checksum is added to it, int64 [n, 2].
        rows: tensor -> its row in `sums`.
        left: tensors that are not read.
        finite: whether to refuse infinite elements and NaN.

    Raises:
        DamagedFile: a file cannot be read, or a tensor is missing, has another shape or no row, or is not finite.
    """
    wanted = list(_wanted(stages, reader, parts, left))
    buffer = torch.empty(_BUFFER, dtype=torch.uint8)
    expected = 0
    for i, (name, target, there) in enumerate(wanted):
        while expected < min(i + AHEAD, len(wanted)):
            reader.expect(wanted[expected][0], wanted[expected][2])
            expected += 1
        data = _read_block(reader, name, there, target, buffer)
        if sums is not None:
            sums[_row(rows, name)] += checksum(data, there)
        if finite and not _is_finite(data):
            raise DamagedFile(f"tensor {name} has elements that are not finite numbers ({reader.file(name)})")


def _read_block(reader: Reader, name: str, there: Rows, target: Tensor, buffer: Tensor) -> Tensor:
    """Read elements into `target`, and return them as they are in the file, on the CPU.

    They are read straight into the memory of `target`, or through `buffer` if it is on a GPU or has another dtype."""
    dtype = reader.dtype(name)
    if target.device.type == "cpu" and target.dtype == dtype:
        return reader.read(name, there, target)
    data = reader.read(name, there, buffer[: there.numel * dtype.itemsize].view(dtype))
    target.copy_(data)
    return data


def _row(rows: dict[str, int] | None, name: str) -> int:
    if rows is None or name not in rows:
        raise DamagedFile(f"state.json has no checksum of tensor {name}")
    return rows[name]


def _is_finite(data: Tensor) -> bool:
    """Return True if all elements are finite. Their sum decides it quickly, unless the sum overflows."""
    wide = torch.float64 if data.dtype == torch.float64 else torch.float32
    return bool(data.sum(dtype=wide).isfinite()) or bool(data.isfinite().all())


def read_biases(
    stages: Stages, reader: Reader, stem: str, sums: Tensor | None = None, rows: dict[str, int] | None = None
) -> None:
    """Read the selection biases that files of this stem hold. Old checkpoints have none: the biases are then zeros.

    The arguments are as in `read_into`."""
    for name, bias_X in biases_of(stages, stem).items():
        if name not in reader:
            bias_X.zero_()
            continue
        if reader.shape(name) != bias_X.shape:
            raise DamagedFile(
                f"tensor {name} has shape {reader.shape(name)} in the file and {tuple(bias_X.shape)} in this run"
            )
        whole = Rows(0, bias_X.numel())
        data = reader.read(name, whole)
        bias_X.copy_(data)
        if sums is not None:
            sums[_row(rows, name)] += checksum(data, whole)


def _wanted(
    stages: Stages, reader: Reader, parts: Sequence[Part], left: Collection[str]
) -> Iterator[tuple[str, Tensor, Rows]]:
    """Yield (name in the files, target, elements to read), one block at a time."""
    for part in parts:  # roughly the order of the files
        for held in slices_of(stages, part, owned_only=False):
            if held.tensor in left:
                continue
            name, expected = part.prefix + held.tensor, part.shape_of(stages.layouts[held.tensor].shape)
            if name not in reader:
                raise DamagedFile(f"tensor {name} is missing from the {part.prefix or 'model'} files")
            if reader.shape(name) != expected:
                raise DamagedFile(
                    f"tensor {name} has shape {reader.shape(name)} in the file and {expected} in this run"
                )
            for block in held.chunks(BLOCK // held.data.element_size()):
                yield name, block.data, block.rows


# ------------------------------------------------------------------------------------------------------ on all ranks


def together(mesh: Mesh, work: Callable[[], Any]) -> None:
    """Run work on every rank. If it fails on one rank, all ranks raise CheckpointError with that rank's reason.

    The ranks communicate through `mesh.background`. A thread may therefore call this, but only one at a time."""
    mine = None
    try:
        work()
    except OSError as error:
        mine = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''} (rank {mesh.rank})"
    except (DamagedFile, ConfigError) as error:
        mine = str(error)
    if reason := _first(mesh, mine):
        raise CheckpointError(reason)


_LONGEST = 2000  # bytes of the longest reason


def _first(mesh: Mesh, mine: str | None) -> str | None:
    """Return the reason of the first rank that has one. All ranks get the same result."""
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
    dist.all_reduce(text, op=dist.ReduceOp.MAX, group=mesh.background)  # no broadcast: see `Mesh.background`
    return bytes(text.tolist()).rstrip(b"\0").decode(errors="ignore")


def digest(body: dict) -> str:
    return sha256(json.dumps(body, sort_keys=True).encode())


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
