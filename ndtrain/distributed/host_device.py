"""Copies between host and device without a device synchronisation.

A copy between pageable memory and the device waits for all work queued on the device. A copy between page-locked
memory and the device is queued like any other work. On a CPU there is nothing to copy.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ndtrain.distributed.collectives import Group, Pending, all_gather_row, size
from ndtrain.distributed.flight_recorder import RECORDER


def upload(numbers: Sequence[float], device: torch.device) -> Tensor:
    """A tensor of the numbers, fp64 [k], on the device."""
    on_host = torch.tensor(numbers, dtype=torch.float64, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)


def gather_numbers(numbers: Sequence[float], group: Group, device: torch.device) -> Tensor:
    """Every rank's numbers, fp64 [ranks, k] in host memory. On the meta device there are no other ranks: all are taken
    to have this rank's.

    Args:
        device: of the rank, where the numbers travel.
    """
    if device.type == "meta":
        return torch.tensor(numbers, dtype=torch.float64).expand(size(group), -1)
    rows, work = all_gather_row(upload(numbers, device), group)
    work.wait()
    return rows.cpu()


class Readback:
    """An asynchronous copy of tensors of one device to host memory.

    Args:
        pending: the operation that produces them.
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
        """The tensors in host memory, with their values at construction. It waits for the copy, not for device work
        queued later.

        Args:
            name: the name of this wait in the flight recorder.
        """
        self._pending.wait()
        if self._copied is not None:
            with RECORDER.waiting(name):
                self._copied.synchronize()
        return self._tensors
