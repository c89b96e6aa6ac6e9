"""Compares two checkpoints, or two Hugging Face folders: tensors and configuration."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ndtrain.checkpoint.directory import read_state
from ndtrain.checkpoint.pieces import open_tensors
from ndtrain.checkpoint.pretrained import open_weights
from ndtrain.checkpoint.safetensors_io import bytes_of
from ndtrain.checkpoint.safetensors_reader import Reader
from ndtrain.checkpoint.verifying import blocks, short
from ndtrain.config.json_file import read_object


@dataclass(frozen=True)
class Distance:
    """The distance between two tensors of the same shape.

    Attributes:
        largest: the largest absolute difference of two elements. NaN if one of the elements is NaN.
        relative: the norm of the difference divided by the norm of the first tensor.
        elements: number of elements that differ. all: number of all elements.
    """

    name: str
    largest: float
    relative: float
    elements: int
    all: int


@dataclass
class Difference:
    """The differences between A and B.

    Attributes:
        tensors: the tensors with different values, in the order of A.
        same: number of tensors that are equal.
        shapes, dtypes: name -> (in A, in B). Tensors of different dtypes are compared as well.
        only_a, only_b: names of tensors that only one of them holds.
        config: dotted key -> (in A, in B).
    """

    tensors: list[Distance] = field(default_factory=list)
    same: int = 0
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    dtypes: dict[str, tuple[str, str]] = field(default_factory=dict)
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    config: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any((self.tensors, self.shapes, self.dtypes, self.only_a, self.only_b, self.config))


def diff(a: Path, b: Path) -> Difference:
    """Compare two folders, block by block.

    Raises:
        DamagedFile: a file is missing, or is not a valid safetensors file.
        DamagedCheckpoint: a state.json was changed after it was written.
    """
    result = Difference(config=_config_difference(_config_of(a), _config_of(b)))
    for readers in _readers(a, b):
        _compare(result, *readers)
    return result


def _readers(a: Path, b: Path) -> Iterator[tuple[Reader, Reader]]:
    """Yield readers of the weights. If both folders have optimizer state, yield its readers next."""
    yield open_weights(a), open_weights(b)
    of_a, of_b = (open_tensors(path, "optimizer") for path in (a, b))
    if of_a.names() and of_b.names():
        yield of_a, of_b


def _compare(result: Difference, a: Reader, b: Reader) -> None:
    result.only_a += [name for name in a.names() if name not in b]
    result.only_b += [name for name in b.names() if name not in a]
    for name in a.names():
        if name not in b:
            continue
        if a.shape(name) != b.shape(name):
            result.shapes[name] = a.shape(name), b.shape(name)
            continue
        if a.dtype(name) != b.dtype(name):
            result.dtypes[name] = short(a.dtype(name)), short(b.dtype(name))
        distance = _distance(name, a, b)
        if distance.elements:
            result.tensors.append(distance)
        else:
            result.same += 1


def _distance(name: str, a: Reader, b: Reader) -> Distance:
    """Compute the distance of two tensors, block by block. The wider dtype determines the size of a block."""
    largest, squares, norm, elements = 0.0, 0.0, 0.0, 0
    wide, narrow = (a, b) if a.dtype(name).itemsize >= b.dtype(name).itemsize else (b, a)
    for rows, block in blocks(wide, name):
        other = narrow.read(name, rows)
        x, y = (block, other) if wide is a else (other, block)
        if x.dtype == y.dtype and (bytes_of(x) == bytes_of(y)).all():
            norm += x.double().square().sum().item()
        else:
            x, y = x.double(), y.double()
            gap = (x - y).abs()
            gap[(x == y) | (x.isnan() & y.isnan())] = 0  # equal infinities too
            norm += x.square().sum().item()
            squares += gap.square().sum().item()
            elements += int((gap != 0).sum())
            largest = _larger(largest, gap.max().item())
    relative = math.sqrt(squares / norm) if norm else math.inf if squares else 0.0
    return Distance(name, largest, relative, elements, torch.Size(a.shape(name)).numel())


def _larger(a: float, b: float) -> float:
    """Return the larger number, or NaN if one is NaN."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


# ------------------------------------------------------------------------------------------------------ configuration


def _config_of(path: Path) -> dict[str, Any]:
    """Return the configuration of the run that saved a checkpoint, with step and tokens, or else config.json."""
    if (path / "state.json").is_file():
        state = read_state(path)
        return _flat(state["config"]) | {key: state[key] for key in ("step", "tokens")}
    return _flat(read_object(path / "config.json")) if (path / "config.json").is_file() else {}


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {prefix + key: value}
    return flat


_ABSENT = "(not there)"


def _config_difference(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    keys = [*a, *(k for k in b if k not in a)]
    return {k: (a.get(k, _ABSENT), b.get(k, _ABSENT)) for k in keys if a.get(k, _ABSENT) != b.get(k, _ABSENT)}
