"""File descriptors: the limit of a process, and the number that a rank needs for connections to the other ranks."""

import math
import os
import resource
from collections.abc import Sequence

from ndtrain.config import ConfigError

MOST = 1 << 20  # a higher limit is useless, and some libraries loop over every number below it
_OWN = 40  # descriptors of a rank without peers: its files, and the sockets that every rank has
_ON_USE = {"gloo": 2, "nccl": 1}  # gloo groups of all ranks, which connect on use: the world's and the background's
_PER_CLIENT = 1.1  # descriptors per rank, in the process that serves the store
_PER_DEVICE = 4  # descriptors of a gloo device. Each group that connects on use has one, and all others share one


def raise_limit() -> int:
    """Raise the soft limit of open descriptors to the hard limit, but at most to `MOST`. Return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft == resource.RLIM_INFINITY or soft >= highest:
        return MOST if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
    return highest


def needed(backend: str, rank: int, world: int, groups: Sequence[int] = ()) -> int:
    """Return an estimate of the number of descriptors that a rank needs.

    In a group that connects on use, a rank has two neighbours around a ring, and some along a tree.

    Args:
        backend: "gloo" or "nccl".
        groups: the sizes of the rank's other process groups, whose ranks all connect to each other on gloo.
    """
    in_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = math.ceil(_PER_CLIENT * world) if rank == 0 and not in_agent else 0
    on_use = _ON_USE[backend] * (_PER_DEVICE + 2 + 2 * math.ceil(math.log2(world))) if world > 1 else 0
    peers = sum(size - 1 for size in groups) + _PER_DEVICE if backend == "gloo" else 0
    return _OWN + on_use + peers + store


def require(backend: str, rank: int, world: int, groups: Sequence[int] = ()) -> None:
    """Raise the limit of open descriptors, and check that it suffices for the connections of this rank.

    Raises:
        ConfigError: the hard limit is too low.
    """
    limit, count = raise_limit(), needed(backend, rank, world, groups)
    if world > 1 and limit < count:
        raise ConfigError(
            f"{world} ranks: each needs about {count} open files for its connections, and the limit is {limit}: raise "
            f"it with `ulimit -Hn {count}` (as root, in limits.conf, or --ulimit nofile of a container), or start "
            "fewer ranks"
        )
