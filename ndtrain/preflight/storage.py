"""Checks of the run folder: every rank can write to it, how fast, all see the same folder, and the checkpoints fit."""

import errno
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from ndtrain.checkpoint.directory import list_checkpoints
from ndtrain.checkpoint.elements import checkpoint_bytes
from ndtrain.config import Config
from ndtrain.config.store import checkpoint_folder, in_store
from ndtrain.parallel.build import state_plan
from ndtrain.preflight.rank_context import Findings, RankContext
from ndtrain.preflight.report import Ranks, Row, Status, bytes_of, per_second, slow, usual_rate

MOST = 32 << 20  # most bytes that one rank writes
ALL = 8 << 30  # most bytes that all ranks write together, but each writes at least LEAST
LEAST = 1 << 20
BLOCK = 1 << 20
ENOUGH_S = 4.0  # seconds after which a rank stops writing, or reading
PATIENCE_S = 5.0  # a shared file system may show a new file to other hosts a moment late
SLOW = (0.0, 0.2)  # shares of the usual rate: disks vary, so a slow one gives a warning, not a failure
FULL = 0.9  # share of the free space above which the check warns

# ---------------------------------------------------------------------------------------------------------- free space


def planned_bytes(cfg: Config, folder: Path) -> int:
    """Return the bytes that the run's checkpoints will take in addition to those already in the folder. Counts the
    checkpoints that are kept, and one more that is written before the oldest is deleted."""
    count = cfg.checkpoint.keep + 1
    if cfg.checkpoint.keep_every:
        count += cfg.train.steps // cfg.checkpoint.keep_every
    there = sum(p.stat().st_size for step in list_checkpoints(folder) for p in step.rglob("*") if p.is_file())
    return max(0, count * checkpoint_bytes(cfg.model, state_plan(cfg)) - there)


def probe_space(context: RankContext) -> Findings:
    folder = checkpoint_folder(context.cfg)
    if in_store(folder):
        return {}
    usage = shutil.disk_usage(_existing(folder))
    planned = planned_bytes(context.cfg, folder) if context.rank == 0 else 0
    return {"free": usage.free, "planned": planned, "folder": str(folder)}


def _existing(path: Path) -> Path:
    """Return the path, or its nearest parent folder that exists."""
    path = path.absolute()
    return next(p for p in (path, *path.parents) if p.exists())


def check_space(by_rank: dict[int, Findings], ranks: Ranks, cfg: Config) -> list[Row]:
    if not by_rank[0]:
        return [Row("disk space", Status.OK, f"checkpoints are saved in {cfg.checkpoint.folder}", "")]
    planned, one = by_rank[0]["planned"], bytes_of(checkpoint_bytes(cfg.model, state_plan(cfg)))
    short = {
        r: f"{f['folder']} has {bytes_of(f['free'])} free: free some, lower checkpoint.keep={cfg.checkpoint.keep}, "
        "or set run.dir"
        for r, f in by_rank.items()
        if planned > FULL * f["free"]
    }
    failed = any(planned > by_rank[r]["free"] for r in short)
    status = Status.FAILED if failed else Status.WARNING if short else Status.OK
    free = bytes_of(min(f["free"] for f in by_rank.values()))
    figure = f"{bytes_of(planned)} needed for checkpoints of {one}, {free} free"
    return [Row("disk space", status, figure, ranks.grouped(short))]


# ------------------------------------------------------------------------------------------------------- write and read


def file_of(context: RankContext, rank: int) -> Path:
    """Return the path of the file that a rank writes: hidden, and unique to this preflight."""
    return context.run_dir / f".preflight-{context.nonce}-{rank}"


def probe_storage(context: RankContext) -> Findings:
    """Write, flush and read a file. The file stays so that other ranks can look for it."""
    try:
        context.run_dir.mkdir(parents=True, exist_ok=True)
        return _write_and_read(context, file_of(context, context.rank))
    except OSError as error:
        raise OSError(f"run.dir={context.run_dir} cannot be used ({error.strerror})") from error


def _write_and_read(context: RankContext, path: Path) -> Findings:
    size = max(LEAST, min(MOST, ALL // context.spec.world_size))
    draw = np.random.default_rng(context.rank)
    blocks = [draw.bytes(BLOCK) for _ in range(4)]  # no file system can compress them
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        began = time.perf_counter()
        written = _each(size, lambda i: os.pwrite(fd, blocks[i % 4], i * BLOCK) == BLOCK)
        os.fsync(fd)
        write_s = time.perf_counter() - began
        if hasattr(os, "posix_fadvise"):  # drops it from the page cache, so that it is read from the disk
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        right = _each(written, lambda i: os.pread(fd, BLOCK, i * BLOCK) == blocks[i % 4])
        read_s = time.perf_counter() - began
    finally:
        os.close(fd)
    if written == 0 or right == 0:
        raise OSError(errno.EIO, "the data read differs from the data written")
    return {"write": written / write_s, "read": right / read_s}


def _each(size: int, move: Callable[[int], bool]) -> int:
    """Move blocks until `size` bytes are moved or the time is up. Return the bytes moved, or 0 if a move was wrong."""
    began, done = time.perf_counter(), 0
    while done < size and time.perf_counter() - began < ENOUGH_S:
        if not move(done // BLOCK):
            return 0
        done += BLOCK
    return done


def check_storage(by_rank: dict[int, Findings], ranks: Ranks, cfg: Config) -> list[Row]:
    notes, figures, status = [], [], Status.OK
    for way in ("write", "read"):
        rates = {r: f[way] for r, f in by_rank.items()}
        _, odd = slow(rates, usual_rate(rates.values()), *SLOW)
        notes += [f"slow {way}, {per_second(rates[r])}: {ranks.one(r)}" for r in odd]
        figures.append(f"{way} {per_second(min(rates.values()))} to {per_second(max(rates.values()))}")
        status = Status.WARNING if notes else Status.OK
    return [Row("storage", status, f"{', '.join(figures)} per rank, in {cfg.run.dir}", tuple(notes))]


# ----------------------------------------------------------------------------------------------------------- one folder


def probe_folder(context: RankContext) -> Findings:
    """Check that this rank sees the file that rank 0 has written."""
    path, until = file_of(context, 0), time.monotonic() + PATIENCE_S
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.1)
    if not path.exists():
        raise OSError(
            f"{context.cfg.run.dir} is not the same folder as on rank 0: put run.dir on storage that all hosts share"
        )
    return {}


def check_folder(by_rank: dict[int, Findings], ranks: Ranks, cfg: Config) -> list[Row]:
    return [Row("one folder", Status.OK, f"all ranks see the same {cfg.run.dir}")]


# ------------------------------------------------------------------------------------------------------------- clean up


class Cleaner:
    """Removes what a preflight leaves: its file, and the folders that did not exist when this object was made."""

    def __init__(self, context: RankContext):
        self._context, self._file = context, file_of(context, context.rank)
        self._new = [p for p in (context.run_dir, *context.run_dir.parents) if not p.exists()]

    def remove_file(self) -> None:
        with suppress(OSError):
            self._file.unlink(missing_ok=True)

    def remove_folders(self) -> None:
        """Remove the new folders that are empty. Call it once every rank has removed its file. Rank 0 also removes the
        files of dead ranks."""
        if self._context.rank == 0:
            for path in self._context.run_dir.glob(file_of(self._context, 0).name[:-1] + "*"):
                with suppress(OSError):
                    path.unlink()
        for path in self._new:
            with suppress(OSError):
                path.rmdir()
