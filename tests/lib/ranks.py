"""Runs a function on n gloo ranks. Each is a fresh process, forked from a server that has torch loaded."""

import multiprocessing as mp
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

_context = mp.get_context("forkserver")
_PRELOADED = [
    "tests.lib.composed", "torch", "torch.distributed", "torch._dynamo", "ndtrain.engine.setup", "ndtrain.train",
    "tests.lib.warm",
]  # fmt: skip
_context.set_forkserver_preload(_PRELOADED)


def run_ranks(fn: Callable, n: int, *args: Any, timeout: float = 120) -> list[Any]:
    """[fn(*args) on rank 0, ... on rank n-1]. With n > 1 the world process group (gloo) exists inside `fn`.

    Raises:
        AssertionError: a rank raised (its traceback is the message), or `timeout` seconds passed without a result.
    """
    with started_ranks(fn, n, *args) as (ranks, folder):
        return _collect(ranks, folder, timeout)


@contextmanager
def started_ranks(fn: Callable, n: int, *args: Any) -> Iterator[tuple[list, Path]]:
    """Yields the n running processes and the folder of their results. The processes are killed at the end of the
    block."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_context.Process(target=_rank, args=(fn, r, n, args, folder), daemon=True) for r in range(n)]
        for p in ranks:
            p.start()
        try:
            yield ranks, Path(folder)
        finally:
            for p in ranks:
                p.kill()
                p.join()


def _collect(ranks: list, folder: Path, timeout: float) -> list[Any]:
    until = time.monotonic() + timeout
    while waiting := [p.sentinel for p in ranks if p.exitcode is None]:
        connection.wait(waiting, max(0.0, until - time.monotonic()))
        if any(p.exitcode for p in ranks):  # the others may wait for that one, or fail for the same reason
            until = min(until, time.monotonic() + 5)
        if time.monotonic() >= until:
            break
    results = []
    for r, p in enumerate(ranks):
        path = folder / f"result-{r}"
        assert path.exists(), f"rank {r} of {len(ranks)} ended without a result (exit code {p.exitcode})" + _failures(
            folder
        )
        results.append(pickle.loads(path.read_bytes()))
    return results


def _failures(folder: Path) -> str:
    return "".join(f"\n--- {p.name}\n{p.read_text()}" for p in sorted(folder.glob("error-*")))


def _rank(fn: Callable, rank: int, n: int, args: tuple, folder: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n))
    try:
        if n > 1:
            store = dist.FileStore(f"{folder}/store", n)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=timedelta(seconds=60))
        result = pickle.dumps(fn(*args))
        Path(folder, f"writing-{rank}").write_bytes(result)
        os.rename(f"{folder}/writing-{rank}", f"{folder}/result-{rank}")
        if n > 1:
            dist.destroy_process_group()
        os._exit(0)
    except BaseException:
        Path(folder, f"error-{rank}").write_text(traceback.format_exc())
        os._exit(1)
