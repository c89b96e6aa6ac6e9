"""The run folder: whether every rank writes it, how fast, whether it is one folder, and whether the checkpoints fit."""

import errno
import math
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from ndtrain.checkpoint.directory import list_checkpoints
from ndtrain.checkpoint.elements import parts_of
from ndtrain.config import Config
from ndtrain.model import tensor_shapes
from ndtrain.parallel.build import state_plan
from ndtrain.preflight.rank_context import Found, RankContext
from ndtrain.preflight.report import Ranks, Row, Status, bytes_of, per_second, slow, usual_rate

MOST = 32 << 20  # bytes that a rank writes
ALL = 8 << 30  # bytes that all ranks together write, at most; but LEAST each
LEAST = 1 << 20
BLOCK = 1 << 20
ENOUGH_S = 4.0  # no more is written, or read, once it has taken so long
PATIENCE_S = 5.0  # a shared file system may show a file to other hosts a moment late
SLOW = (0.0, 0.2)  # shares of the usual rate: disks vary, so there is a warning, and no failure
FULL = 0.9  # share of the free space above which there is a warning

# ---------------------------------------------------------------------------------------------------------- free space


def checkpoint_bytes(cfg: Config) -> int:
    """Of one checkpoint: weights, the average of the weights if there is one, and the optimizer's state."""
    shapes = tensor_shapes(cfg.model).values()
    parts = [part for of_stem in parts_of(state_plan(cfg)).values() for part in of_stem]
    numel = lambda part: sum(math.prod(part.spec.shape_of(s) if part.spec else s) for s in shapes)
    return sum(numel(part) * part.dtype.itemsize for part in parts)


def planned_bytes(cfg: Config, folder: Path) -> int:
    """What the run will take beyond what is in its folder of checkpoints already: those that stay, and one that is
    being written before the oldest goes."""
    count = cfg.checkpoint.keep + 1
    if cfg.checkpoint.keep_every:
        count += cfg.train.steps // cfg.checkpoint.keep_every
    there = sum(p.stat().st_size for step in list_checkpoints(folder) for p in step.rglob("*") if p.is_file())
    return max(0, count * checkpoint_bytes(cfg) - there)


def probe_space(context: RankContext) -> Found:
    folder = context.run_dir / "checkpoints"
    usage = shutil.disk_usage(_existing(folder))
    planned = planned_bytes(context.cfg, folder) if context.rank == 0 else 0
    return {"free": usage.free, "planned": planned, "folder": str(folder)}


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    path = path.absolute()
    return next(p for p in (path, *path.parents) if p.exists())


def judge_space(found: dict[int, Found], ranks: Ranks, cfg: Config) -> list[Row]:
    planned, one = found[0]["planned"], bytes_of(checkpoint_bytes(cfg))
    short = {
        r: f"{f['folder']} has {bytes_of(f['free'])} free: free some, lower checkpoint.keep={cfg.checkpoint.keep}, "
        "or set run.dir"
        for r, f in found.items()
        if planned > FULL * f["free"]
    }
    failed = any(planned > found[r]["free"] for r in short)
    status = Status.FAILED if failed else Status.WARNING if short else Status.OK
    free = bytes_of(min(f["free"] for f in found.values()))
    figure = f"{bytes_of(planned)} needed for checkpoints of {one}, {free} free"
    return [Row("disk space", status, figure, ranks.grouped(short))]


# ------------------------------------------------------------------------------------------------------- write and read


def file_of(context: RankContext, rank: int) -> Path:
    """The file that a rank writes: hidden, and of this preflight only."""
    return context.run_dir / f".preflight-{context.nonce}-{rank}"


def probe_storage(context: RankContext) -> Found:
    """Writes, flushes and reads a file; it stays for others to see."""
    try:
        context.run_dir.mkdir(parents=True, exist_ok=True)
        return _write_and_read(context, file_of(context, context.rank))
    except OSError as error:
        raise OSError(f"run.dir={context.run_dir} cannot be used ({error.strerror})") from error


def _write_and_read(context: RankContext, path: Path) -> Found:
    size = max(LEAST, min(MOST, ALL // context.spec.world_size))
    draw = np.random.default_rng(context.rank)
    blocks = [draw.bytes(BLOCK) for _ in range(4)]  # which no file system can make smaller
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        began = time.perf_counter()
        written = _each(size, lambda i: os.pwrite(fd, blocks[i % 4], i * BLOCK) == BLOCK)
        os.fsync(fd)
        write_s = time.perf_counter() - began
        if hasattr(os, "posix_fadvise"):  # so that it is read from the disk
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        right = _each(written, lambda i: os.pread(fd, BLOCK, i * BLOCK) == blocks[i % 4])
        read_s = time.perf_counter() - began
    finally:
        os.close(fd)
    if written == 0 or right == 0:
        raise OSError(errno.EIO, "what is read is not what was written")
    return {"write": written / write_s, "read": right / read_s}


def _each(size: int, move: Callable[[int], bool]) -> int:
    """Bytes moved, block by block, until that is all or has taken long enough; 0 where a move was wrong."""
    began, done = time.perf_counter(), 0
    while done < size and time.perf_counter() - began < ENOUGH_S:
        if not move(done // BLOCK):
            return 0
        done += BLOCK
    return done


def judge_storage(found: dict[int, Found], ranks: Ranks, cfg: Config) -> list[Row]:
    notes, figures, status = [], [], Status.OK
    for way in ("write", "read"):
        rates = {r: f[way] for r, f in found.items()}
        _, odd = slow(rates, usual_rate(rates.values()), *SLOW)
        notes += [f"slow {way}, {per_second(rates[r])}: {ranks.one(r)}" for r in odd]
        figures.append(f"{way} {per_second(min(rates.values()))} to {per_second(max(rates.values()))}")
        status = Status.WARNING if notes else Status.OK
    return [Row("storage", status, f"{', '.join(figures)} a rank, in {cfg.run.dir}", tuple(notes))]


# ----------------------------------------------------------------------------------------------------------- one folder


def look_for_rank_0(context: RankContext) -> Found:
    """Whether this rank sees what rank 0 has written."""
    path, until = file_of(context, 0), time.monotonic() + PATIENCE_S
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.1)
    if not path.exists():
        raise OSError(
            f"{context.cfg.run.dir} is another folder than rank 0's: put run.dir on storage that all hosts share"
        )
    return {}


def judge_folder(found: dict[int, Found], ranks: Ranks, cfg: Config) -> list[Row]:
    return [Row("one folder", Status.OK, f"all ranks see the same {cfg.run.dir}")]


# ------------------------------------------------------------------------------------------------------------- clean up


class Cleaner:
    """Takes away what a preflight leaves: its file, and the folders that were not there when this was made."""

    def __init__(self, context: RankContext):
        self._place, self._file = context, file_of(context, context.rank)
        self._new = [p for p in (context.run_dir, *context.run_dir.parents) if not p.exists()]

    def remove_file(self) -> None:
        with suppress(OSError):
            self._file.unlink(missing_ok=True)

    def remove_folders(self) -> None:
        """Those that are empty, once every rank has removed its file; a dead rank's goes here."""
        if self._place.rank == 0:
            for path in self._place.run_dir.glob(file_of(self._place, 0).name[:-1] + "*"):
                with suppress(OSError):
                    path.unlink()
        for path in self._new:
            with suppress(OSError):
                path.rmdir()
