"""Optimizer state in host memory: unit by unit, gradients are copied to the host and weights to the device, as in
ZeRO-Offload (Ren et al., 2021, arXiv:2101.06840)."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ndtrain.mesh.host_device import host_threads, page_locked, using_threads
from ndtrain.parallel.fsdp import ShardedUnits


class _CopyStream:
    """One direction of the link: copies run in order, in parallel with the compute stream. On a CPU they are made at
    once.

    Args:
        slots: the largest number of copies in flight.
    """

    def __init__(self, device: torch.device, slots: int):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ends: list[torch.cuda.Event | None] = [None] * slots

    def begin(self) -> None:
        """Order the next copies after all work that is queued on the compute stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def copy(self, slot: int, to: Tensor, source: Tensor) -> None:
        if self._stream is None:
            to.copy_(source)
            return
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
            self._ends[slot] = self._stream.record_event()

    def wait(self, slot: int) -> None:
        """Make the host wait for the slot's last copy."""
        if self._ends[slot] is not None:
            self._ends[slot].synchronize()

    def end(self) -> None:
        """Order all later work of the compute stream after all copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


# units in flight in each direction: while one is updated, the gradients of the next one arrive and the weights of the
# previous one leave
_SLOTS = 2


class OffloadCopier:
    """Copies the units' gradients to the host, and their new weights, in compute precision, to the device.

    Attributes:
        gradients: one tensor per unit, in host memory. Units i and i + 2 share memory.
    """

    def __init__(self, units: ShardedUnits):
        self.units = list(units.units.values())
        largest = max(u.grad.numel() for u in self.units)
        # only the buffers of the copies are pinned: the state itself is many times as large
        pinned = units.device.type == "cuda"
        plain = partial(torch.empty, device=units.state_device)
        make = lambda dtype: page_locked(largest, dtype, self) if pinned else plain(largest, dtype=dtype)
        buffers = lambda dtype: [make(dtype) for _ in range(_SLOTS)]
        grads, weights = buffers(units.master), buffers(units.compute)
        self.gradients = [grads[i % _SLOTS][: u.grad.numel()] for i, u in enumerate(self.units)]
        self._weights = [weights[i % _SLOTS][: u.grad.numel()] for i, u in enumerate(self.units)]
        self._threads = host_threads(units.device)
        self._down, self._up = _CopyStream(units.device, _SLOTS), _CopyStream(units.device, _SLOTS)

    def run(self, update: Callable[[int], object]) -> None:
        """Call `update(i)` when the gradients of unit i are on the host, then copy its weights to the device. PyTorch's
        operators on the host use the rank's share of the cores."""

        def send_weights(i: int) -> None:
            self._up.wait(i % _SLOTS)  # its memory held the weights of another unit
            self._weights[i].copy_(self.units[i].master)
            self._up.copy(i % _SLOTS, self.units[i].gather_source, self._weights[i])

        self._each(update, send_weights)

    def run_on_gradients(self, change: Callable[[int], object]) -> None:
        """Call `change(i)` when the gradients of unit i are on the host, then copy them back to the device."""
        send_gradients = lambda i: self._up.copy(i % _SLOTS, self.units[i].grad, self.gradients[i])
        self._each(change, send_gradients, returns=True)

    def _each(self, work: Callable[[int], object], send: Callable[[int], None], returns: bool = False) -> None:
        """Call `work(i)` and `send(i)` for each unit, when its gradients are on the host.

        Args:
            returns: True if gradients are sent from where they arrive.
        """
        with using_threads(self._threads):
            self._down.begin()
            self._up.begin()
            self._bring(0)
            for i in range(len(self.units)):
                self._down.wait(i % _SLOTS)
                if returns:
                    self._up.wait((i + 1) % _SLOTS)
                if i + 1 < len(self.units):
                    self._bring(i + 1)
                work(i)
                send(i)
            self._up.end()

    def _bring(self, i: int) -> None:
        self._down.copy(i % _SLOTS, self.gradients[i], self.units[i].grad)
