"""Writes a checkpoint: every owner its elements, in place; published by one rename."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from ndtrain.checkpoint.elements import (
    FORMAT,
    PARTS,
    CheckpointError,
    State,
    digest,
    names,
    pieces,
    plans_of,
    sha256,
    together,
)
from ndtrain.checkpoint.shelf import prune, remove
from ndtrain.collectives import all_reduce
from ndtrain.config import Config
from ndtrain.mesh import Mesh
from ndtrain.model.hf import to_hf
from ndtrain.parallel.apply import DTYPES, Stages
from ndtrain.safetensors_io import PlannedFile, checksum, create, index_json, write_all


def save(
    folder: Path,
    stages: Stages,
    mesh: Mesh,
    cfg: Config,
    state: State,
    extras: Callable[[Path], None] = lambda folder: None,
) -> Path:
    """Writes `folder/step-<state.step>`; every rank calls it. Older checkpoints beyond `checkpoint.keep` go.

    Args:
        extras: writes further small files (the tokenizer) into the folder; called on one rank.

    Raises:
        CheckpointError: on every rank, if any rank could not write (disk full, read-only): nothing was published and
            the older checkpoints stand.
    """
    final = folder / f"step-{state.step:08d}"
    temporary = folder / f".writing-{final.name}"
    plans = plans_of(stages, cfg)
    leader = mesh.rank == 0
    sums = torch.zeros(len(names(plans)), 2, dtype=torch.int64)
    try:
        together(mesh, lambda: leader and _create_all(temporary, plans))
        together(mesh, lambda: _write_owned(temporary, plans, stages, mesh, sums))
        whole = sums.to(mesh.device)
        all_reduce(whole.view(-1), mesh.world).wait()
        together(mesh, lambda: leader and _publish(temporary, final, plans, whole.cpu(), cfg, mesh, state, extras))
    except CheckpointError as error:
        if leader:
            shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"checkpoint of step {state.step} not saved: {error}") from error
    if leader:
        prune(folder, cfg.checkpoint.keep)
    return final


def _create_all(temporary: Path, plans: dict[str, list[PlannedFile]]) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for plan in (f for files in plans.values() for f in files):
        create(temporary / plan.name, plan)


def _write_owned(
    temporary: Path, plans: dict[str, list[PlannedFile]], stages: Stages, mesh: Mesh, sums: Tensor
) -> None:
    """Writes this rank's elements and adds their checksums to `sums`, whose rows are the tensors in plan order."""
    rows = {name: i for i, name in enumerate(names(plans))}
    for stem, parts in PARTS.items():
        where = {name: f for f in plans[stem] for name in f.offsets}
        opened = {f.name: os.open(temporary / f.name, os.O_WRONLY) for f in plans[stem]}
        try:
            for unit, tensor, start, span in pieces(stages, mesh, owned_only=True):
                for prefix, buffer in parts:
                    name = prefix + tensor
                    data = getattr(unit, buffer)[span].cpu()
                    plan = where[name]
                    write_all(opened[plan.name], data, plan.offsets[name] + start * plan.dtype.itemsize)
                    sums[rows[name]] += checksum(data, start)
            for fd in opened.values():
                os.fsync(fd)
        finally:
            for fd in opened.values():
                os.close(fd)


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def _publish(
    temporary: Path,
    final: Path,
    plans: dict[str, list[PlannedFile]],
    sums: Tensor,
    cfg: Config,
    mesh: Mesh,
    state: State,
    extras: Callable[[Path], None],
) -> None:
    dtype = str(DTYPES[cfg.precision.params]).removeprefix("torch.")
    _write_json(temporary / "config.json", to_hf(cfg.model) | {"dtype": dtype, "torch_dtype": dtype})
    for stem, files in plans.items():
        if len(files) > 1:
            _write_json(temporary / f"{stem}.safetensors.index.json", index_json(files))
    extras(temporary)
    big = {f.name for files in plans.values() for f in files}
    small = sorted(p.name for p in temporary.iterdir() if p.name not in big)
    body = {
        "format": FORMAT,
        **asdict(state),
        "seed": cfg.run.seed,
        "mesh": {a: mesh.size(a) for a in mesh.spec.order} | {"zero": cfg.mesh.zero},
        "config": asdict(cfg),
        "files": {f.name: [f.size, sha256(f.header)] for files in plans.values() for f in files},
        "sha256": {name: sha256((temporary / name).read_bytes()) for name in small},
        "checksums": {
            name: [f"{x & (2**64 - 1):016x}" for x in row]
            for name, row in zip(names(plans), sums.tolist(), strict=True)
        },
    }
    _write_json(temporary / "state.json", body | {"digest": digest(body)})
    for name in (*small, "state.json"):
        _fsync(temporary / name)
    _fsync(temporary)
    if final.exists():  # the same step again, after a resume from an older one: the old one goes only now
        remove(final)
    os.rename(temporary, final)
    _fsync(final.parent)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
