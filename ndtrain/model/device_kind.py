"""Which kind of device computes a tensor. Code asks it where an algorithm depends on the kind.

A tensor on the meta device has a shape and no memory. It stands for one on the device of a machine that is not at hand
(`ndtrain/plan/`), so that the same code runs as there.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_stands_for = "cpu"  # the kind of device that meta tensors stand for


@contextmanager
def meta_stands_for(kind: str) -> Iterator[None]:
    """Inside, tensors on the meta device stand for tensors on a device of this kind, "cpu" or "cuda"."""
    global _stands_for
    before, _stands_for = _stands_for, kind
    try:
        yield
    finally:
        _stands_for = before


def kind_of(device: torch.device) -> str:
    """The type of a device, "cpu" or "cuda"; of the meta device the type that it stands for."""
    return _stands_for if device.type == "meta" else device.type


def on_gpu(x: Tensor) -> bool:
    """Whether a GPU computes x."""
    return x.is_cuda or (x.is_meta and _stands_for == "cuda")


def host_of(device: torch.device) -> torch.device:
    """Where host memory of a program on this device is: the CPU, or with the meta device the meta device."""
    return device if device.type == "meta" else torch.device("cpu")
