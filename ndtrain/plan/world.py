"""A process group of many ranks in one process. It accepts every collective and sends nothing."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ndtrain.device.kind import kind_of, meta_stands_for
from ndtrain.mesh.flight_recorder import RECORDER, Entry

_BACKEND = "dry"


class _Store(dist.Store):
    """A store for this process, the only rank that exists."""


class _Sent(dist._Work):
    """An operation in flight. Like a real one, it holds its tensors until it is waited for."""

    def __init__(self, tensors: Sequence[Tensor]):
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        """Return True with NCCL: it sends a message before the sender's next action. gloo sends it during the wait."""
        return kind_of(self._tensors[0].device) == "cuda"


class _Group(dist.ProcessGroup):
    """The operations that ndtrain's collectives use.

    Attributes:
        group_name: set by PyTorch.
    """

    group_name = ""

    def _set_group_name(self, name: str) -> None:
        self.group_name = name

    def allreduce(self, tensors: list[Tensor], *_: Any) -> _Sent:
        return _Sent(tensors)

    def _allgather_base(self, out: Tensor, part: Tensor, *_: Any) -> _Sent:
        return _Sent((out, part))

    def _reduce_scatter_base(self, out: Tensor, full: Tensor, *_: Any) -> _Sent:
        return _Sent((out, full))

    def alltoall_base(self, out: Tensor, sent: Tensor, *_: Any) -> _Sent:
        return _Sent((out, sent))

    def send(self, tensors: list[Tensor], *_: Any) -> _Sent:
        return _Sent(tensors)

    recv = send


@cache
def _register() -> None:
    make = lambda store, rank, size, timeout: _Group(rank, size)
    dist.Backend.register_backend(_BACKEND, make, devices=["cpu", "meta"])


@contextmanager
def pretended_world(rank: int, world: int, kind: str) -> Iterator[None]:
    """Make this process rank `rank` of `world` ranks within the block.

    Tensors on the meta device represent tensors on a device of this kind, "cpu" or "cuda".
    """
    _register()
    with meta_stands_for(kind):
        if world > 1:
            dist.init_process_group(_BACKEND, rank=rank, world_size=world, store=_Store())
        try:
            yield
        finally:
            if world > 1:
                dist.destroy_process_group()


@contextmanager
def journalled(journal: list[Entry]) -> Iterator[None]:
    """Append every launch of a collective within the block, and every wait for one, to the list."""
    before, RECORDER.journal = RECORDER.journal, journal
    try:
        yield
    finally:
        RECORDER.journal = before
