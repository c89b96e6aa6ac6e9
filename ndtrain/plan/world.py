"""A process group of many ranks in one process: every collective is accepted, and nothing is sent."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup

from ndtrain.distributed.collectives import Pending
from ndtrain.distributed.flight_recorder import RECORDER, CollectiveRecord
from ndtrain.model.device_kind import meta_stands_for

_BACKEND = "dry"


class _Store(dist.Store):
    """No rank but this one asks it for anything."""


@cache
def _register() -> None:
    """PyTorch registers its fake backend for devices with memory only."""

    def make(common: Any, options: Any) -> FakeProcessGroup:
        options = options or FakeProcessGroup.Options()
        return FakeProcessGroup._create_internal(common.group_rank, common.group_size, options)

    dist.Backend.register_backend(_BACKEND, make, extended_api=True, devices=["cpu", "meta"])


@contextmanager
def pretended_world(rank: int, world: int, kind: str) -> Iterator[None]:
    """Inside, this process is `rank` of `world` ranks, and its tensors on the meta device stand for tensors on a device
    of this kind, "cpu" or "cuda"."""
    _register()
    with meta_stands_for(kind), _sends_end(at_once=kind == "cuda"):
        if world > 1:
            dist.init_process_group(_BACKEND, rank=rank, world_size=world, store=_Store())
        try:
            yield
        finally:
            if world > 1:
                dist.destroy_process_group()


@contextmanager
def _sends_end(at_once: bool) -> Iterator[None]:
    """When a message counts as sent: on NCCL before the sender's next action, on gloo when it is waited for."""
    asked = Pending.done
    Pending.done = (lambda self: True) if at_once else asked  # type: ignore[method-assign]
    try:
        yield
    finally:
        Pending.done = asked  # type: ignore[method-assign]


@contextmanager
def recorded_collectives() -> Iterator[deque[CollectiveRecord]]:
    """Yields the records of all collectives that are launched inside. The flight recorder by itself keeps the last
    few."""
    before, RECORDER.last = RECORDER.last, deque()
    try:
        yield RECORDER.last
    finally:
        RECORDER.last = before
