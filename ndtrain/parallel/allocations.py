"""The memory of a program, followed operator by operator: the live storages, their bytes, and the peak."""

from collections.abc import Iterable
from weakref import finalize

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ndtrain.model.opaque import FUNCTIONS


def storage_id(x: Tensor) -> int:
    """Return a number that identifies the storage of x among the live ones. It also works on the meta device, where
    storages have no address."""
    return x.untyped_storage()._cdata


class Allocations(TorchDispatchMode):
    """A record of the storages that operators allocate: their bytes `now`, and their `peak_bytes`. It does not see what
    kernels allocate and free internally, nor what compiled code allocates.

    Args:
        device_type: the type of device whose storages are followed; None: all devices.
    """

    def __init__(self, device_type: str | None = None) -> None:
        super().__init__()
        self.device_type = device_type
        self.now = self.peak_bytes = 0
        self._sizes: dict[int, int] = {}
        self._resized: dict[int, torch.UntypedStorage] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True to PyTorch, which otherwise compiles nothing while memory is followed."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in FUNCTIONS:
            with self:
                return FUNCTIONS[func](*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        given = {storage_id(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        self._read_sizes()
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and self._follows(x) and storage_id(x) not in given:
                self._allocated(x)
        return out

    def resizes(self, tensors: Iterable[Tensor]) -> None:
        """Register tensors whose storages the program resizes. No operator shows such a resize."""
        for x in tensors:
            if storage_id(x) not in self._sizes:
                self._add(x.untyped_storage())
            self._resized[storage_id(x)] = x.untyped_storage()

    def _follows(self, x: Tensor) -> bool:
        return self.device_type is None or x.device.type == self.device_type

    def _allocated(self, x: Tensor) -> None:
        if storage_id(x) not in self._sizes and x.untyped_storage().nbytes():
            self._add(x.untyped_storage())

    def _add(self, storage: torch.UntypedStorage) -> None:
        self._sizes[storage._cdata] = 0
        self._set_size(storage._cdata, storage.nbytes())
        finalize(storage, self._freed, storage._cdata)

    def _read_sizes(self) -> None:
        for at, storage in self._resized.items():
            if storage.nbytes() != self._sizes[at]:
                self._set_size(at, storage.nbytes())

    def _set_size(self, at: int, size: int) -> None:
        """Record that a storage has `size` bytes now."""
        self.now += size - self._sizes[at]
        self._sizes[at] = size
        self.peak_bytes = max(self.peak_bytes, self.now)

    def _freed(self, at: int) -> None:
        self.now -= self._sizes.pop(at)
