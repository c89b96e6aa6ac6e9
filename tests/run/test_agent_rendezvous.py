"""How torchruns meet: what they unpickle, where they listen, and that strangers change nothing."""

import base64
import os
import pickle
from contextlib import closing
from datetime import UTC, datetime, timedelta

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from ndtrain.run import agent_rendezvous, listeners
from ndtrain.run.agent_rendezvous import OneHost, SignedBackend, is_plain_state
from tests.lib.sockets import Runs, pickled_command
from tests.lib.sockets import listeners as listening

KEY = "torch.rendezvous.run"


def state(number: int = 1) -> bytes:
    """As torchrun makes it."""
    made = _RendezvousState()
    made.round, made.complete = number, True
    made.participants = {_NodeDesc("n0", 1, 0): 0, _NodeDesc("n1", 2, 0): 1}
    made.last_heartbeats = dict.fromkeys(made.participants, datetime.now(UTC))
    made.wait_list = {_NodeDesc("n2", 3, 0)}
    made.deadline = made.last_heartbeats[_NodeDesc("n0", 1, 0)] + timedelta(seconds=1)
    return pickle.dumps(made)


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


@pytest.fixture
def forbidden(tmp_path):
    """A pickle that runs a command, as base64, and the file that the command makes."""
    return pickled_command(f"touch {tmp_path}/executed"), tmp_path / "executed"


def test_is_plain_state_refuses_pickled_commands(tmp_path):
    assert is_plain_state(state())
    for odd in (Runs(f"touch {tmp_path}/executed"), 5, {"closed": True}, _NodeDesc("n0", 1, 0), os.system, OneHost):
        assert not is_plain_state(pickle.dumps(odd)), odd
    hidden = _RendezvousState()
    hidden.participants = {Runs(f"touch {tmp_path}/executed"): 0}
    for pickled in (pickle.dumps(hidden), b"", b"\x80", state()[:-5]):
        assert not is_plain_state(pickled)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("token", ["", "secret"])
def test_signed_backend_shares_state_between_hosts(store, token):
    here, there = (SignedBackend(store, "run", token) for _ in range(2))
    assert here.get_state() is None
    first, one, made = here.set_state(state(1))
    assert made and first == there.get_state()[0] and is_plain_state(first)
    second, two, made = there.set_state(state(2), one)
    assert made and two != one and here.get_state() == (second, two)
    assert here.set_state(state(3), one) == (second, two, False), "made from an old state"


@pytest.mark.parametrize("token", ["", "secret"])
def test_a_forged_state_is_replaced_by_the_last_genuine_one(store, token, forbidden):
    text, executed = forbidden
    backend = SignedBackend(store, "run", token)
    store.set(KEY, text)
    assert backend.get_state() is None
    genuine, _, made = backend.set_state(state())
    assert made
    store.set(KEY, text)
    found, fencing = backend.get_state()
    assert found == genuine
    assert backend.set_state(state(2), fencing)[2] and backend.get_state()[0] != genuine
    assert not executed.exists()


def test_state_signed_by_other_job_is_ignored(store):
    backend = SignedBackend(store, "run", "secret")
    SignedBackend(store, "run", "guess").set_state(state())
    assert backend.get_state() is None
    store.set(KEY, base64.b64encode(state()).decode())
    assert backend.get_state() is None, "nor an unsigned one"


def parameters(endpoint: str, **more: str) -> RendezvousParameters:
    return RendezvousParameters("x", endpoint, "run", 2, 2, **more)


def test_rendezvous_store_listens_on_endpoint_address():
    with closing(listeners._listen("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    served = agent_rendezvous._open_store(parameters(f"localhost:{port}"))
    heard = [x for x in listening([os.getpid()]) if x.port == port]
    assert [x.address for x in heard] == ["127.0.0.1"]
    joined = agent_rendezvous._open_store(parameters(f"localhost:{port}"))  # a second torchrun of this host
    joined.set("x", "y")
    assert served.get("x") == b"y"
    with pytest.raises(RendezvousConnectionError, match=f"the rendezvous store at localhost:{port}: "):
        agent_rendezvous._open_store(parameters(f"localhost:{port}", is_host="true"))


def test_address_to_serve_follows_endpoint_host(monkeypatch):
    monkeypatch.delenv(listeners.INTERFACE, raising=False)
    stands_for = {"n0": ["10.1.2.3"], "debian": ["127.0.1.1"], "localhost": ["127.0.0.1"], "other": ["192.0.2.1"]}
    monkeypatch.setattr(listeners, "_addresses", lambda host: stands_for.get(host, [host]))
    monkeypatch.setattr(listeners, "_is_own", lambda address: address.startswith(("10.", "127.")))
    chosen = {host: listeners.address_to_serve(host) for host in (*stands_for, "10.1.2.3", "127.0.0.1")}
    assert chosen == {
        "n0": "10.1.2.3", "10.1.2.3": "10.1.2.3", "localhost": "127.0.0.1", "127.0.0.1": "127.0.0.1",
        "debian": "", "other": "",
    }  # fmt: skip
    monkeypatch.setenv(listeners.INTERFACE, "lo")
    monkeypatch.setattr(listeners, "interface_address", lambda name: f"address of {name}")
    assert listeners.address_to_serve("n0") == "10.1.2.3"
    assert listeners.address_to_serve("debian") == listeners.address_to_serve("other") == "address of lo"


def test_each_rendezvous_has_new_store_on_loopback():
    handler = OneHost(parameters("localhost:0"))
    ports = []
    for _ in range(2):
        found = handler.next_rendezvous()
        place = found.bootstrap_store_info
        ports.append(place.master_port)
        assert (found.rank, found.world_size, place.master_addr) == (0, 1, "127.0.0.1") and handler.use_agent_store
        heard = [x.address for x in listening([os.getpid()]) if x.port == place.master_port]
        assert heard == ["127.0.0.1"]
        found.store.set("torchelastic/role_info/0", "x")  # the launcher's own, which no socket leads to
        client = dist.TCPStore(place.master_addr, place.master_port, is_master=False, timeout=timedelta(seconds=5))
        assert client.list_keys() == []
    assert ports[0] != ports[1]
