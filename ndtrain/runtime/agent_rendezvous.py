"""How the torchruns of a job meet, as `ndtrain torchrun` has it done.

PyTorch's own way (`c10d`) serves a store on all interfaces, and unpickles the state that it finds there: whoever
reaches the port runs code as the user of the run. Here

- one host needs no rendezvous: nothing but the ranks' store listens, on loopback (`OneHost`);
- on several hosts the store listens on one address. A state is unpickled only if this job has signed it, or, without a
  token, if it consists of nothing but what a state consists of (`SignedBackend`).
"""

import hmac
import io
import logging
import os
import pickle
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT, C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from ndtrain.runtime.listeners import LOOPBACK, address_to_serve, is_own, serve_store
from ndtrain.runtime.signed_store import TOKEN, signature

ONE_HOST, SEVERAL_HOSTS = "ndtrain-one-host", "ndtrain-several-hosts"  # names of rendezvous backends
READ_TIMEOUT_S = 60  # of a store's operation, by default, as with c10d
_DIGITS = 64  # of a signature

log = logging.getLogger(__name__)


def register() -> None:
    """Makes torchrun, in this process, know both backends. A second call does nothing."""
    rendezvous_handler_registry.register(ONE_HOST, OneHost)
    rendezvous_handler_registry.register(SEVERAL_HOSTS, _several_hosts)


# ------------------------------------------------------------------------------------------------------------- one host


class OneHost(RendezvousHandler):
    """The rendezvous of one torchrun with itself. Each start of its ranks has a new store, on loopback."""

    def __init__(self, params: RendezvousParameters):
        self._run_id = params.run_id
        self._ranks_store: dist.TCPStore | None = None

    def get_backend(self) -> str:
        return ONE_HOST

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        self._ranks_store = serve_store(LOOPBACK, 0, READ_TIMEOUT_S)
        place = RendezvousStoreInfo(LOOPBACK, self._ranks_store.port)
        return RendezvousInfo(dist.HashStore(), rank=0, world_size=1, bootstrap_store_info=place)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


# -------------------------------------------------------------------------------------------------------- several hosts


def _several_hosts(params: RendezvousParameters) -> RendezvousHandler:
    """PyTorch's rendezvous of several torchruns, over `SignedBackend`."""
    store = _open_store(params)
    return create_handler(store, SignedBackend(store, params.run_id, os.environ.get(TOKEN, "")), params)


def _open_store(params: RendezvousParameters) -> dist.TCPStore:
    """The store of the rendezvous. The host that the endpoint names serves it, or the one with `is_host=true`.

    Raises:
        RendezvousConnectionError: it does not answer, or its port is taken.
    """
    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=DEFAULT_PORT)
    timeout_s = params.get_as_int("read_timeout", READ_TIMEOUT_S) or READ_TIMEOUT_S
    told = params.get_as_bool("is_host")
    try:
        if told or (told is None and is_own(host)):
            try:
                return serve_store(address_to_serve(host), port, timeout_s)
            except OSError:
                if told:
                    raise  # else another torchrun of this host may serve it already
        return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    except (OSError, ValueError, RuntimeError) as error:
        raise RendezvousConnectionError(f"the rendezvous store at {host}:{port}: {error}") from error


class SignedBackend(C10dRendezvousBackend):
    """The state of the rendezvous in a store, signed. A forged state is ignored and logged: the last genuine one that
    this process has seen takes its place.

    Args:
        token: of the job; empty: it has none.
    """

    def __init__(self, store: dist.Store, run_id: str, token: str):
        super().__init__(store, run_id)
        self._run_id, self._token = run_id, token
        self._genuine: bytes | None = None  # the last state
        self._forged: Any = None  # PyTorch's token of a forged state, where there has been no genuine one

    @property
    def name(self) -> str:
        return SEVERAL_HOSTS

    def get_state(self) -> tuple[bytes, Any] | None:
        found = super().get_state()
        return found and self._checked(*found)

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        found = super().set_state(self._seal(state), token or self._forged)
        if found is None:
            return None
        checked = self._checked(*found[:2])
        return checked and (*checked, found[2])

    def _seal(self, state: bytes) -> bytes:
        return signature(self._token, self._run_id, state).encode() + state if self._token else state

    def _checked(self, sealed: bytes, token: Any) -> tuple[bytes, Any] | None:
        """(the state, or the last genuine one where it is forged; PyTorch's token of it)"""
        state = self._open(sealed)
        if state is not None:
            self._genuine, self._forged = state, None
            return state, token
        log.warning(
            "ignored: a state of the rendezvous that this job has not signed: a stranger writes into its store, or "
            "its hosts have different %s",
            TOKEN,
        )
        if self._genuine is not None:
            return self._genuine, token
        self._forged = token
        return None

    def _open(self, sealed: bytes) -> bytes | None:
        """None: it is forged."""
        if not self._token:
            return sealed if is_plain_state(sealed) else None
        given, state = sealed[:_DIGITS], sealed[_DIGITS:]
        return state if hmac.compare_digest(given, signature(self._token, self._run_id, state).encode()) else None


_MODULE = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
_OF_A_STATE = {
    (_MODULE, "_RendezvousState"), (_MODULE, "_NodeDesc"),
    ("datetime", "datetime"), ("datetime", "timezone"), ("datetime", "timedelta"),
}  # fmt: skip


class _PlainUnpickler(pickle.Unpickler):
    """Makes objects of the classes of a rendezvous state, and of no other: no function can be called."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _OF_A_STATE:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a state")
        return super().find_class(module, name)


def is_plain_state(pickled: bytes) -> bool:
    """Whether it is a rendezvous state that consists of nothing else than one does, so that unpickling it runs no code
    of a stranger."""
    try:
        state = _PlainUnpickler(io.BytesIO(pickled)).load()
    except Exception:  # whatever bytes from the network make it raise
        return False
    return type(state).__name__ == "_RendezvousState"
