"""Writes a checkpoint. Every owner writes its elements in place, and one rename publishes the folder."""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ndtrain.checkpoint.checksum import checksum
from ndtrain.checkpoint.directory import prune, remove
from ndtrain.checkpoint.elements import (
    BLOCK,
    FORMAT,
    CheckpointError,
    State,
    biases_of,
    digest,
    names,
    parts_of,
    plans_of,
    sha256,
    slices_of,
    together,
)
from ndtrain.checkpoint.safetensors_io import PlannedFile, create, index_json, write
from ndtrain.config import CheckpointConfig, Config
from ndtrain.mesh.mesh import Mesh
from ndtrain.mesh.row_map import Rows
from ndtrain.model.families.hf_config import to_hf
from ndtrain.parallel.stages import Stages

Extras = Callable[[Path], None]


def save(
    folder: Path,
    stages: Stages,
    mesh: Mesh,
    cfg: Config,
    state: State,
    extras: Extras = lambda folder: None,
) -> Path:
    """Write `folder/step-<state.step>` synchronously. Call it on every rank.

    Older checkpoints beyond `checkpoint.keep` are then removed, except one every `checkpoint.keep_every` steps.

    Args:
        extras: as `Saver` takes it.

    Raises:
        CheckpointError: on every rank, if any rank could not write (disk full, read-only). Then nothing is published
            and the older checkpoints stay.
    """
    writer = Writer(folder, stages, mesh, cfg.checkpoint, asdict(cfg), extras)
    return writer.write(state, writer.live)


@dataclass(frozen=True)
class _Owned:
    """Elements that this rank writes, and their file."""

    name: str  # the tensor's name in its file
    file: PlannedFile
    rows: Rows


class Writer:
    """Writes the checkpoints of a run. Computes once everything that is the same in all of them.

    Args:
        run: the run's configuration, as state.json holds it.
        extras: as `Saver` takes it.

    Attributes:
        live: the tensors that this rank writes. Training changes them in place.
        size: bytes of a checkpoint's tensor files, over all ranks.
    """

    def __init__(self, folder: Path, stages: Stages, mesh: Mesh, options: CheckpointConfig, run: dict, extras: Extras):
        self.folder, self.mesh, self.options, self.run, self.extras = folder, mesh, options, run, extras
        self.model, self.plan, self.plans = stages.model, stages.units.plan, plans_of(stages, options.max_file_bytes)
        owned = list(_owned(stages, self.plans, writes_biases=mesh.rank == 0))
        self.size = sum(f.size for f in _files(self.plans))
        self.owned, self.live = [o for o, _ in owned], [x for _, x in owned]
        _ = mesh.background  # created here, where all ranks call it, and not in a thread

    def write(self, state: State, values: Sequence[Tensor]) -> Path:
        """Write and publish a checkpoint of `values`: the contents of `live` at the time of `state`.

        Raises:
            CheckpointError: as `save`.
        """
        final = self.folder / f"step-{state.step:08d}"
        temporary = self.folder / f".writing-{final.name}"
        leader = self.mesh.rank == 0
        sums = torch.zeros(len(names(self.plans)), 2, dtype=torch.int64)
        try:
            together(self.mesh, lambda: leader and _create_all(temporary, self.plans))
            together(self.mesh, lambda: _write_owned(temporary, self.plans, self.owned, values, sums))
            if self.mesh.background is not None:
                dist.all_reduce(sums, group=self.mesh.background)
            together(self.mesh, lambda: leader and self._publish(temporary, final, sums, state))
        except CheckpointError as error:
            if leader:
                shutil.rmtree(temporary, ignore_errors=True)
            needed = f"; {self.folder} needs {self.size:,} bytes for it" if _lacks_space(str(error)) else ""
            raise CheckpointError(f"checkpoint of step {state.step} not saved: {error}{needed}") from error
        if leader:
            prune(self.folder, self.options.keep, self.options.keep_every)
        return final

    def _publish(self, temporary: Path, final: Path, sums: Tensor, state: State) -> None:
        dtype = str(self.plan.master).removeprefix("torch.")
        _write_json(temporary / "config.json", to_hf(self.model) | {"dtype": dtype, "torch_dtype": dtype})
        for stem, files in self.plans.items():
            if len(files) > 1:
                _write_json(temporary / f"{stem}.safetensors.index.json", index_json(files))
        self.extras(temporary)
        big = {f.name for f in _files(self.plans)}
        written = (p.relative_to(temporary).as_posix() for p in temporary.rglob("*") if p.is_file())
        small = sorted(name for name in written if name not in big)
        body = self._body(temporary, small, sums, state)
        _write_json(temporary / "state.json", body | {"digest": digest(body)})
        for name in (*small, "state.json"):
            flush_to_disk(temporary / name)
        for folder in (temporary, *(p for p in temporary.iterdir() if p.is_dir())):
            flush_to_disk(folder)
        if final.exists():  # the same step, saved before a resume from an older step. Removed only now
            remove(final)
        os.rename(temporary, final)
        flush_to_disk(final.parent)

    def _body(self, temporary: Path, small: list[str], sums: Tensor, state: State) -> dict:
        """Return the content of state.json: the run's state, and the sizes and checksums of the other files."""
        mesh = self.mesh
        return {
            "format": FORMAT,
            **asdict(state),
            "seed": self.run["run"]["seed"],
            "mesh": {a: mesh.size(a) for a in mesh.spec.order} | {"zero": self.plan.zero},
            "config": self.run,
            "files": {f.name: [f.size, sha256(f.header)] for f in _files(self.plans)},
            "sha256": {name: sha256((temporary / name).read_bytes()) for name in small},
            "checksums": {
                name: [f"{x & (2**64 - 1):016x}" for x in row]
                for name, row in zip(names(self.plans), sums.tolist(), strict=True)
            },
        }


def _lacks_space(reason: str) -> bool:
    return any(os.strerror(number) in reason for number in (errno.ENOSPC, errno.EDQUOT))


def _files(plans: dict[str, list[PlannedFile]]) -> list[PlannedFile]:
    return [f for files in plans.values() for f in files]


def _owned(stages: Stages, plans: dict[str, list[PlannedFile]], writes_biases: bool) -> Iterator[tuple[_Owned, Tensor]]:
    """Yield the elements that this rank writes: their position in the files, and the 1-D tensor with their values."""
    for stem, parts in parts_of(stages.units.plan).items():
        where = {name: f for f in plans.get(stem, ()) for name in f.offsets}
        for part in parts:  # roughly the order of the file
            for held in slices_of(stages, part, owned_only=True):
                name = part.prefix + held.tensor
                yield _Owned(name, where[name], held.rows), held.data
        for name, bias_X in biases_of(stages, stem).items() if writes_biases else ():
            yield _Owned(name, where[name], Rows(0, bias_X.numel())), bias_X


def _create_all(temporary: Path, plans: dict[str, list[PlannedFile]]) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for plan in _files(plans):
        create(temporary / plan.name, plan)


def _write_owned(
    temporary: Path,
    plans: dict[str, list[PlannedFile]],
    owned: Sequence[_Owned],
    values: Sequence[Tensor],
    sums: Tensor,
) -> None:
    """Write this rank's elements and add their checksums to `sums`, whose rows are the tensors in plan order."""
    row = {name: i for i, name in enumerate(names(plans))}
    fds: dict[str, int] = {}
    try:
        for o, whole in zip(owned, values, strict=True):
            if o.file.name not in fds:
                fds[o.file.name] = os.open(temporary / o.file.name, os.O_WRONLY)
            at = 0
            for rows in o.rows.chunks(BLOCK // whole.element_size()):
                data = whole[at : at + rows.numel].cpu()
                at += rows.numel
                sums[row[o.name]] += checksum(data, rows)
                _write_and_begin_to_flush(fds[o.file.name], data, o.file.offsets[o.name], rows)
        for fd in fds.values():
            os.fsync(fd)
    finally:
        for fd in fds.values():
            os.close(fd)


def _write_and_begin_to_flush(fd: int, data: Tensor, offset: int, rows: Rows) -> None:
    """Write elements as `write` does. Start to flush a large piece at once, if no other rank writes a part of it."""
    write(fd, data, offset, rows)
    if rows.number == 1 and data.nbytes >= BLOCK // 2 and hasattr(os, "posix_fadvise"):
        # Linux starts to write the dirty pages and does not wait. (Pages on disk may then leave the page cache.)
        os.posix_fadvise(fd, offset + rows.start * data.element_size(), data.nbytes, os.POSIX_FADV_DONTNEED)


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def flush_to_disk(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
