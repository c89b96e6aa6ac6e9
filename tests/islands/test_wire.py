"""Connections between islands: both sides prove the token, and every message is checked."""

import errno
import os
import queue
import socket
import threading
import time
from contextlib import contextmanager, suppress

import pytest

from ndtrain.islands import wire
from ndtrain.islands.wire import Connection, Listener, Refused, WireError, connect, split_address

TOKEN = "a secret of the tests"


@contextmanager
def served(token=TOKEN, host="127.0.0.1", handler=None, **given):
    """A listener, and the connections that have arrived at it."""
    arrived: queue.Queue[Connection] = queue.Queue()
    over = threading.Event()

    def keep(connection: Connection) -> None:
        arrived.put(connection)
        over.wait(20)

    listener = Listener(host, token, {"test": handler or keep}, **given)
    try:
        yield listener, arrived
    finally:
        over.set()
        listener.close()


@contextmanager
def pair(token=TOKEN, host="127.0.0.1"):
    """Both ends of a connection."""
    with served(token, host) as (listener, arrived):
        client = connect(listener.address, token, "test", 5.0)
        server = arrived.get(timeout=5)
        client.timeout_s = server.timeout_s = 5.0
        yield client, server
        client.close()


def recorded(sender: Connection, receiver: Connection, value) -> bytes:
    """The bytes of a message on the way, which do not arrive at its receiver."""
    sender.send(value)
    return receiver._socket.recv(1 << 16)


@pytest.mark.parametrize("token", [TOKEN, ""])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", ""])
def test_send_values_and_bytes_arrive_in_order(token, host):
    with pair(token, host) as (client, server):
        for i in range(3):
            client.send({"number": i, "text": "ä"})
            client.send_bytes(memoryview(bytes([i] * 1000)))
        for i in range(3):
            assert server.receive() == {"number": i, "text": "ä"}
            data = bytearray(1000)
            server.receive_into(memoryview(data))
            assert data == bytes([i] * 1000)
        server.send(["answer"])
        assert client.receive() == ["answer"]


@pytest.mark.parametrize(
    ("mine", "theirs", "reason"),
    [
        ("wrong", TOKEN, "refused the connection for 'test': give all islands the same token"),
        ("", TOKEN, "has a token and this process has none"),
        (TOKEN, "", "this process has a token and .* has none"),
    ],
)
def test_connect_with_another_token_is_refused(mine, theirs, reason):
    with served(theirs) as (listener, arrived):
        with pytest.raises(WireError, match=reason) as caught:
            connect(listener.address, mine, "test", 5.0)
        assert "\n" not in str(caught.value) and not isinstance(caught.value, Refused)
        assert arrived.empty()


def test_connect_for_unknown_purpose_is_refused():
    with served() as (listener, arrived), pytest.raises(WireError, match="for 'other'"):
        connect(listener.address, TOKEN, "other", 5.0)
    assert arrived.empty()


def test_connect_to_server_without_token_knowledge_raises():
    """A server that reflects the proof of the client has not proved anything."""
    with socket.create_server(("127.0.0.1", 0)) as fake:

        def reflect() -> None:
            accepted, _ = fake.accept()
            with accepted:
                accepted.sendall(accepted.recv(wire._HELLO.size, socket.MSG_WAITALL))
                accepted.sendall(accepted.recv(wire._PROOF, socket.MSG_WAITALL))
                accepted.recv(1)

        threading.Thread(target=reflect, daemon=True).start()
        with pytest.raises(WireError, match="does not know the token"):
            connect(f"127.0.0.1:{fake.getsockname()[1]}", TOKEN, "test", 5.0)


def test_connect_to_foreign_server_raises():
    with socket.create_server(("127.0.0.1", 0)) as foreign:

        def answer() -> None:
            accepted, _ = foreign.accept()
            with accepted:
                accepted.sendall(b"HTTP/1.1 400 Bad Request\r\n" + bytes(100))
                accepted.recv(1000)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(WireError, match="is no process of an island"):
            connect(f"127.0.0.1:{foreign.getsockname()[1]}", TOKEN, "test", 5.0)


def test_listener_refuses_repeated_handshake():
    """The bytes of a client that knew the token do not prove it again: the server's random bytes are others."""
    sent: list[bytes] = []
    with served() as (listener, arrived):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Connection, "_introduce", _introduce_recorded(sent))
            connect(listener.address, TOKEN, "test", 5.0)
        arrived.get(timeout=5)
        with socket.create_connection(("127.0.0.1", listener.port)) as replay:
            replay.sendall(b"".join(sent))
            assert len(replay.recv(1000, socket.MSG_WAITALL)) == wire._HELLO.size  # its hello, and no proof
        assert arrived.empty()


def _introduce_recorded(sent: list[bytes]):
    introduce, write = Connection._introduce, Connection._write

    def recorded_introduce(self, *given):
        self._write = lambda data, deadline: (sent.append(bytes(data)), write(self, data, deadline))
        introduce(self, *given)

    return recorded_introduce


def test_connect_to_free_port_raises_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for host in ("127.0.0.1", "localhost"):
        with pytest.raises(Refused, match="no process listens there"):
            connect(f"{host}:{port}", TOKEN, "test", 5.0)


def test_connect_that_meets_itself_raises_refused(monkeypatch):
    """On loopback the kernel may choose the target port for this side too. TCP then connects the socket to itself."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    make = socket.socket

    def bound(*given):
        made = make(*given)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(("127.0.0.1", port))
        return made

    monkeypatch.setattr(wire.socket, "socket", bound)
    with pytest.raises(Refused):
        wire._connected(f"127.0.0.1:{port}", time.monotonic() + 5)


def test_connect_other_failures_are_not_refused():
    with socket.create_server(("127.0.0.1", 0), backlog=0) as silent:
        for address in (f"127.0.0.1:{silent.getsockname()[1]}", "no-such-host.invalid:80"):
            with pytest.raises(WireError) as caught:
                connect(address, TOKEN, "test", 0.3)
            assert not isinstance(caught.value, Refused), address


@pytest.mark.parametrize(
    ("codes", "is_refused"),
    [
        ([errno.ECONNREFUSED] * 2, True), ([errno.ECONNREFUSED, errno.ETIMEDOUT], False), ([errno.EHOSTUNREACH], False),
        ([errno.ECONNRESET, errno.ECONNREFUSED], False), ([errno.ENETUNREACH], False), ([], False),
    ],
)  # fmt: skip
def test_connect_is_refused_only_if_every_address_refuses(monkeypatch, codes, is_refused):
    left = list(codes)

    class Failing(socket.socket):
        def connect(self, place):
            raise OSError(left.pop(0), "as the test has it")

    places = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 9))] * len(codes)
    monkeypatch.setattr(wire.socket, "socket", Failing)
    monkeypatch.setattr(wire.socket, "getaddrinfo", lambda *given, **more: places)
    with pytest.raises(WireError) as caught:
        connect("host:9", TOKEN, "test", 5.0)
    assert isinstance(caught.value, Refused) == is_refused


@pytest.mark.parametrize("address", ["host", "host:", ":80", "host:0", "host:65536", "host:-1", "host:8x", "host:٣"])
def test_split_address_malformed_raises(address):
    with pytest.raises(WireError, match="write host:port"):
        split_address(address)


def test_split_address_takes_names_and_ipv6():
    assert split_address("node-1:80") == ("node-1", 80)
    assert split_address("[fe80::1]:80") == ("fe80::1", 80)


def test_receive_forged_message_raises():
    with pair() as (client, server):
        message = bytearray(recorded(client, server, {"epoch": 1}))
        message[-2] ^= 1
        client._socket.sendall(message)
        with pytest.raises(WireError, match="no valid signature"):
            server.receive()
        assert server.closed


def test_receive_repeated_message_raises():
    with pair() as (client, server):
        message = recorded(client, server, {"epoch": 1})
        client._socket.sendall(message + message)
        assert server.receive() == {"epoch": 1}
        with pytest.raises(WireError, match="no valid signature"):
            server.receive()


def test_receive_reflected_message_raises():
    with pair() as (client, server):
        server._socket.sendall(recorded(client, server, {"epoch": 1}))
        with pytest.raises(WireError, match="no valid signature"):
            client.receive()


def test_receive_message_of_another_connection_raises():
    with pair() as (client, server), pair() as (other, another):
        other._socket.sendall(recorded(client, server, {"epoch": 1}))
        with pytest.raises(WireError, match="no valid signature"):
            another.receive()


def test_receive_too_long_message_raises_before_it_arrives():
    with pair() as (client, server):
        client._socket.sendall(wire._HEAD.pack(0xFFFFFFFF, bytes(32)))
        with pytest.raises(WireError, match=r"4294967295 bytes from .*: at most 1048576"):
            server.receive()


def test_send_too_long_message_raises():
    with pair() as (client, server):
        with pytest.raises(WireError, match="at most 1048576"):
            client.send("x" * (1 << 20))
        client.send("x" * (1 << 20), most=2 << 20)
        assert len(server.receive(most=2 << 20)) == 1 << 20


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[" * 100_000, b"NaN", b""])
def test_receive_signed_bytes_that_are_no_json_raises(content):
    with pair() as (client, server):
        client._socket.sendall(wire._HEAD.pack(len(content), client._seals[0].next(content)) + content)
        with pytest.raises(WireError, match="is not JSON"):
            server.receive()


def test_receive_truncated_message_raises():
    with pair() as (client, server):
        message = recorded(client, server, {"epoch": 1})
        client._socket.sendall(message[:-3])
        client.close()
        with pytest.raises(WireError, match="has closed the connection"):
            server.receive()


def test_receive_into_truncated_payload_raises():
    with pair() as (client, server):
        client.send_bytes(memoryview(bytes(100)))
        client.close()
        with pytest.raises(WireError, match="has closed the connection"):
            server.receive_into(memoryview(bytearray(101)))


def test_receive_without_message_raises_after_timeout():
    with pair() as (client, server):
        server.timeout_s = 0.1
        begin = time.monotonic()
        client._socket.sendall(b"\0")  # one byte does not extend the time
        with pytest.raises(WireError, match="did not answer in time"):
            server.receive()
        assert 0.09 < time.monotonic() - begin < 2


def test_send_bytes_to_full_socket_raises_after_timeout():
    with pair() as (client, _):
        client.timeout_s = 0.2
        with pytest.raises(WireError, match="did not answer in time"):
            client.send_bytes(memoryview(bytes(64 << 20)))


@pytest.mark.parametrize("timeout_s", [None, 30.0])
@pytest.mark.parametrize("blocked", ["receive", "send"])
def test_close_from_another_thread_wakes_blocked_call(blocked, timeout_s):
    with pair() as (client, _):
        client.timeout_s = timeout_s
        raised = queue.Queue()

        def block() -> None:
            try:
                client.receive() if blocked == "receive" else client.send_bytes(memoryview(bytes(64 << 20)))
            except WireError:
                raised.put(time.monotonic())

        thread = threading.Thread(target=block, daemon=True)
        thread.start()
        time.sleep(0.1)
        begin = time.monotonic()
        client.close()
        assert raised.get(timeout=5) - begin < 0.5
        thread.join(5)
        assert client._socket.fileno() == -1


def test_has_left_is_true_after_peer_has_closed():
    with pair() as (client, server):
        assert not server.has_left()
        client.send(1)
        assert not server.has_left()
        assert server.receive() == 1
        client.close()
        time.sleep(0.05)
        assert server.has_left() and client.has_left()


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n" + bytes(100), os.urandom(200), b"\0" * 89])
def test_listener_drops_peer_that_sends_garbage(garbage):
    with served() as (listener, arrived):
        with socket.create_connection(("127.0.0.1", listener.port)) as foreign:
            foreign.sendall(garbage)
            foreign.settimeout(5)
            with suppress(ConnectionResetError):
                while foreign.recv(1000):
                    pass
        connect(listener.address, TOKEN, "test", 5.0).close()
        assert arrived.get(timeout=5)


def test_listener_drops_silent_peer_and_serves_others_meanwhile(monkeypatch):
    monkeypatch.setattr(wire, "HANDSHAKE_S", 0.5)
    with served() as (listener, arrived), socket.create_connection(("127.0.0.1", listener.port)) as silent:
        begin = time.monotonic()
        connect(listener.address, TOKEN, "test", 5.0).close()
        assert arrived.get(timeout=5) and time.monotonic() - begin < 0.4
        silent.settimeout(5)
        for _ in range(3):  # single bytes do not extend the time
            silent.sendall(b"n")
            time.sleep(0.1)
        with suppress(ConnectionResetError):
            while silent.recv(1000):
                pass
        assert 0.4 < time.monotonic() - begin < 3


def test_listener_limits_connections_in_their_handshake(monkeypatch):
    monkeypatch.setattr(wire, "MOST_UNKNOWN", 2)
    with served() as (listener, arrived):
        silent = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(2)]
        with pytest.raises(WireError):
            connect(listener.address, TOKEN, "test", 5.0)
        for one in silent:
            one.close()
        time.sleep(0.1)
        known = [connect(listener.address, TOKEN, "test", 5.0) for _ in range(4)]  # these do not count
        assert len({arrived.get(timeout=5) for _ in known}) == 4


def test_listener_close_ends_connections_and_frees_the_port():
    with served() as (listener, arrived):
        client = connect(listener.address, TOKEN, "test", 5.0)
        arrived.get(timeout=5)
        client.timeout_s = 5.0
        listener.close()
        with pytest.raises(WireError, match="has closed the connection"):
            client.receive()
        with pytest.raises(Refused):
            connect(listener.address, TOKEN, "test", 5.0)
        Listener("127.0.0.1", TOKEN, {}, port=listener.port).close()


def test_listener_on_taken_port_raises():
    with served() as (listener, _), pytest.raises(WireError, match=f"cannot listen on 127.0.0.1, port {listener.port}"):
        Listener("127.0.0.1", TOKEN, {}, port=listener.port)


def test_listener_logs_failed_handler_and_goes_on(caplog):
    def fail(connection: Connection) -> None:
        raise ZeroDivisionError

    with served(handler=fail) as (listener, _):
        for _ in range(2):
            with pytest.raises(WireError):
                connect(listener.address, TOKEN, "test", 5.0).receive()
    assert [record.exc_info[0] for record in caplog.records] == [ZeroDivisionError] * 2


def test_listener_at_a_free_port_leaves_reserved_ports(monkeypatch):
    """The system may offer the port of a known address, which the leader is going to need."""
    listening = wire._listening
    with listening("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
    offers = iter([port, 0])
    monkeypatch.setattr(wire, "_listening", lambda host, _: listening(host, next(offers)))
    listener = Listener("127.0.0.1", "", {}, reserved=[f"127.0.0.1:{port}"])
    try:
        assert listener.port != port
    finally:
        listener.close()
