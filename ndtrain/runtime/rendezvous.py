"""Rendezvous: the ranks of one attempt of a job form a process group, also after torchrun restarts them."""

import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

POLL_S = 0.05  # interval at which rank 0 polls for handshakes
GRACE_S = 30.0  # added to the process group's own timeout, so that the hang watchdog reports first


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of one attempt have met.

    Attributes:
        store: of the whole job.
        prefix: of the keys of this attempt.
    """

    store: dist.Store
    prefix: str

    @property
    def shared(self) -> dist.Store:
        """The store of this attempt."""
        return dist.PrefixStore(self.prefix, self.store)


def meet(rank: int, world: int, timeout_s: float) -> Meeting:
    """Waits for all ranks of this attempt.

    Raises:
        dist.DistError: not all of them came within `timeout_s` seconds.
    """
    store, _, _ = next(iter(dist.rendezvous("env://", rank, world, timeout=timedelta(seconds=timeout_s))))
    prefix = "ndtrain"
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        prefix += "/" + _attempt(dist.PrefixStore(prefix, store), rank, world, timeout_s)
    return Meeting(store, prefix)


def backend_of(device_type: str) -> str:
    """The backend of collectives on "cpu" or "cuda"."""
    return "nccl" if device_type == "cuda" else "gloo"


def join(
    backend: str,
    rank: int,
    world: int,
    timeout_s: float,
    device: torch.device | None = None,
    meeting: Meeting | None = None,
) -> Callable[[], dist.Store]:
    """Creates the process group of all ranks. Returns a function that opens another connection to their store, for a
    thread that must not block behind the first connection.

    Args:
        timeout_s: seconds that the ranks have to join, and the deadline of a collective.
        device: the rank's GPU; None: no GPU.
        meeting: of these ranks; None: they meet here.

    Raises:
        dist.DistError: not all ranks joined within `timeout_s`.
    """
    meeting = meeting or meet(rank, world, timeout_s)
    options = {}
    if device is not None and device.type == "cuda":
        options["device_id"] = device
        # PyTorch's NCCL thread hangs where CUDA does. By default the process is then aborted after eight minutes.
        os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(int(timeout_s + GRACE_S)))
    dist.init_process_group(
        backend,
        store=meeting.shared,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s + GRACE_S),
        **options,
    )
    return lambda: dist.PrefixStore(meeting.prefix, _connect())


def _attempt(store: dist.Store, rank: int, world: int, timeout_s: float) -> str:
    """The id of this attempt, the same on all its ranks and on no rank of another attempt.

    torchrun keeps one store for all its attempts. The store still holds the addresses of dead ranks, and no attempt
    number that is the same on every node. So the ranks make a handshake: each rank publishes a random nonce, and rank 0
    replies to each nonce with the attempt's id. A stale rank cannot join, since nobody reads the reply to its nonce.

    Raises:
        dist.DistError: not all ranks joined within `timeout_s`.
    """
    nonce = uuid.uuid4().hex
    if rank > 0:
        store.set(f"handshake/{rank}", nonce)
        attempt = store.get(f"reply/{nonce}").decode()  # blocks until rank 0 has replied
        store.add(f"{attempt}/joined", 1)
        return attempt
    attempt, replied, end = nonce, set(), time.monotonic() + timeout_s
    handshakes = [f"handshake/{r}" for r in range(1, world)]
    while store.add(f"{attempt}/joined", 0) < world - 1:
        if time.monotonic() > end:
            raise dist.DistStoreError(f"not all of {world} ranks came within {timeout_s:g} s")
        nonces = {store.get(key).decode() for key in handshakes if store.check([key])}
        for other in nonces - replied:  # nonces of earlier attempts too, whose replies nobody reads
            store.set(f"reply/{other}", attempt)
        replied |= nonces
        time.sleep(POLL_S)
    return attempt


def _connect() -> dist.Store:
    """A new connection to the store that the environment names."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=5))
