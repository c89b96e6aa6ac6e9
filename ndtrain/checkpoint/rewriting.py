"""Writes a Hugging Face folder from checkpoints: the average of their weights, or their weights in another dtype.

Blocks of some megabytes are read, computed and written one after the other. A whole tensor is never in memory.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

import torch
from torch import Tensor

from ndtrain.checkpoint.companions import read_companions
from ndtrain.checkpoint.elements import AVERAGE, CheckpointError
from ndtrain.checkpoint.pieces import open_tensors
from ndtrain.checkpoint.pretrained import open_weights
from ndtrain.checkpoint.safetensors_io import DamagedFile, Described, PlannedFile, create, index_json, plan_files, write
from ndtrain.checkpoint.safetensors_reader import Reader
from ndtrain.checkpoint.verifying import blocks
from ndtrain.config import CheckpointConfig
from ndtrain.config.json_file import read_object
from ndtrain.data.hf_code import CODE_KEYS
from ndtrain.mesh.row_map import Rows
from ndtrain.model.transformer import is_selection_bias


@dataclass(frozen=True)
class _Source:
    """The tensors to read from one folder.

    Attributes:
        tensors: stem of the files to write -> names of their tensors -> the readers.
    """

    path: Path
    tensors: dict[str, dict[str, Reader]]


def average(
    sources: Sequence[Path],
    out: Path,
    weights: Sequence[float] | None = None,
    dtype: torch.dtype | None = None,
    ema: bool = False,
) -> int:
    """Write the Hugging Face folder `out` with the weighted average of the sources' weights, computed in fp64.

    The other files (config.json, the tokenizer) are copied from the first source. Selection biases of experts are
    averaged too, and keep their own dtype. If the family's model files have no place for them, they go into
    `optimizer.safetensors`, where `init_from` finds them.

    Args:
        sources: checkpoints or Hugging Face folders with the same tensors.
        weights: one for each source. They are divided by their sum. None: equal weights.
        dtype: of the written weights. None: the dtype in the first source.
        ema: whether to read the average of `optim.ema` instead of the weights. Selection biases have no such average.

    Returns:
        The bytes of all tensors.

    Raises:
        CheckpointError: `out` exists, a source cannot be read, lacks a tensor or has another shape, the weights are
            unusable, or the disk is full. Then `out` is not created.
    """
    shares = _shares(sources, weights)
    if out.exists():
        raise CheckpointError(f"out={out} already exists: name a new folder")
    temporary = out.with_name(f".writing-{out.name}")
    try:
        opened = [_open(path, ema) for path in sources]
        _check_same(opened)
        size = _write(opened, shares, temporary, dtype)
        _write_others(sources[0], temporary, dtype)
        os.rename(temporary, out)
    except DamagedFile as error:
        raise CheckpointError(str(error)) from error
    except OSError as error:
        raise CheckpointError(f"out={out} not written: {error.strerror or error}: {error.filename}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return size


def _shares(sources: Sequence[Path], weights: Sequence[float] | None) -> list[float]:
    weights = [1.0] * len(sources) if weights is None else list(weights)
    if len(weights) != len(sources):
        raise CheckpointError(
            f"weights: {len(weights)} weights for {len(sources)} checkpoints: give one weight per checkpoint"
        )
    if not sum(weights):
        raise CheckpointError(f"weights={','.join(f'{w:g}' for w in weights)}: their sum must not be 0")
    return [w / sum(weights) for w in weights]


def _open(path: Path, ema: bool) -> _Source:
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder")
    try:
        weights, beside = open_weights(path), open_tensors(path, "optimizer")
        biases = {name: beside for name in beside.names() if is_selection_bias(name)}
        model = {name: weights for name in weights.names() if not ema or is_selection_bias(name)}
        if ema:
            prefix = AVERAGE[0]
            averages = {name.removeprefix(prefix): name for name in beside.names() if name.startswith(prefix)}
            if not averages:
                raise CheckpointError(
                    f"ema=true: {path} contains no average of the weights: it was saved without optim.ema"
                )
            beside.name_also(averages)
            model |= dict.fromkeys(averages, beside)
        return _Source(path, {"model": model, "optimizer": biases})
    except DamagedFile as error:
        raise CheckpointError(f"{path}: {error}") from error


def _check_same(sources: Sequence[_Source]) -> None:
    """Check that all sources hold the same tensors in the same shapes."""
    first, of_first = sources[0], _all_tensors(sources[0])
    for source in sources[1:]:
        tensors = _all_tensors(source)
        for (one, its), (other, others) in permutations(((first, of_first), (source, tensors))):
            if lacking := sorted(its.keys() - others):
                folder = "a run adds biases for its experts, which its starting folder does not have"
                why = folder if is_selection_bias(lacking[0]) else "average checkpoints of one model"
                raise CheckpointError(f"{other.path} lacks the tensor {lacking[0]}, which {one.path} has: {why}")
        for name, reader in of_first.items():
            if tensors[name].shape(name) != reader.shape(name):
                raise CheckpointError(
                    f"{source.path}: tensor {name} has shape {tensors[name].shape(name)} and "
                    f"{reader.shape(name)} in {first.path}: average checkpoints of one model"
                )


def _all_tensors(source: _Source) -> dict[str, Reader]:
    return {name: reader for tensors in source.tensors.values() for name, reader in tensors.items()}


def _write(sources: Sequence[_Source], shares: Sequence[float], folder: Path, dtype: torch.dtype | None) -> int:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    size = 0
    for stem, tensors in sources[0].tensors.items():
        described = {name: (reader.shape(name), _dtype(reader, name, dtype)) for name, reader in tensors.items()}
        plans = plan_files(stem, described, CheckpointConfig.max_file_bytes) if tensors else []
        for plan in plans:
            create(folder / plan.name, plan)
            _write_file([source.tensors[stem] for source in sources], shares, folder / plan.name, plan, described)
        if len(plans) > 1:
            (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index_json(plans), indent=1) + "\n")
        size += sum(plan.size - len(plan.header) for plan in plans)
    return size


def _dtype(reader: Reader, name: str, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype to write. A bias keeps its own, since a narrow dtype would round away the steps it grows by."""
    return reader.dtype(name) if dtype is None or is_selection_bias(name) else dtype


def _write_file(
    sources: Sequence[Mapping[str, Reader]],
    shares: Sequence[float],
    path: Path,
    plan: PlannedFile,
    described: Described,
) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        for name, offset in plan.offsets.items():
            readers = [tensors[name] for tensors in sources]
            for parts in zip(*(_blocks_like(readers[0], reader, name) for reader in readers), strict=True):
                rows, own = parts[0]
                data = own if len(parts) == 1 else _weighted([x for _, x in parts], shares)
                write(fd, data.to(described[name][1]).contiguous(), offset, rows)
        os.fsync(fd)
    finally:
        os.close(fd)


def _blocks_like(first: Reader, reader: Reader, name: str) -> Iterator[tuple[Rows, Tensor]]:
    """Yield the blocks of a tensor, divided like the blocks of `first`, whose dtype may have another size."""
    if reader is first or reader.dtype(name).itemsize == first.dtype(name).itemsize:
        yield from blocks(reader, name)
        return
    for rows, _ in blocks(first, name):
        yield rows, reader.read(name, rows)


def _weighted(parts: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    total = parts[0].double() * shares[0]
    for part, share in zip(parts[1:], shares[1:], strict=True):
        total.add_(part.double(), alpha=share)
    return total


def _write_others(source: Path, folder: Path, dtype: torch.dtype | None) -> None:
    """Write config.json with the dtype of the weights, and copy the files that accompany the weights."""
    read_companions(source).write_files(folder)
    if (source / "config.json").is_file():
        config = {k: v for k, v in read_object(source / "config.json").items() if k not in CODE_KEYS}
        if dtype is not None:
            config |= dict.fromkeys(("dtype", "torch_dtype"), str(dtype).removeprefix("torch."))
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
