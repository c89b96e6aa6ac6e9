"""Starts the ranks of a benchmark on this machine, one thread each, and collects what rank 0 found."""

import multiprocessing as mp
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ndtrain.metrics import keep_freed_memory

TIMED_OUT = "not done within the limit"


class RankFailed(RuntimeError):
    """A rank ended without a result; the message holds its traceback."""


def run_ranks(fn: Callable, ranks: int, *args: Any, backend: str = "gloo", limit_s: float | None = None) -> Any:
    """`fn(rank, *args)` in `ranks` fresh processes; rank 0's result. With more than one rank the world process group
    exists inside `fn`.

    Args:
        backend: of that group. limit_s: seconds that the ranks may take together; None: any.

    Raises:
        RankFailed: a rank raised or died, or the time is over; the others are ended.
    """
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        starts = [(fn, rank, ranks, args, Path(folder), backend) for rank in range(ranks)]
        processes = [context.Process(target=_rank, args=start, daemon=True) for start in starts]
        for p in processes:
            p.start()
        try:
            _wait(processes, Path(folder), limit_s)
        finally:
            for p in processes:
                p.kill()
                p.join()
        return pickle.loads((Path(folder) / "result").read_bytes())


def _wait(processes: Sequence[mp.Process], folder: Path, limit_s: float | None) -> None:
    """Until all have ended well, or one has not."""
    running = {p.sentinel: rank for rank, p in enumerate(processes)}
    end = None if limit_s is None else time.monotonic() + limit_s
    while running:
        ended = connection.wait(list(running), None if end is None else max(0, end - time.monotonic()))
        if not ended:
            raise RankFailed(f"{TIMED_OUT} of {limit_s:g} s")
        for sentinel in ended:
            rank = running.pop(sentinel)
            processes[rank].join()
            if processes[rank].exitcode:
                error = folder / f"error-{rank}"
                why = error.read_text() if error.exists() else f"exit code {processes[rank].exitcode}"
                raise RankFailed(f"rank {rank} failed: {why}")


def _rank(fn: Callable, rank: int, ranks: int, args: Sequence[Any], folder: Path, backend: str) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()  # as train.py does; here for all sides
    code = 1
    try:
        if ranks > 1:
            store = dist.FileStore(str(folder / "store"), ranks)
            dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
        result = fn(rank, *args)
        if rank == 0:
            (folder / "result").write_bytes(pickle.dumps(result))
        if ranks > 1:
            dist.barrier()  # a rank that leaves early takes its connections with it
            dist.destroy_process_group()
        code = 0
    except BaseException:
        (folder / f"error-{rank}").write_text(traceback.format_exc())
    finally:
        sys.stdout.flush()
        os._exit(code)  # gloo's threads abort about every second run in Python's own teardown
