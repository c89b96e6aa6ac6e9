"""File descriptors: the limit of a process, and how many a rank needs for its connections to the other ranks."""

import os
import resource
from collections.abc import Sequence

from ndtrain.config import ConfigError

MOST = 1 << 20  # a higher limit is of no use, and some libraries visit every number below it
_OWN = 40  # of a rank without peers: its files, and the sockets that any rank has
_PER_PEER = {"gloo": 2.0, "nccl": 1.0}  # the group of all ranks (NCCL has no sockets here) and the background group
_PER_CLIENT = 2.4  # of the rank that holds the store
_PER_NEIGHBOUR = {"gloo": 2.0, "nccl": 0.0}  # the groups of single axes, and of some axes together


def raise_limit() -> int:
    """Raises the soft limit of open descriptors to the hard one, or to `MOST` if that is less. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft == resource.RLIM_INFINITY or soft >= highest:
        return MOST if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
    return highest


def needed(backend: str, rank: int, world: int, axes: Sequence[int] = ()) -> int:
    """Return roughly how many descriptors a rank needs, measured on runs of 4 to 128 ranks.

    Args:
        backend: "gloo" or "nccl".
        axes: the sizes of the mesh axes.
    """
    in_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = _PER_CLIENT * world if rank == 0 and not in_agent else 0.0
    neighbours = sum(size for size in axes if size > 1) if sum(size > 1 for size in axes) > 1 else 0
    return _OWN + int(_PER_PEER[backend] * world + _PER_NEIGHBOUR[backend] * neighbours + store)


def require(backend: str, rank: int, world: int, axes: Sequence[int] = ()) -> None:
    """Raises the limit, and refuses a run whose connections would exceed it.

    Raises:
        ConfigError: the hard limit is too low.
    """
    limit, count = raise_limit(), needed(backend, rank, world, axes)
    if world > 1 and limit < count:
        raise ConfigError(
            f"{world} ranks: each needs about {count} open files for its connections, and the limit is {limit}: raise "
            f"it with `ulimit -Hn {count}` (as root, in limits.conf, or --ulimit nofile of a container), or start "
            "fewer ranks"
        )
