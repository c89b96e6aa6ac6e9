"""How the ranks of a job meet, also when torchrun starts them again."""

import os
import time
import uuid
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

LOOK_S = 0.05  # how often rank 0 looks for ranks that have come
GRACE_S = 30.0  # after its deadline, before the process group itself gives an operation up: the watch speaks first


def join(
    backend: str, rank: int, world: int, timeout_s: float, device: torch.device | None = None
) -> Callable[[], dist.Store]:
    """Makes the process group of all ranks. Returns what opens another connection to their store, for a thread that
    must not wait behind this one.

    Raises:
        dist.DistError: not all ranks came within `timeout_s`.
    """
    timeout = timedelta(seconds=timeout_s)
    store, _, _ = next(iter(dist.rendezvous("env://", rank, world, timeout=timeout)))
    prefix = "ndtrain"
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        prefix += "/" + _attempt(dist.PrefixStore(prefix, store), rank, world, timeout_s)
    options = {"device_id": device} if device is not None and device.type == "cuda" else {}
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(prefix, store),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s + GRACE_S),
        **options,
    )
    return lambda: dist.PrefixStore(prefix, _another())


def _attempt(store: dist.Store, rank: int, world: int, timeout_s: float) -> str:
    """A name that this attempt's ranks share and no other attempt's.

    torchrun keeps one store for all its attempts, with the addresses of dead ranks in it, and no number of its own that
    is the same on every node. So each rank says hello with a name that it has just made up, and rank 0 answers each
    such name with the attempt's. Who answers has seen the hello: it lives, in this attempt.
    """
    me = uuid.uuid4().hex
    if rank > 0:
        store.set(f"hello/{rank}", me)
        attempt = store.get(f"answer/{me}").decode()  # waits for it
        store.add(f"{attempt}/came", 1)
        return attempt
    attempt, answered, end = me, set(), time.monotonic() + timeout_s
    others = [f"hello/{r}" for r in range(1, world)]
    while store.add(f"{attempt}/came", 0) < world - 1:
        if time.monotonic() > end:
            raise dist.DistStoreError(f"not all of {world} ranks came within {timeout_s:g} s")
        names = {store.get(key).decode() for key in others if store.check([key])}
        for name in names - answered:  # an earlier attempt's too, whom nobody reads any more
            store.set(f"answer/{name}", attempt)
        answered |= names
        time.sleep(LOOK_S)
    return attempt


def _another() -> dist.Store:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=5))
