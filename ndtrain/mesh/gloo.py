"""gloo groups with few connections and few threads."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from ndtrain.device.environment import variable_set

GLOO = "gloo"
_LAZY = "TORCH_GLOO_LAZY_INIT"  # variable that gloo reads when it creates a group


def connecting_on_use() -> AbstractContextManager[None]:
    """Create gloo groups in this block whose ranks connect when they first exchange a message.

    Otherwise each rank connects to all others at once, and reads all their addresses from the store. The collectives of
    gloo go around a ring or along a tree, so each rank connects to few others. But a send or a receive may then wait
    until the other rank takes part. Such a group is therefore for operations in which all ranks take part.
    """
    return variable_set(_LAZY, "1")


def gloo_group_of_all_ranks(**options: Any) -> dist.ProcessGroup:
    """Create a gloo group of all ranks, whose ranks connect when they first exchange a message. All ranks call this."""
    with connecting_on_use():
        return dist.new_group(backend=GLOO, **options)


def gather_rows(mine: Tensor, group: dist.ProcessGroup) -> Tensor | None:
    """Return the rows [n, k] of all ranks, one rank after the other, on the group's first rank, and None on the others.

    The rows go along a binomial tree: of 2^m ranks, a rank receives at most m messages. Only the first rank ever holds
    all rows.

    Args:
        mine: int64 in host memory. k is the same on all ranks.
    """
    rank, found, distance = group.rank(), [mine], 1
    while distance < group.size():
        if rank & distance:
            rows = torch.cat(found)
            dist.send(torch.tensor([len(rows)]), group=group, group_dst=rank - distance)
            dist.send(rows, group=group, group_dst=rank - distance)
            return None
        if rank + distance < group.size():
            number = torch.empty(1, dtype=torch.int64)
            dist.recv(number, group=group, group_src=rank + distance)
            found.append(mine.new_empty(int(number), mine.shape[1]))
            dist.recv(found[-1], group=group, group_src=rank + distance)
        distance *= 2
    return torch.cat(found)


@contextmanager
def sharing_a_thread() -> Iterator[None]:
    """Create gloo groups in this block that share one thread of this process, and the socket on which it listens.

    PyTorch gives each group a device of its own. The thread of a device wakes a hundred times a second, also if nothing
    happens. With hundreds of ranks on a host these threads would need all of its time.

    Groups that connect on use cannot share a device: they would wait forever.
    """
    distributed_c10d.ProcessGroupGloo = _SharingGloo  # type: ignore[misc] # `new_group` has no argument for it
    try:
        yield
    finally:
        distributed_c10d.ProcessGroupGloo = dist.ProcessGroupGloo  # type: ignore[misc]


class _SharingGloo(dist.ProcessGroupGloo):
    """A group on the devices of the first one of this process on the same network interface."""

    _devices: ClassVar[dict[tuple[int, str | None], list[Any]]] = {}

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        place = os.getpid(), os.environ.get("GLOO_SOCKET_IFNAME")
        devices = self._devices.get(place)
        if devices is None:
            super().__init__(store, rank, size, timeout=timeout)
            self._devices[place] = self.options._devices  # type: ignore[attr-defined]
        else:
            options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices, options._threads, options._timeout = devices, 2 * len(devices), timeout
            super().__init__(store, rank, size, options)
