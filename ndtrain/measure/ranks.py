"""Starts the ranks of a bench on this machine, with one thread each, or uses the ranks that torchrun has started.
Collects rank 0's result."""

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
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist

from ndtrain.config import ConfigError, world_from_env
from ndtrain.device.cores import cpu_cores
from ndtrain.mesh.json_messages import all_gather_json
from ndtrain.observe import grow_segments, keep_freed_memory
from ndtrain.run import rendezvous
from ndtrain.run.listeners import choose_interface

Backend = Literal["auto", "gloo", "nccl"]
Device = Literal["auto", "cpu", "cuda"]
DEVICE_HELP = "auto: cuda if torch can use a GPU"
GROUPS = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"}  # with NCCL the benches' own small messages stay on the CPU
TIMEOUT_S = 120
TIMED_OUT = "not done within the limit"


class RankFailed(RuntimeError):
    """A rank ended without a result; the message contains its traceback."""


class WrongResult(RuntimeError):
    """A measured computation gave a wrong result; the message names it."""


def launched() -> bool:
    """Return True if torchrun has started several ranks."""
    return world_from_env()[2] > 1


def usable_backend(backend: Backend, here: int) -> str:
    """Return gloo or nccl, for `here` ranks on this host. auto: nccl if each rank has a GPU.

    Raises:
        ConfigError: nccl cannot work here; the message gives the reason in one line.
    """
    gpus = torch.cuda.device_count()
    missing = "this PyTorch has no NCCL" if not dist.is_nccl_available() else ""
    missing = missing or (
        f"{here} ranks on this host but {gpus} GPUs, and each rank needs its own" if gpus < here else ""
    )
    if backend == "nccl" and missing:
        raise ConfigError(f"backend=nccl: {missing}; use backend=gloo, which runs on CPUs")
    return "gloo" if backend == "gloo" or missing else "nccl"


def choose_device(device: str) -> str:
    """Return cpu or cuda. auto: cuda if this machine has a GPU.

    Raises:
        ConfigError: device=cuda, but there is no GPU.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda: this machine has no CUDA device that torch can use; set it to cpu or auto")
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def device_under(backend: str) -> torch.device:
    """Return this rank's device for a backend. Call it within `run_ranks` or `on_ranks`."""
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")


def rank_device(rank: int, device: str) -> torch.device:
    """Return the device of a rank, cpu or cuda, and make it the current device."""
    if device == "cpu":
        return torch.device("cpu")
    grow_segments()
    torch.cuda.set_device(rank)
    torch.set_num_threads(max(1, cpu_cores() // torch.cuda.device_count()))  # for work that is offloaded to the host
    return torch.device("cuda", rank)


def on_ranks(fn: Callable, ranks: int, *args: Any, backend: str = "gloo") -> Any:
    """Run `fn(rank, *args)` in this process if torchrun started it as a rank; otherwise call `run_ranks`. Return the
    result on rank 0, None on the others.

    Raises:
        RankFailed: a rank raised, or a rank that was started here died.
    """
    if not launched():
        return run_ranks(fn, ranks, *args, backend=backend)
    rank, local_rank, world = world_from_env()
    torch.set_num_threads(1)
    keep_freed_memory()
    if backend == "nccl":
        torch.cuda.set_device(local_rank)
    try:
        rendezvous.join(GROUPS[backend], rank, world, TIMEOUT_S, device_under(backend))
        result = fn(rank, *args)
        dist.barrier()
    except Exception as error:  # no group is destroyed: gloo would wait for messages that peers will never send
        raise RankFailed(f"rank {rank} failed: {traceback.format_exc()}") from error
    dist.destroy_process_group()
    return result if rank == 0 else None


def from_all_ranks(value: Any) -> list[Any]:
    """Return the values of all ranks, as JSON represents them. Call it within `on_ranks` or `run_ranks`, with more than
    one rank."""
    group = dist.group.WORLD
    assert group is not None
    return all_gather_json(value, group, torch.device("cpu"))


def exit_process(code: int) -> NoReturn:
    """End this process. A rank that torchrun started skips Python's own teardown, in which gloo's threads abort about
    every second time."""
    if not launched():
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_ranks(fn: Callable, ranks: int, *args: Any, backend: str = "gloo", limit_s: float | None = None) -> Any:
    """Run `fn(rank, *args)` in `ranks` fresh processes and return rank 0's result. With more than one rank the world
    process group exists inside `fn`. With nccl, rank r has GPU r.

    Args:
        backend: gloo or nccl.
        limit_s: seconds that the ranks may take; None: no limit.

    Raises:
        RankFailed: a rank raised or died, or the time is over; the other ranks are killed.
    """
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        starts = [(fn, rank, ranks, args, backend, Path(folder)) for rank in range(ranks)]
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


def run_launches(launches: int, jobs: Sequence[Sequence[Any]], backend: str) -> list[list[tuple]]:
    """Run several jobs in turn, `launches` times each. A slow minute of the machine then affects one launch of each
    job.

    Args:
        jobs: the arguments of `run_ranks` for each job: the function, the number of ranks and further arguments. The
            function returns a sequence.

    Returns:
        For each job and each position in its sequence, the items of all launches.
    """
    results: list[list[Sequence]] = [[] for _ in jobs]
    for _ in range(launches):
        for of_job, job in zip(results, jobs, strict=True):
            of_job.append(run_ranks(*job, backend=backend))
    return [list(zip(*of_job, strict=True)) for of_job in results]


def _wait(processes: Sequence[mp.Process], folder: Path, limit_s: float | None) -> None:
    """Wait until all processes have ended. Raise as soon as one has failed."""
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


def _rank(fn: Callable, rank: int, ranks: int, args: Sequence[Any], backend: str, folder: Path) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()  # as train.py does; here for every implementation
    code = 1
    try:
        if backend == "nccl":
            torch.cuda.set_device(rank)
        if ranks > 1:
            choose_interface(one_host=True)
            store = dist.FileStore(str(folder / "store"), ranks)
            timeout = timedelta(seconds=TIMEOUT_S)
            dist.init_process_group(GROUPS[backend], store=store, rank=rank, world_size=ranks, timeout=timeout)
        result = fn(rank, *args)
        if rank == 0:
            (folder / "result").write_bytes(pickle.dumps(result))
        if ranks > 1:
            dist.barrier()  # a rank that exits early closes its connections
            dist.destroy_process_group()
        code = 0
    except BaseException:
        (folder / f"error-{rank}").write_text(traceback.format_exc())
    finally:
        sys.stdout.flush()
        if ranks > 1:
            os._exit(code)  # gloo's threads abort about every second run in Python's own teardown
        sys.exit(code)
