"""The kind of device that computes a tensor, for algorithms that depend on it.

A tensor on the meta device has a shape but no memory. The planner (`ndtrain/plan/`) uses meta tensors to represent
tensors on a device that this machine does not have. The code must then take the same path as on that device.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

# the kind of device that meta tensors represent
_STANDS_FOR: ContextVar[str] = ContextVar("_STANDS_FOR", default="cpu")


@contextmanager
def meta_stands_for(kind: str) -> Iterator[None]:
    """Treat meta tensors as tensors on a device of this kind, "cpu" or "cuda".

    This applies within the context, to the thread that entered it.
    """
    token = _STANDS_FOR.set(kind)
    try:
        yield
    finally:
        _STANDS_FOR.reset(token)


def kind_of(device: torch.device) -> str:
    """Return the type of a device, "cpu" or "cuda". For the meta device, return the type that it represents."""
    return _STANDS_FOR.get() if device.type == "meta" else device.type


def on_gpu(x: Tensor) -> bool:
    """Return True if a GPU computes x."""
    return x.is_cuda or (x.is_meta and _STANDS_FOR.get() == "cuda")


def host_of(device: torch.device) -> torch.device:
    """Return the device of host memory for a program on `device`: the CPU, or meta if `device` is meta."""
    return device if device.type == "meta" else torch.device("cpu")
