"""Rendezvous: the ranks of one attempt of a job form a process group, even after torchrun restarts them."""

import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ndtrain.config import ConfigError
from ndtrain.mesh.gloo import GLOO, connecting_on_use
from ndtrain.run.listeners import LOOPBACK, address_to_serve, choose_interface, on_one_host, serve_store
from ndtrain.run.signed_store import SignedStore, pauses

GRACE_S = 30.0  # added to the process group's own timeout, so that the hang watchdog reports first
SHOWN = 8  # maximum number of missing ranks named in an error
_SCOPE = "ndtrain"
_servers: dict[int, dist.Store] = {}  # port -> the store that this process serves there


@dataclass(frozen=True)
class Meeting:
    """The store and the key prefix of one attempt of a job.

    Attributes:
        store: the store of the whole job.
        prefix: prefix of all keys of this attempt.
    """

    store: dist.Store
    prefix: str

    @property
    def shared(self) -> dist.Store:
        """The store of this attempt, for use by PyTorch."""
        return dist.PrefixStore(self.prefix, self.store)

    @property
    def messages(self) -> SignedStore:
        """The messages between the ranks of this attempt."""
        return SignedStore(self.store, self.prefix)

    def reconnected(self) -> "Meeting":
        """Open another connection to the store, which does not wait behind other threads' operations."""
        return Meeting(_connect(timeout_s=5), self.prefix)


def meet(rank: int, world: int, timeout_s: float) -> Meeting:
    """Wait for all ranks of this attempt.

    Raises:
        ConfigError: the launcher has not set the address of the store.
        dist.DistError: some ranks did not join within `timeout_s` seconds; on rank 0 the message names them.
    """
    store = open_store(rank, timeout_s)
    attempt = shake_hands(SignedStore(store, _SCOPE), rank, world, timeout_s)
    return Meeting(store, f"{_SCOPE}/{attempt}")


def open_store(rank: int, timeout_s: float) -> dist.Store:
    """Connect to the job's store. Rank 0 serves the store, unless torchrun does.

    This also chooses the interface on which the sockets of gloo and NCCL will listen (`choose_interface`).

    Args:
        timeout_s: timeout in seconds of the connection and of the store's operations.

    Raises:
        ConfigError: the launcher has not set the address of the store.
        dist.DistError: the store does not answer within `timeout_s`.
    """
    choose_interface(on_one_host())
    host, port = _place()
    if rank == 0 and not _launcher_serves() and port not in _servers:
        address = LOOPBACK if on_one_host() else address_to_serve(host)
        _servers[port] = serve_store(address, port, timeout_s)
    return _connect(timeout_s)


def backend_of(device_type: str) -> str:
    """Return the backend of collectives on "cpu" or "cuda"."""
    return "nccl" if device_type == "cuda" else "gloo"


def join(
    backend: str,
    rank: int,
    world: int,
    timeout_s: float,
    device: torch.device | None = None,
    meeting: Meeting | None = None,
) -> Meeting:
    """Create the process group of all ranks, and return their meeting.

    Args:
        timeout_s: seconds that the ranks have to join, and the deadline of a collective.
        device: the rank's GPU; None: no GPU.
        meeting: the result of `meet`; None: call `meet` here.

    Raises:
        dist.DistError: some ranks did not join within `timeout_s`.
    """
    meeting = meeting or meet(rank, world, timeout_s)
    options = {}
    if device is not None and device.type == "cuda":
        options["device_id"] = device
        # PyTorch's NCCL thread hangs if CUDA hangs. By default the process is then aborted after eight minutes.
        os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(int(timeout_s + GRACE_S)))
    with connecting_on_use():
        dist.init_process_group(
            backend,
            store=meeting.shared,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_s + GRACE_S),
            **options,
        )
    if backend == GLOO:  # connect while the store is there: it ends with torchrun, and the run is then saved
        dist.all_reduce(torch.zeros(1))
        dist.broadcast(torch.zeros(1), src=0)
    return meeting


def shake_hands(messages: SignedStore, rank: int, world: int, timeout_s: float) -> str:
    """Return the id of this attempt, which is the same on all its ranks and unique to this attempt.

    torchrun keeps one store for all attempts. It still holds the addresses of dead ranks, but no attempt number that is
    equal on every node. Therefore the ranks use a handshake. Each rank publishes a random nonce, and rank 0 replies to
    each nonce with the attempt's id. A stale rank cannot join, because nobody reads the reply to its nonce. While
    waiting, rank 0 performs only a few store operations per second, for any number of ranks.

    Raises:
        dist.DistError: some ranks did not join within `timeout_s`.
    """
    if rank > 0:
        return _greet(messages, rank, timeout_s)
    attempt, end, waits = uuid.uuid4().hex, time.monotonic() + timeout_s, pauses()
    handshakes = [_handshake(r) for r in range(1, world)]
    joined = [f"{attempt}/joined/{r}" for r in range(1, world)]
    replied: set[str] = set()
    while True:
        new = {str(nonce) for nonce in messages.read_all(handshakes).values()} - replied
        if new:  # including nonces of earlier attempts, to which nobody reads the replies
            messages.put_all({f"reply/{nonce}": attempt for nonce in new})
            replied, waits = replied | new, pauses()
        if not joined or (replied and len(messages.read_all(joined)) == len(joined)):
            return attempt
        if time.monotonic() > end:
            raise dist.DistStoreError(_missing(messages, joined, world, timeout_s))
        time.sleep(next(waits))


def _greet(messages: SignedStore, rank: int, timeout_s: float) -> str:
    """Perform the handshake of a rank other than 0, and return the attempt's id."""
    nonce = uuid.uuid4().hex
    messages.put(_handshake(rank), nonce)
    try:
        attempt = str(messages.wait(f"reply/{nonce}", timeout_s))
    except dist.DistStoreError as error:
        raise dist.DistStoreError(
            f"rank {rank} had no reply from rank 0 within {timeout_s:g} s: rank 0 has not started, or waits for others"
        ) from error
    messages.put(f"{attempt}/joined/{rank}", "here")
    return attempt


def _handshake(rank: int) -> str:
    return f"handshake/{rank}"


def _missing(messages: SignedStore, joined: Sequence[str], world: int, timeout_s: float) -> str:
    """Return one line that names the missing ranks. This needs a store operation per rank, but runs only once."""
    absent = [r for r in range(1, world) if not messages.has(_handshake(r))]
    absent = absent or [r for r, key in enumerate(joined, 1) if not messages.has(key)]
    named = ", ".join(map(str, absent[:SHOWN])) + (f" and {len(absent) - SHOWN} more" if len(absent) > SHOWN else "")
    which = f"rank{'s' * (len(absent) > 1)} {named} did" if absent else "a rank with messages signed by this job did"
    return f"not all of {world} ranks joined within {timeout_s:g} s: {which} not"


def _launcher_serves() -> bool:
    """Return True if torchrun serves the ranks' store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _place() -> tuple[str, int]:
    """Return (host, port) of the store, from the environment."""
    try:
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError):
        raise ConfigError(
            "WORLD_SIZE is above 1, but MASTER_ADDR and MASTER_PORT are not set: start the ranks with torchrun, or set "
            "both"
        ) from None


def _connect(timeout_s: float) -> dist.Store:
    """Open a new connection to the job's store."""
    host, port = _place()
    if on_one_host() and not _launcher_serves():
        host = LOOPBACK
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
