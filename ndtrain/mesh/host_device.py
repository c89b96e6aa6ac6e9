"""Copies between host and device without a device synchronisation.

A copy between pageable memory and the device waits for all work queued on the device. A copy between page-locked
memory and the device is queued like any other work. On a CPU there is nothing to copy.
"""

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ndtrain.device.cores import cpu_cores
from ndtrain.mesh.collectives import Group, Pending, all_gather_around, size
from ndtrain.mesh.flight_recorder import RECORDER


def upload(numbers: Sequence[float], device: torch.device) -> Tensor:
    """Return the numbers as a tensor on the device, fp64 [k]."""
    on_host = torch.tensor(numbers, dtype=torch.float64, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)


def host_threads(device: torch.device) -> int:
    """Return the number of host threads that a rank has for work of its own. On a CPU it is PyTorch's number, which the
    user sets by OMP_NUM_THREADS. On a GPU machine torchrun sets that number to 1, although the cores are idle. There a
    rank gets its share of the cores."""
    threads = torch.get_num_threads()
    if device.type == "cpu" or threads > 1:
        return threads
    return max(1, cpu_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def page_locked(numel: int, dtype: torch.dtype, owner: object) -> Tensor:
    """Allocate zeros [numel] in host memory that stays page-locked as long as `owner` lives. PyTorch's own page-locked
    memory comes in powers of two: 96 GB would take 128 GiB. This is ordinary memory that is registered with CUDA.

    Raises:
        RuntimeError: CUDA refuses, because of `ulimit -l` or because the memory cannot be locked.
    """
    buffer = torch.zeros(numel, dtype=dtype)
    if numel:
        cudart = torch.cuda.cudart()
        torch.cuda.check_error(cudart.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 1))
        weakref.finalize(owner, cudart.cudaHostUnregister, buffer.data_ptr()).atexit = False
    return buffer


@contextmanager
def using_threads(number: int) -> Iterator[None]:
    """Run the block with `number` host threads for PyTorch's operators."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def gather_numbers(numbers: Sequence[float], group: Group, device: torch.device) -> Tensor:
    """Gather the numbers of every rank, fp64 [ranks, k] in host memory. On the meta device there are no other ranks:
    every rank is assumed to have this rank's numbers.

    Args:
        device: the rank's device, on which the numbers are sent.
    """
    if device.type == "meta":
        return torch.tensor(numbers, dtype=torch.float64).expand(size(group), -1)
    rows, work = all_gather_around(upload(numbers, device), group)
    work.wait()
    return rows.cpu()


class Readback:
    """An asynchronous copy of tensors from one device to host memory.

    Args:
        pending: the operation that produces the tensors.
        tensors: all on one device.
    """

    def __init__(self, pending: Pending, *tensors: Tensor):
        self._pending, self._tensors, self._copied = pending, tensors, None
        if tensors[0].is_cuda:
            pending.wait()  # the stream waits, not the host
            self._tensors = tuple(x.to("cpu", non_blocking=True) for x in tensors)
            self._copied = torch.cuda.Event(blocking=True)
            self._copied.record()

    def wait(self, name: str) -> tuple[Tensor, ...]:
        """Wait for the copy. Return the tensors in host memory, with their values at construction. Device work that is
        queued later is not waited for.

        Args:
            name: the name of this wait in the flight recorder.
        """
        self._pending.wait()
        if self._copied is not None:
            with RECORDER.waiting(name, on_device=True):
                self._copied.synchronize()
        return self._tensors
