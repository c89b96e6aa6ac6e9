"""Merges the files of the hosts into a checkpoint that Hugging Face's tools can read (`ndtrain checkpoint merge`)."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from ndtrain.checkpoint.checksum import as_words, checksum
from ndtrain.checkpoint.directory import facts_of_files, file_problems, read_state
from ndtrain.checkpoint.elements import CheckpointError, damaged, digest
from ndtrain.checkpoint.layouts import write_json
from ndtrain.checkpoint.pieces import STEMS, index_file, is_in_pieces, open_tensors
from ndtrain.checkpoint.safetensors_io import DamagedFile, PlannedFile, create, index_json, plan_files, write
from ndtrain.checkpoint.safetensors_reader import Reader
from ndtrain.checkpoint.saving import publish
from ndtrain.checkpoint.verifying import blocks
from ndtrain.config import CheckpointConfig


def merge(path: Path, out: Path, max_file_bytes: int = CheckpointConfig.max_file_bytes) -> int:
    """Write a checkpoint of the layout `host` as the folder `out` in the layout `shared`.

    The files are those that the run would have written in that layout. Every byte is compared with its checksum. It
    takes some megabytes of memory.

    Returns:
        The bytes of all tensors.

    Raises:
        CheckpointError: `out` exists, the checkpoint is damaged or has the other layout already, or the disk is full.
            Then `out` is not created.
    """
    body = read_state(path)
    if out.exists():
        raise CheckpointError(f"{out} already exists: name a new folder")
    for _, problem in file_problems(path, body):
        raise damaged(path, problem)
    if not is_in_pieces(path, "model"):
        raise CheckpointError(f"{path} has the layout shared already: there is nothing to merge")
    temporary = out.with_name(f".writing-{out.name}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        files = [file for stem in STEMS for file in _merge_stem(path, temporary, stem, body, max_file_bytes)]
        _finish(path, temporary, out, body, files)
    except DamagedFile as error:
        raise damaged(path, error) from error
    except OSError as error:
        raise CheckpointError(f"{out} not written: {error.strerror or error}: {error.filename}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return sum(file.size - len(file.header) for file in files)


def _merge_stem(path: Path, out: Path, stem: str, body: dict[str, Any], max_file_bytes: int) -> list[PlannedFile]:
    """Write the files of a stem, and return them."""
    reader = open_tensors(path, stem)
    described = {name: (reader.shape(name), reader.dtype(name)) for name in reader.names()}
    plans = plan_files(stem, described, max_file_bytes) if described else []
    for plan in plans:
        create(out / plan.name, plan)
        fd = os.open(out / plan.name, os.O_WRONLY)
        try:
            for name, offset in plan.offsets.items():
                _merge_tensor(reader, name, fd, offset, body["checksums"].get(name))
            os.fsync(fd)
        finally:
            os.close(fd)
    if len(plans) > 1:
        write_json(out / f"{stem}.safetensors.index.json", index_json(plans))
    return plans


def _merge_tensor(reader: Reader, name: str, fd: int, offset: int, expected: list[str] | None) -> None:
    total = torch.zeros(2, dtype=torch.int64)
    for rows, data in blocks(reader, name):
        total += checksum(data, rows)
        write(fd, data, offset, rows)
    if as_words(total) != expected:
        raise DamagedFile(f"the content of {name} does not match its checksum")


def _finish(path: Path, temporary: Path, out: Path, body: dict[str, Any], files: list[PlannedFile]) -> None:
    """Copy the small files, write state.json and publish the folder."""
    for name in body["sha256"].keys() - {index_file(stem) for stem in STEMS}:
        (temporary / name).parent.mkdir(exist_ok=True)
        (temporary / name).write_bytes((path / name).read_bytes())
    small, facts = facts_of_files(temporary, files)
    body = body | facts
    write_json(temporary / "state.json", body | {"digest": digest(body)})
    publish(temporary, out, [*small, "state.json"])
