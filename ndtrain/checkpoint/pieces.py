"""The tensors of a checkpoint in the layout `host`: pieces in one file per host, and an index that finds them.

A file `model-host-00003.safetensors` has a one-dimensional tensor per dtype, with everything that the ranks of that
host write, one rank after the other. The index `model.pieces.safetensors` lists the pieces of each tensor of the model.
The metadata of its header have the dtype and the shape.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ndtrain.checkpoint.safetensors_io import (
    DTYPE_NAMES,
    WEIGHT_DTYPES,
    DamagedFile,
    Described,
    PlannedFile,
    create,
    plan_file,
    write_all,
)
from ndtrain.checkpoint.safetensors_reader import Reader, Stored, tensors_of
from ndtrain.mesh.row_map import Held, Rows
from ndtrain.mesh.transfer import Copy, copies_between, strided_view

STEMS = ("model", "optimizer")
COLUMNS = ("file", "at", *Rows._fields)  # of an index: file number, position in that file, positions in the tensor
_INDEX = torch.int64
_KEPT = 64  # tensors whose pieces a reader keeps
_MOST = 2**60  # limit for positions and sizes, so that the sum of three fits into 64 bits


def host_file(stem: str, number: int) -> str:
    """Return the name of a host's file."""
    return f"{stem}-host-{number:05d}.safetensors"


def index_file(stem: str) -> str:
    """Return the name of the index of a stem."""
    return f"{stem}.pieces.safetensors"


def open_tensors(folder: Path, stem: str) -> Reader:
    """Return a reader of the tensors of the files `stem*.safetensors` of a folder, in any layout.

    Raises:
        DamagedFile: as `Reader`.
    """
    return PiecesReader(folder, stem) if is_in_pieces(folder, stem) else Reader.of_stem(folder, stem)


def is_in_pieces(folder: Path, stem: str) -> bool:
    """Return True if the tensors of these files are in the layout `host`."""
    return (folder / index_file(stem)).exists()


# ----------------------------------------------------------------------------------------------------------- writing


def plan_index(stem: str, described: Described, counts: Mapping[str, int]) -> PlannedFile:
    """Plan an index.

    Args:
        described: the tensors of the model.
        counts: tensor -> number of its pieces.
    """
    notes = {name: " ".join([DTYPE_NAMES[dtype], *map(str, shape)]) for name, (shape, dtype) in described.items()}
    tables = {name: ((counts[name], len(COLUMNS)), _INDEX) for name in described}
    return plan_file(index_file(stem), tables, notes)


def write_index(folder: Path, stem: str, described: Described, pieces: Mapping[str, np.ndarray]) -> None:
    """Write an index.

    Args:
        described: the tensors of the model.
        pieces: tensor -> its pieces, int64 [n, 6], whose columns are `COLUMNS`.
    """
    plan = plan_index(stem, described, {name: len(table) for name, table in pieces.items()})
    create(folder / plan.name, plan)
    with open(folder / plan.name, "r+b") as file:
        for name, offset in plan.offsets.items():
            write_all(file.fileno(), [memoryview(np.ascontiguousarray(pieces[name], "<i8")).cast("B")], offset)


# ----------------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the model.

    Attributes:
        table: its pieces, stored in the index.
    """

    dtype: str
    shape: tuple[int, ...]
    table: Stored

    @property
    def numel(self) -> int:
        return int(np.prod(self.shape, dtype=object))


class _FromFile(NamedTuple):
    """A copy from a host's file into the memory of the elements that are read."""

    source: Stored
    copy: Copy


class PiecesReader(Reader):
    """Reads elements of tensors whose pieces are in the files of several hosts. It opens only those that it needs.

    Raises:
        DamagedFile: the index cannot be read or contradicts itself. Methods raise it too, if a host's file cannot be
            read, or if the index does not fit it.
    """

    def __init__(self, folder: Path, stem: str):
        super().__init__(())
        self._folder, self._stem, self.index = folder, stem, folder / index_file(stem)
        stored, notes = tensors_of(self.index)
        self._pieced = {name: self._described(name, table, notes.get(name, "")) for name, table in stored.items()}
        self._headers: dict[int, dict[str, Stored]] = {}
        self._tables: dict[str, np.ndarray] = {}
        self._expected: dict[tuple[str, Rows], list[_FromFile]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._pieced

    def name_also(self, names: Mapping[str, str]) -> None:
        self._pieced |= {also: self._pieced[name] for also, name in names.items() if name in self}

    def names(self) -> list[str]:
        return list(self._pieced)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._pieced[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return WEIGHT_DTYPES[self._pieced[name].dtype]

    def file(self, name: str) -> Path:
        return self.index

    def expect(self, name: str, rows: Rows) -> None:
        if (name, rows) not in self._expected:
            self._expected[name, rows] = copies = self._copies(name, rows)
            for source, copy in copies:
                self._elements.expect(source, _in_source(copy))

    def read(self, name: str, rows: Rows, out: Tensor | None = None) -> Tensor:
        copies = self._expected.pop((name, rows), None)
        copies = self._copies(name, rows) if copies is None else copies
        out = torch.empty(rows.numel, dtype=self.dtype(name)) if out is None else out
        for source, copy in copies:
            if copy.number == 1 or copy.target_stride == copy.length:
                target = out[copy.target : copy.target + copy.numel]
                self._elements.read(source, out.dtype, _in_source(copy), target)
            else:
                read = self._elements.read(source, out.dtype, _in_source(copy))
                strided_view(out, copy.target, copy.target_stride, copy).copy_(read.view(copy.number, copy.length))
        return out

    def _described(self, name: str, table: Stored, note: str) -> _Tensor:
        """Return a tensor with the dtype and the shape in its note, which is an entry of the index's metadata."""
        dtype, *sizes = note.split(" ")
        if dtype not in WEIGHT_DTYPES or not all(size.isdecimal() and len(size) < 19 for size in sizes):
            raise self._damaged(f"it does not describe tensor {name}")
        if table.dtype != DTYPE_NAMES[_INDEX] or table.shape[1:] != (len(COLUMNS),):
            raise self._damaged(f"the pieces of tensor {name} are not a table of {len(COLUMNS)} columns")
        return _Tensor(dtype, tuple(map(int, sizes)), table)

    def _damaged(self, why: str) -> DamagedFile:
        return DamagedFile(f"{self.index} is damaged: {why}")

    def _copies(self, name: str, rows: Rows) -> list[_FromFile]:
        """Return the copies that read these elements."""
        target, copies = [Held(0, rows)], []
        for number, held in _by_file(self._table(name), rows.start, rows.start + rows.span):
            source = self._source(name, number)
            try:
                found = copies_between(held, target)
            except ValueError as error:
                raise self._damaged(f"tensor {name}: {error}") from error
            if any(h.at + h.rows.numel > source.shape[0] for h in held):
                raise self._damaged(f"a piece of tensor {name} is outside {source.path.name}")
            copies += [_FromFile(source, copy) for copy in found]
        if (held_elements := sum(c.copy.numel for c in copies)) != rows.numel:
            raise self._damaged(f"it has pieces for {held_elements} of {rows.numel} elements of tensor {name}")
        return copies

    def _table(self, name: str) -> np.ndarray:
        """Return the pieces of a tensor [n, 6], by file."""
        if name not in self._tables:
            while len(self._tables) >= _KEPT:
                del self._tables[next(iter(self._tables))]
            self._tables[name] = self._read_table(name)
        return self._tables[name]

    def _read_table(self, name: str) -> np.ndarray:
        tensor = self._pieced[name]
        numel = tensor.table.shape[0] * len(COLUMNS)
        table = self._elements.read(tensor.table, _INDEX, Rows(0, numel)).view(-1, len(COLUMNS)).numpy()
        _, _, start, length, number, stride = table.T
        pieces = length * number
        wide = table.astype(np.float64).T  # products that do not fit into 64 bits do not overflow here
        largest = max(np.sum(wide[3] * wide[4]), np.max((wide[4] - 1) * wide[5], initial=0))
        if (table < 0).any() or (table > _MOST).any() or largest > _MOST or not pieces.all():
            raise self._damaged(f"the pieces of tensor {name} have impossible sizes")
        if ((number > 1) & (stride < length)).any() or (start + (number - 1) * stride + length > tensor.numel).any():
            raise self._damaged(f"a piece of tensor {name} is outside its shape {tensor.shape}")
        if pieces.sum() != tensor.numel:
            raise self._damaged(f"the pieces of tensor {name} do not add up to its shape {tensor.shape}")
        return table[np.argsort(table[:, 0], kind="stable")]

    def _source(self, name: str, number: int) -> Stored:
        """Return the tensor of a host's file that holds pieces of a tensor of the model."""
        if number not in self._headers:
            self._headers[number] = tensors_of(self._folder / host_file(self._stem, number))[0]
        dtype = self._pieced[name].dtype
        if dtype not in self._headers[number]:
            raise self._damaged(f"{host_file(self._stem, number)} has no tensor {dtype}, which holds {name}")
        return self._headers[number][dtype]


def _in_source(copy: Copy) -> Rows:
    return Rows(copy.source, copy.length, copy.number, copy.source_stride)


def _by_file(table: np.ndarray, begin: int, end: int) -> Iterator[tuple[int, list[Held]]]:
    """Yield for each file its pieces with elements in [begin, end). Rows of a piece that have none are left out.

    Args:
        table: the pieces of a tensor by file, int64 [n, 6].
    """
    _, _, start, length, number, stride = table.T
    near = table[(start < end) & (start + (number - 1) * stride + length > begin)]
    for file, pieces in groupby(near.tolist(), key=itemgetter(0)):
        held = [_rows_between(Held(at, Rows(*rows)), begin, end) for _, at, *rows in pieces]
        if held := [h for h in held if h.rows.number]:
            yield file, held


def _rows_between(held: Held, begin: int, end: int) -> Held:
    """Return the rows of a piece that have elements in [begin, end). There may be none."""
    at, rows = held
    step = max(rows.stride, 1)
    first = min(max((begin - rows.start - rows.length) // step + 1, 0), rows.number)
    last = min(max(-((rows.start - end) // step), first), rows.number)
    return Held(at + first * rows.length, rows._replace(start=rows.start + first * rows.stride, number=last - first))
