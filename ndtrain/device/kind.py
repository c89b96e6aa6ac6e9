"""The kind of device that computes a tensor, for algorithms that depend on it.

A tensor on the meta device has a shape but no memory. The planner (`ndtrain/plan/`) uses meta tensors to represent
tensors on a device that this machine does not have. The code must then take the same path as on that device.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_stands_for = "cpu"  # the kind of device that meta tensors represent


@contextmanager
def meta_stands_for(kind: str) -> Iterator[None]:
    """Treat meta tensors as tensors on a device of this kind, "cpu" or "cuda", within the context."""
    global _stands_for
    before, _stands_for = _stands_for, kind
    try:
        yield
    finally:
        _stands_for = before


def kind_of(device: torch.device) -> str:
    """Return the type of a device, "cpu" or "cuda". For the meta device, return the type that it represents."""
    return _stands_for if device.type == "meta" else device.type


def on_gpu(x: Tensor) -> bool:
    """Return True if a GPU computes x."""
    return x.is_cuda or (x.is_meta and _stands_for == "cuda")


def host_of(device: torch.device) -> torch.device:
    """Return the device of host memory for a program on `device`: the CPU, or meta if `device` is meta."""
    return device if device.type == "meta" else torch.device("cpu")
