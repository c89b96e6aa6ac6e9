"""Writes a checkpoint. Every owner writes its elements in place, and one rename publishes the folder."""

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ndtrain.checkpoint.checksum import checksum
from ndtrain.checkpoint.directory import prune, remove
from ndtrain.checkpoint.elements import BLOCK, FORMAT, CheckpointError, State, digest, sha256, together
from ndtrain.checkpoint.layouts import Files, files_of, write_json
from ndtrain.checkpoint.safetensors_io import MOST_VIEWS, bytes_of, write, write_all
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


class Writer:
    """Writes the checkpoints of a run. Computes once everything that is the same in all of them.

    Args:
        run: the run's configuration, as state.json holds it.
        extras: as `Saver` takes it.

    Attributes:
        files: the files of every checkpoint, as this rank sees them.
        live: the tensors that this rank writes. Training changes them in place.
    """

    def __init__(self, folder: Path, stages: Stages, mesh: Mesh, options: CheckpointConfig, run: dict, extras: Extras):
        self.folder, self.mesh, self.options, self.run, self.extras = folder, mesh, options, run, extras
        self.model, self.plan = stages.model, stages.units.plan
        _ = mesh.background  # created here, where all ranks call it, and not in a thread
        self.files = files_of(stages, mesh, options)
        self.live = [o.values for o in self.files.owned]

    def write(self, state: State, values: Sequence[Tensor]) -> Path:
        """Write and publish a checkpoint of `values`: the contents of `live` at the time of `state`.

        Raises:
            CheckpointError: as `save`.
        """
        final = self.folder / f"step-{state.step:08d}"
        temporary = self.folder / f".writing-{final.name}"
        leader = self.mesh.rank == 0
        sums = torch.zeros(len(self.files.names), 2, dtype=torch.int64)
        try:
            together(self.mesh, lambda: leader and _make_folder(temporary))
            together(self.mesh, lambda: self.files.create(temporary))
            together(self.mesh, lambda: _write_owned(temporary, self.files, values, sums))
            if self.mesh.background is not None:
                dist.all_reduce(sums, group=self.mesh.background)
            together(self.mesh, lambda: leader and self._publish(temporary, final, sums, state))
        except CheckpointError as error:
            if leader:
                shutil.rmtree(temporary, ignore_errors=True)
            needed = f"; {self.folder} needs {self.files.size:,} bytes for it" if _lacks_space(str(error)) else ""
            raise CheckpointError(f"checkpoint of step {state.step} not saved: {error}{needed}") from error
        if leader:
            prune(self.folder, self.options.keep, self.options.keep_every)
        return final

    def _publish(self, temporary: Path, final: Path, sums: Tensor, state: State) -> None:
        dtype = str(self.plan.master).removeprefix("torch.")
        write_json(temporary / "config.json", to_hf(self.model) | {"dtype": dtype, "torch_dtype": dtype})
        self.files.write_index(temporary)
        self.extras(temporary)
        big = {f.name for f in self.files.all}
        written = (p.relative_to(temporary).as_posix() for p in temporary.rglob("*") if p.is_file())
        small = sorted(name for name in written if name not in big)
        body = self._body(temporary, small, sums, state)
        write_json(temporary / "state.json", body | {"digest": digest(body)})
        publish(temporary, final, [*small, "state.json"])

    def _body(self, temporary: Path, small: list[str], sums: Tensor, state: State) -> dict:
        """Return the content of state.json: the run's state, and the sizes and checksums of the other files."""
        mesh = self.mesh
        return {
            "format": FORMAT,
            **asdict(state),
            "seed": self.run["run"]["seed"],
            "mesh": {a: mesh.size(a) for a in mesh.spec.order} | {"zero": self.plan.zero},
            "config": self.run,
            "files": {f.name: [f.size, sha256(f.header)] for f in self.files.all},
            "sha256": {name: sha256((temporary / name).read_bytes()) for name in small},
            "checksums": {
                name: [f"{x & (2**64 - 1):016x}" for x in row]
                for name, row in zip(self.files.names, sums.tolist(), strict=True)
            },
        }


def _lacks_space(reason: str) -> bool:
    return any(os.strerror(number) in reason for number in (errno.ENOSPC, errno.EDQUOT))


def _make_folder(temporary: Path) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)


def _write_owned(temporary: Path, files: Files, values: Sequence[Tensor], sums: Tensor) -> None:
    """Write this rank's elements and add their checksums to `sums`, whose rows are the tensors of `files.names`."""
    row = {name: i for i, name in enumerate(files.names)}
    opened: dict[str, _OpenFile] = {}
    try:
        for place, whole in zip(files.places, values, strict=True):
            if place.file not in opened:
                opened[place.file] = _OpenFile(temporary / place.file)
            at = 0
            for rows, there in place.blocks(BLOCK // whole.element_size()):
                data = whole[at : at + rows.numel].cpu()
                at += rows.numel
                sums[row[place.name]] += checksum(data, rows)
                opened[place.file].write(data, place.offset, there)
        for file in opened.values():
            file.flush()
    finally:
        for file in opened.values():
            file.close()


class _OpenFile:
    """A file that is being written. Pieces that follow one another are written in one call."""

    def __init__(self, path: Path):
        self._fd = os.open(path, os.O_WRONLY)
        self._waiting: list[memoryview] = []
        self._begin = self._end = 0  # bytes of the file that the waiting pieces will fill

    def write(self, data: Tensor, offset: int, rows: Rows) -> None:
        """Write elements as `safetensors_io.write` does. `data` must stay as it is until the next `flush`."""
        if rows.number > 1:
            write(self._fd, data, offset, rows)
            return
        begin = offset + rows.start * data.element_size()
        if begin != self._end or len(self._waiting) == MOST_VIEWS or begin - self._begin + data.nbytes > BLOCK:
            self._write_waiting()
            self._begin = begin
        self._waiting.append(memoryview(bytes_of(data)))
        self._end = begin + data.nbytes

    def flush(self) -> None:
        """Write everything, and wait until it is on the disk."""
        self._write_waiting()
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)

    def _write_waiting(self) -> None:
        write_all(self._fd, self._waiting, self._begin)
        size = self._end - self._begin
        if size >= BLOCK // 2 and hasattr(os, "posix_fadvise"):
            # Linux starts to write the dirty pages and does not wait. (Pages on disk may then leave the page cache.)
            os.posix_fadvise(self._fd, self._begin, size, os.POSIX_FADV_DONTNEED)
        self._waiting, self._begin = [], self._end


def publish(temporary: Path, final: Path, names: Sequence[str]) -> None:
    """Give a complete folder its name, after these files and all names in it are on the disk."""
    for name in names:
        flush_to_disk(temporary / name)
    for folder in (temporary, *(p for p in temporary.iterdir() if p.is_dir())):
        flush_to_disk(folder)
    if final.exists():  # the same step, saved before a resume from an older step. Removed only now
        remove(final)
    os.rename(temporary, final)
    flush_to_disk(final.parent)


def flush_to_disk(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
