"""The rendezvous of the torchrun processes of a job, as used by `ndtrain torchrun`.

PyTorch's own backend (`c10d`) serves a store on all interfaces, and unpickles the state that it finds there. Anyone who
reaches the port can run code as the user of the run. The backends here avoid that:

- One host needs no rendezvous: only the ranks' store listens, on loopback (`OneHost`).
- On several hosts the store listens on one address. A state is unpickled only if this job has signed it. Without a
  token, it is unpickled only if it contains no classes other than the parts of a rendezvous state (`SignedBackend`).
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

from ndtrain.run.listeners import LOOPBACK, address_to_serve, is_own, serve_store
from ndtrain.run.signed_store import TOKEN, signature

ONE_HOST, SEVERAL_HOSTS = "ndtrain-one-host", "ndtrain-several-hosts"  # names of rendezvous backends
READ_TIMEOUT_S = 60  # default timeout of a store operation, the same as for c10d
_DIGITS = 64  # number of digits in a signature

log = logging.getLogger(__name__)


def register() -> None:
    """Register both backends with torchrun in this process. A second call does nothing."""
    rendezvous_handler_registry.register(ONE_HOST, OneHost)
    rendezvous_handler_registry.register(SEVERAL_HOSTS, _several_hosts)


# ------------------------------------------------------------------------------------------------------------- one host


class OneHost(RendezvousHandler):
    """The rendezvous of a single torchrun. Each start of its ranks gets a new store, on loopback."""

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
    """Create PyTorch's rendezvous of several torchrun processes, with a `SignedBackend`."""
    store = _open_store(params)
    return create_handler(store, SignedBackend(store, params.run_id, os.environ.get(TOKEN, "")), params)


def _open_store(params: RendezvousParameters) -> dist.TCPStore:
    """Open the store of the rendezvous. The host that the endpoint names serves it, or the host with `is_host=true`.

    Raises:
        RendezvousConnectionError: the store does not answer, or its port is taken.
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
                    raise  # otherwise, another torchrun on this host may already serve the store
        return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    except (OSError, ValueError, RuntimeError) as error:
        raise RendezvousConnectionError(f"the rendezvous store at {host}:{port}: {error}") from error


class SignedBackend(C10dRendezvousBackend):
    """A rendezvous backend that signs its state in the store.

    A forged state is ignored and logged. The last genuine state that this process has seen is used instead.

    Args:
        token: the token of the job; empty: the job has no token.
    """

    def __init__(self, store: dist.Store, run_id: str, token: str):
        super().__init__(store, run_id)
        self._run_id, self._token = run_id, token
        self._genuine: bytes | None = None  # the last genuine state
        self._forged: Any = None  # PyTorch's token of a forged state, if no genuine state has been seen yet

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
        """Return (state, PyTorch's token). If the state is forged, use the last genuine one; None if there is none."""
        state = self._open(sealed)
        if state is not None:
            self._genuine, self._forged = state, None
            return state, token
        log.warning(
            "ignored a rendezvous state that this job did not sign: another process writes into its store, or the "
            "hosts have different %s",
            TOKEN,
        )
        if self._genuine is not None:
            return self._genuine, token
        self._forged = token
        return None

    def _open(self, sealed: bytes) -> bytes | None:
        """Return the state without its signature; None if it is forged."""
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
    """An unpickler that accepts only the classes of a rendezvous state, so it cannot call arbitrary functions."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _OF_A_STATE:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a rendezvous state")
        return super().find_class(module, name)


def is_plain_state(pickled: bytes) -> bool:
    """Return True if the bytes are a rendezvous state that contains only the classes of such a state.

    Unpickling it then cannot run a stranger's code.
    """
    try:
        state = _PlainUnpickler(io.BytesIO(pickled)).load()
    except Exception:  # arbitrary bytes from the network may raise any exception
        return False
    return type(state).__name__ == "_RendezvousState"
