"""Writes a checkpoint. Every owner writes its elements in place, and one rename publishes the folder."""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from ndtrain.checkpoint.checksum import as_words, checksum
from ndtrain.checkpoint.directory import STATE, facts_of_files, prune, remove
from ndtrain.checkpoint.elements import BLOCK, FORMAT, CheckpointError, State, digest, together
from ndtrain.checkpoint.layouts import Files, files_of, write_json
from ndtrain.checkpoint.safetensors_io import MOST_VIEWS, bytes_of, create, write, write_all
from ndtrain.config import CheckpointConfig, Config
from ndtrain.config.store import StorePath, in_store, store_errors
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
        self.files = files_of(stages, mesh, options, each_rank_alone=in_store(folder))
        self.live = [o.values for o in self.files.owned]

    def write(self, state: State, values: Sequence[Tensor]) -> Path:
        """Write and publish a checkpoint of `values`: the contents of `live` at the time of `state`.

        Raises:
            CheckpointError: as `save`.
        """
        leader = self.mesh.rank == 0
        place = (InStore if in_store(self.folder) else OnDisk)(self.folder / f"step-{state.step:08d}")
        sums = torch.zeros(len(self.files.names), 2, dtype=torch.int64)
        try:
            together(self.mesh, lambda: leader and place.begin())
            together(self.mesh, lambda: place.create(self.files))
            together(self.mesh, lambda: _write_owned(place.folder, self.files, values, sums))
            if self.mesh.background is not None:
                dist.all_reduce(sums, group=self.mesh.background)
            together(self.mesh, lambda: leader and self._publish(place, sums, state))
        except CheckpointError as error:
            if leader:
                place.abandon()
            needed = f"; {self.folder} needs {self.files.size:,} bytes for it" if _lacks_space(str(error)) else ""
            raise CheckpointError(f"checkpoint of step {state.step} not saved: {error}{needed}") from error
        if leader:
            prune(self.folder, self.options.keep, self.options.keep_every)
        return place.final

    def _publish(self, place: "OnDisk", sums: Tensor, state: State) -> None:
        """Write the small files, and publish the checkpoint. Called on rank 0."""
        dtype = str(self.plan.master).removeprefix("torch.")
        with place.small_files() as folder:
            write_json(folder / "config.json", to_hf(self.model) | {"dtype": dtype, "torch_dtype": dtype})
            self.files.write_index(folder)
            self.extras(folder)
            small, facts = facts_of_files(folder, self.files.all)
            body = self._body(facts, sums, state)
            write_json(folder / STATE, body | {"digest": digest(body)})
            place.publish(folder, [*small, STATE])

    def _body(self, facts: dict, sums: Tensor, state: State) -> dict:
        """Return the content of state.json: the run's state, and the sizes and checksums of the other files."""
        mesh = self.mesh
        return {
            "format": FORMAT,
            **asdict(state),
            "seed": self.run["run"]["seed"],
            "mesh": {a: mesh.size(a) for a in mesh.spec.order} | {"zero": self.plan.zero},
            "config": self.run,
            **facts,
            "checksums": {name: as_words(row) for name, row in zip(self.files.names, sums, strict=True)},
        }


def _lacks_space(reason: str) -> bool:
    return any(os.strerror(number) in reason for number in (errno.ENOSPC, errno.EDQUOT))


# -------------------------------------------------------------------------------------------------------------- places


class OnDisk:
    """A checkpoint in a folder, which gets its name when it is complete.

    Args:
        final: the folder with its name.

    Attributes:
        folder: the folder that the ranks write into.
    """

    def __init__(self, final: Path):
        self.final, self.folder = final, final.with_name(f".writing-{final.name}")

    def begin(self) -> None:
        """Make the folder. Called on rank 0."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def create(self, files: Files) -> None:
        """Create the files that this rank creates, before any rank writes into them."""
        for file in files.own:
            create(self.folder / file.name, file)

    @contextmanager
    def small_files(self) -> Iterator[Path]:
        """Give a folder for the files without tensors."""
        yield self.folder

    def publish(self, folder: Path, names: Sequence[str]) -> None:
        """Publish the checkpoint with these files without tensors, of which state.json is the last."""
        publish(folder, self.final, names)

    def abandon(self) -> None:
        """Remove what was written. Called on rank 0."""
        shutil.rmtree(self.folder, ignore_errors=True)


class InStore(OnDisk):
    """A checkpoint in an object store, which exists when its state.json exists.

    Each rank uploads files of its own, from memory.
    """

    def __init__(self, final: Path):
        self.final = self.folder = final

    def begin(self) -> None:
        (self.final / STATE).unlink(missing_ok=True)  # the same step, saved before a resume from an older step

    def create(self, files: Files) -> None:
        pass

    @contextmanager
    def small_files(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="ndtrain-checkpoint-") as folder:
            yield Path(folder)

    def publish(self, folder: Path, names: Sequence[str]) -> None:
        for name in names:
            (self.final / name).write_bytes((folder / name).read_bytes())

    def abandon(self) -> None:
        with suppress(OSError):
            cast(StorePath, self.final).remove_all()


# -------------------------------------------------------------------------------------------------------------- writing


def _write_owned(folder: Path, files: Files, values: Sequence[Tensor], sums: Tensor) -> None:
    """Write this rank's elements and add their checksums to `sums`, whose rows are the tensors of `files.names`."""
    row, headers = {name: i for i, name in enumerate(files.names)}, {file.name: file.header for file in files.own}
    opened: dict[str, _OpenFile | _Upload] = {}
    try:
        for place, whole in zip(files.places, values, strict=True):
            if place.file not in opened:
                path = folder / place.file
                opened[place.file] = _Upload(path, headers[place.file]) if in_store(folder) else _OpenFile(path)
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


class _Upload:
    """An object that is being uploaded. Its elements are written in the order of their places."""

    def __init__(self, path: Path, header: bytes):
        self._path, self._out, self._whole = path, path.open("wb"), False
        self._out.write(header)

    def write(self, data: Tensor, offset: int, rows: Rows) -> None:
        """Write elements as `_OpenFile.write` does."""
        with store_errors(str(self._path)):
            self._out.write(memoryview(bytes_of(data)))

    def flush(self) -> None:
        """Let the object appear with its content."""
        with store_errors(str(self._path)):
            self._out.close()
        self._whole = True

    def close(self) -> None:
        if not self._whole:
            self._out.discard()  # otherwise, what is there would be uploaded
            with suppress(AttributeError):
                self._out.closed = True  # otherwise, the garbage collector tries again


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
