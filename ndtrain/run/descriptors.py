"""File descriptors: the limit of a process, and the number that a rank needs for connections to the other ranks."""

import os
import resource
from collections.abc import Sequence

from ndtrain.config import ConfigError

MOST = 1 << 20  # a higher limit is useless, and some libraries loop over every number below it
_OWN = 40  # descriptors of a rank without peers: its files, and the sockets that every rank has
_PER_PEER = {"gloo": 2.0, "nccl": 1.0}  # for the group of all ranks (no sockets with NCCL) and the background group
_PER_CLIENT = 2.4  # descriptors per rank, in the process that serves the store
_PER_NEIGHBOUR = {"gloo": 2.0, "nccl": 0.0}  # for the groups of single axes, and of several axes together


def raise_limit() -> int:
    """Raise the soft limit of open descriptors to the hard limit, but at most to `MOST`. Return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft == resource.RLIM_INFINITY or soft >= highest:
        return MOST if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
    return highest


def needed(backend: str, rank: int, world: int, axes: Sequence[int] = ()) -> int:
    """Return an estimate of the number of descriptors that a rank needs, fitted to runs of 4 to 128 ranks.

    Args:
        backend: "gloo" or "nccl".
        axes: the sizes of the mesh axes.
    """
    in_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = _PER_CLIENT * world if rank == 0 and not in_agent else 0.0
    neighbours = sum(size for size in axes if size > 1) if sum(size > 1 for size in axes) > 1 else 0
    return _OWN + int(_PER_PEER[backend] * world + _PER_NEIGHBOUR[backend] * neighbours + store)


def require(backend: str, rank: int, world: int, axes: Sequence[int] = ()) -> None:
    """Raise the limit of open descriptors, and check that it suffices for the connections of this rank.

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
