"""Checkpoints that do not know which mesh wrote them.

A checkpoint is a folder `step-00000010`: the whole logical tensors under Hugging Face names (`model*.safetensors` in
master precision, `optimizer*.safetensors` with `exp_avg.<name>` and `exp_avg_sq.<name>`), `config.json` and the
tokenizer, so that `transformers` opens it as it is, and `state.json` with the step and the checksums. Every element
has one owner, which writes it straight into place. The folder is written under a temporary name, flushed, and
published by one rename: a half-written one never has a checkpoint's name.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ndtrain.collectives import all_reduce
from ndtrain.config import Config, ConfigError, ModelConfig
from ndtrain.layout import REPLICA_AXES, even_cut
from ndtrain.mesh import Mesh
from ndtrain.model.hf import to_hf
from ndtrain.parallel.apply import DTYPES, Stages
from ndtrain.parallel.fsdp import Unit
from ndtrain.safetensors_io import (
    DamagedFile,
    PlannedFile,
    Reader,
    checksum,
    create,
    index_json,
    plan_files,
    read_header,
    write_all,
)

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


# ----------------------------------------------------------------------------------------------------------- pieces


def _pieces(stages: Stages, mesh: Mesh, owned_only: bool) -> Iterator[tuple[Unit, str, int, slice]]:
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


def _plans(stages: Stages, cfg: Config) -> dict[str, list[PlannedFile]]:
    shapes = {name: stages.layouts[name].shape for name in stages.layouts.names()}
    dtype = DTYPES[cfg.precision.params]
    return {
        stem: plan_files(
            stem, {p + n: s for p, _ in parts for n, s in shapes.items()}, dtype, cfg.checkpoint.max_file_bytes
        )
        for stem, parts in PARTS.items()
    }


def _names(plans: dict[str, list[PlannedFile]]) -> list[str]:
    """Every tensor of every file, in the order of the checksums."""
    return [name for files in plans.values() for f in files for name in f.offsets]


# ----------------------------------------------------------------------------------------------------------- saving


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
    plans = _plans(stages, cfg)
    leader = mesh.rank == 0
    sums = torch.zeros(len(_names(plans)), 2, dtype=torch.int64)
    try:
        _together(mesh, lambda: leader and _create_all(temporary, plans))
        _together(mesh, lambda: _write_owned(temporary, plans, stages, mesh, sums))
        whole = sums.to(mesh.device)
        all_reduce(whole.view(-1), mesh.world).wait()
        _together(mesh, lambda: leader and _publish(temporary, final, plans, whole.cpu(), cfg, mesh, state, extras))
    except CheckpointError as error:
        if leader:
            shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"checkpoint of step {state.step} not saved: {error}") from error
    if leader:
        _prune(folder, cfg.checkpoint.keep)
    return final


def _together(mesh: Mesh, work: Callable[[], Any]) -> None:
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


def _create_all(temporary: Path, plans: dict[str, list[PlannedFile]]) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for plan in (f for files in plans.values() for f in files):
        create(temporary / plan.name, plan)


def _write_owned(
    temporary: Path, plans: dict[str, list[PlannedFile]], stages: Stages, mesh: Mesh, sums: Tensor
) -> None:
    """Writes this rank's elements and adds their checksums to `sums`, whose rows are the tensors in plan order."""
    rows = {name: i for i, name in enumerate(_names(plans))}
    for stem, parts in PARTS.items():
        where = {name: f for f in plans[stem] for name in f.offsets}
        opened = {f.name: os.open(temporary / f.name, os.O_WRONLY) for f in plans[stem]}
        try:
            for unit, tensor, start, span in _pieces(stages, mesh, owned_only=True):
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
        "files": {f.name: [f.size, _sha256(f.header)] for files in plans.values() for f in files},
        "sha256": {name: _sha256((temporary / name).read_bytes()) for name in small},
        "checksums": {
            name: [f"{x & (2**64 - 1):016x}" for x in row]
            for name, row in zip(_names(plans), sums.tolist(), strict=True)
        },
    }
    _write_json(temporary / "state.json", body | {"digest": _digest(body)})
    for name in (*small, "state.json"):
        _fsync(temporary / name)
    _fsync(temporary)
    if final.exists():  # the same step again, after a resume from an older one: the old one goes only now
        _remove(final)
    os.rename(temporary, final)
    _fsync(final.parent)


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def _digest(body: dict) -> str:
    return _sha256(json.dumps(body, sort_keys=True).encode())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def set_aside_later(chosen: Path) -> None:
    """Checkpoints of later steps than the one resumed are of a line given up (or damaged): they stay, under a name
    that nothing resumes, lest a later `resume=auto` go back to them."""
    for path in list_checkpoints(chosen.parent):
        if path.name > chosen.name:
            aside = path.with_name(f"superseded-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(path, aside)


def _prune(folder: Path, keep: int) -> None:
    """Removes what `checkpoint.keep` leaves no place for, and what a kill left half written or half removed."""
    for path in list_checkpoints(folder)[keep:]:
        _remove(path)
    for pattern in (".removing-*", ".writing-*"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path) -> None:
    """Takes the name away first: a kill in the middle leaves nothing that looks like a checkpoint."""
    doomed = path.with_name(f".removing-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


# --------------------------------------------------------------------------------------------------------- choosing


def list_checkpoints(folder: Path) -> list[Path]:
    """Published checkpoints in a `checkpoints/` folder, newest first."""
    named = (p for p in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", p.name) and p.is_dir())
    return sorted(named, key=lambda p: int(p.name[5:]), reverse=True)


def candidates(resume: str, run_dir: Path) -> list[Path]:
    """The checkpoints that `resume` may mean, best first; empty for a fresh start.

    Raises:
        CheckpointError: `resume` is a path without a checkpoint.
    """
    if resume == "none":
        return []
    if resume == "auto":
        return list_checkpoints(run_dir / "checkpoints")
    path = Path(resume)
    if (path / "state.json").is_file():
        return [path]
    found = list_checkpoints(path / "checkpoints") or list_checkpoints(path)
    if not found:
        what = "holds no checkpoint (a folder step-* with a state.json)" if path.exists() else "does not exist"
        raise CheckpointError(f"resume={resume}: {what}; give a checkpoint or a run folder, or resume=auto")
    return found[:1]


def inspect(path: Path, m: ModelConfig) -> State:
    """Reads and verifies all of a checkpoint but its tensors' contents.

    Raises:
        CheckpointError: damaged (the file is named), or of another architecture (the first differing field is named).
    """
    body = _read_state(path)
    for name, (size, header) in body["files"].items():
        actual = (path / name).stat().st_size if (path / name).exists() else None
        if actual != size:
            what = "is missing" if actual is None else f"has {actual} bytes instead of {size}"
            raise DamagedCheckpoint(f"{path} is damaged: {name} {what}")
        if _sha256(read_header(path / name)) != header:
            raise DamagedCheckpoint(f"{path} is damaged: the header of {name} is not what was written")
    for name, digest in body["sha256"].items():
        if not (path / name).exists() or _sha256((path / name).read_bytes()) != digest:
            raise DamagedCheckpoint(f"{path} is damaged: {name} is not what was written")
    _check_architecture(path, m)
    return State(body["step"], body["tokens"], body["order"])


def _read_state(path: Path) -> dict:
    try:
        body = json.loads((path / "state.json").read_text())
        digest = body.pop("digest")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise DamagedCheckpoint(f"{path} is damaged: state.json cannot be read") from error
    if digest != _digest(body):
        raise DamagedCheckpoint(f"{path} is damaged: state.json is not what was written")
    if body["format"] != FORMAT:
        raise DamagedCheckpoint(f"{path} has format {body['format']}, this version reads format {FORMAT}")
    return body


# what may differ between a checkpoint and the model that resumes it
_FREE = ("architectures", "initializer_range", "max_position_embeddings", "use_cache")


def _check_architecture(path: Path, m: ModelConfig) -> None:
    there = json.loads((path / "config.json").read_text())
    for key, here in to_hf(m).items():
        if key not in _FREE and there.get(key) != here:
            raise CheckpointError(
                f"{path} is of another architecture: {key} is {there.get(key)} there and {here} here: "
                f"set model.{key} as there, or train in another run.dir"
            )


# ---------------------------------------------------------------------------------------------------------- loading


def load(path: Path, stages: Stages, mesh: Mesh) -> None:
    """Reads this rank's elements of weights and moments and verifies every element read. Every rank calls it.

    Raises:
        CheckpointError: on every rank, naming the tensor whose content is not what was written.
    """
    expected = _read_state(path)["checksums"]
    sums = torch.zeros(len(expected), 2, dtype=torch.int64)
    rows = {name: i for i, name in enumerate(expected)}

    def read() -> None:
        for stem, parts in PARTS.items():
            _read_into(stages, mesh, Reader(sorted(path.glob(f"{stem}*.safetensors"))), parts, sums, rows)

    try:
        _together(mesh, read)
    except CheckpointError as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error}") from error
    whole = sums.to(mesh.device)
    all_reduce(whole.view(-1), mesh.world).wait()
    tensors = {
        prefix + n: stages.layouts[n] for n in stages.layouts.names() for ps in PARTS.values() for prefix, _ in ps
    }
    for (name, words), got in zip(expected.items(), whole.tolist(), strict=True):
        # each element was read, and summed, by each replica, copy and holder
        readers = mesh.size(*REPLICA_AXES) * tensors[name].copies * tensors[name].holders
        if [(int(w, 16) * readers) % 2**64 for w in words] != [x % 2**64 for x in got]:
            raise DamagedCheckpoint(f"{path} is damaged: the content of {name} is not what was written")
    stages.units.weights_changed()


def load_weights(folder: Path, stages: Stages, mesh: Mesh) -> None:
    """Reads this rank's elements of the weights from a Hugging Face folder, converted to master precision.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or the file is damaged.
    """
    files = weight_files(folder)
    try:
        _together(mesh, lambda: _read_into(stages, mesh, Reader(files), PARTS["model"]))
    except CheckpointError as error:
        raise CheckpointError(f"init_from={folder}: {error}") from error
    stages.units.weights_changed()


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder."""
    index = folder / "model.safetensors.index.json"
    names = (
        sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else ["model.safetensors"]
    )
    for name in names:
        if not (folder / name).is_file():
            raise CheckpointError(f"init_from={folder}: {name} is missing")
    return [folder / name for name in names]


def _read_into(
    stages: Stages, mesh: Mesh, reader: Reader, parts, sums: Tensor | None = None, rows: dict[str, int] | None = None
) -> None:
    for unit, tensor, start, span in _pieces(stages, mesh, owned_only=False):
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
