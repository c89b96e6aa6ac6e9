"""Inspects checkpoints on disk: their contents, and whether every byte is as it was written."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ndtrain.checkpoint.checksum import as_words, checksum
from ndtrain.checkpoint.directory import file_problems, list_checkpoints, read_state
from ndtrain.checkpoint.elements import AHEAD, BLOCK, CheckpointError, DamagedCheckpoint
from ndtrain.checkpoint.pieces import STEMS, index_file, is_in_pieces, open_tensors
from ndtrain.checkpoint.safetensors_io import DamagedFile
from ndtrain.checkpoint.safetensors_reader import Reader
from ndtrain.mesh.row_map import Rows

_ASIDE = {".writing-step-*": "half written", ".removing-step-*": "half removed", "superseded-step-*": "superseded"}


@dataclass(frozen=True)
class Listed:
    """A checkpoint folder in a list.

    Attributes:
        state: the content of state.json. None if it cannot be read.
        status: complete, damaged with its reason, half written, half removed, or superseded.
        saved: when it was saved, by the clock of its file system.
        size: bytes of all files.
        parts: kinds of tensors -> their dtype, for example `weights`: `fp32`, `exp_avg`: `bf16`.
    """

    path: Path
    state: dict[str, Any] | None
    status: str
    saved: datetime
    size: int
    parts: dict[str, str]


def checkpoints_of(path: Path, others: bool = False) -> list[Path]:
    """Return the checkpoints that a path names, oldest first. It is a checkpoint, a run folder or a `checkpoints/`
    folder.

    Args:
        others: whether to include half-written, half-removed and superseded checkpoints.

    Raises:
        CheckpointError: there are none.
    """
    if (path / "state.json").is_file() or path.name.startswith("step-"):
        if not path.is_dir():
            raise CheckpointError(f"{path}: no such folder")
        return [path]
    for folder in (path / "checkpoints", path):
        made = list_checkpoints(folder)[::-1]
        if others:
            made += [p for pattern in _ASIDE for p in sorted(folder.glob(pattern))]
        if made:
            return made
    what = "holds no checkpoint (a folder step-* with a state.json)" if path.exists() else "no such folder"
    raise CheckpointError(f"{path}: {what}; name a run folder or a checkpoint")


def describe(path: Path) -> Listed:
    """Describe a checkpoint, reading only headers and small files."""
    files = [p for p in path.iterdir() if p.is_file()]
    newest = max((p.stat().st_mtime for p in files), default=path.stat().st_mtime)
    status, state = "complete", None
    try:
        state = read_state(path)
        status = next((f"damaged: {problem}" for _, problem in file_problems(path, state)), status)
    except DamagedCheckpoint as error:
        status = f"damaged: {str(error).rpartition(' is damaged: ')[2]}"
    for pattern, word in _ASIDE.items():
        status = word if path.match(pattern) else status
    size = sum(p.stat().st_size for p in files)
    return Listed(path, state, status, datetime.fromtimestamp(newest), size, parts_in(path))


def parts_in(path: Path) -> dict[str, str]:
    """Return the kinds of tensors in a checkpoint -> dtype of their first tensor. Empty if a header is damaged."""
    kinds: dict[str, str] = {}
    try:
        for stem in STEMS:
            reader = open_tensors(path, stem)
            for name in reader.names():
                kinds.setdefault("weights" if stem == "model" else name.partition(".")[0], short(reader.dtype(name)))
    except (DamagedFile, OSError):
        return {}
    return kinds


SHORT = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def short(dtype: torch.dtype) -> str:
    """Return the name of a dtype in the configuration."""
    return SHORT[dtype]


# ---------------------------------------------------------------------------------------------------------- verifying


def verify(path: Path) -> dict[str, str]:
    """Read a checkpoint and compare every byte with the checksums of its state.json, one block at a time.

    Returns:
        For state.json and every file that it names: name -> what is wrong with the file. An empty string: nothing.
    """
    try:
        body = read_state(path)
    except DamagedCheckpoint as error:
        return {"state.json": str(error)}
    problems = dict.fromkeys((*body["files"], *body["sha256"], "state.json"), "") | dict(file_problems(path, body))
    in_pieces = {index_file(stem): stem for stem in STEMS if is_in_pieces(path, stem)}
    for name in in_pieces or body["files"]:
        if not problems.get(name):
            problems[name] = _problem_of_elements(path, name, in_pieces.get(name), body["checksums"])
    return problems


def _problem_of_elements(path: Path, name: str, stem: str | None, checksums: dict[str, list[str]]) -> str:
    """Return what is wrong with the elements of the tensors in a file, or an empty string.

    Args:
        stem: the file is the index of this stem, and the tensors are in the files of the hosts. None: it holds them.
    """
    try:
        bad = bad_tensors(open_tensors(path, stem) if stem else Reader([path / name]), checksums)
    except DamagedFile as error:
        return str(error)
    return f"the content of {', '.join(bad)} does not match its checksum" if bad else ""


def bad_tensors(reader: Reader, checksums: dict[str, list[str]]) -> list[str]:
    """Return the tensors whose checksum differs from the one in `checksums`."""
    bad = []
    for name in reader.names():
        total = torch.zeros(2, dtype=torch.int64)
        for rows, data in blocks(reader, name):
            total += checksum(data, rows)
        if as_words(total) != checksums.get(name):
            bad.append(name)
    return bad


def blocks(reader: Reader, name: str) -> Iterator[tuple[Rows, Tensor]]:
    """Yield the elements of a tensor, block by block in order, each [rows.numel]. The next block overwrites them."""
    size, dtype = torch.Size(reader.shape(name)).numel(), reader.dtype(name)
    if not size:
        return
    most = BLOCK // dtype.itemsize
    buffer = torch.empty(min(size, most), dtype=dtype)
    for i, rows in enumerate(Rows(0, size).chunks(most)):
        if i % AHEAD == 0:
            reader.expect(name, Rows(rows.start, min(2 * AHEAD * most, size - rows.start)))
        yield rows, reader.read(name, rows, buffer[: rows.numel])
