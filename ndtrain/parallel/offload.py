"""Optimizer state in host memory: gradients go there and weights come back, unit by unit, as in ZeRO-Offload (Ren et
al., 2021, arXiv:2101.06840)."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ndtrain.distributed.host_device import host_threads, page_locked, using_threads
from ndtrain.parallel.fsdp import ShardedUnits


class _CopyStream:
    """One direction of the link: copies in their order, beside the computing stream. On a CPU they are made at once.

    Args:
        slots: how many copies at most are not waited for.
    """

    def __init__(self, device: torch.device, slots: int):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ends: list[torch.cuda.Event | None] = [None] * slots

    def begin(self) -> None:
        """What follows is behind all that the computing stream has been asked for."""
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
        """The host waits for the slot's last copy."""
        if self._ends[slot] is not None:
            self._ends[slot].synchronize()

    def end(self) -> None:
        """What the computing stream is asked for from now on is behind all copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


_SLOTS = 2  # units under way each way: one is updated while the next one's gradients come and the last one's weights go


class OffloadCopier:
    """Takes units' gradients to the host and their new weights, in compute precision, to the device.

    Attributes:
        gradients: in the host's memory, one of each unit; every other unit shares the memory.
    """

    def __init__(self, units: ShardedUnits):
        self.units = list(units.units.values())
        largest = max(u.grad.numel() for u in self.units)
        # only what copies pass through is pinned: the state itself is many times as large
        pinned = units.device.type == "cuda"
        plain = partial(torch.empty, device=units.state_device)
        make = lambda dtype: page_locked(largest, dtype, self) if pinned else plain(largest, dtype=dtype)
        buffers = lambda dtype: [make(dtype) for _ in range(_SLOTS)]
        grads, weights = buffers(units.master), buffers(units.compute)
        self.gradients = [grads[i % _SLOTS][: u.grad.numel()] for i, u in enumerate(self.units)]
        self._weights = [weights[i % _SLOTS][: u.grad.numel()] for i, u in enumerate(self.units)]
        self._threads = host_threads(units.device)
        self._down, self._up = _CopyStream(units.device, _SLOTS), _CopyStream(units.device, _SLOTS)

    def run(self, update: Callable[[int], None]) -> None:
        """Calls `update(i)` when the gradients of unit i are on the host, and then brings its weights back. The host's
        operators run on the rank's share of its cores."""
        with using_threads(self._threads):
            self._run(update)

    def _run(self, update: Callable[[int], None]) -> None:
        self._down.begin()
        self._up.begin()
        self._bring(0)
        for i, unit in enumerate(self.units):
            self._down.wait(i % _SLOTS)
            if i + 1 < len(self.units):
                self._bring(i + 1)
            update(i)
            self._up.wait(i % _SLOTS)  # its memory was another unit's
            self._weights[i].copy_(unit.master)
            self._up.copy(i % _SLOTS, unit.gather_source, self._weights[i])
        self._up.end()

    def _bring(self, i: int) -> None:
        self._down.copy(i % _SLOTS, self.gradients[i], self.units[i].grad)
