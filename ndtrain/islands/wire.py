"""Authenticated TCP connections between processes of islands.

Both sides send a hello of fixed size with 32 random bytes. Then each side proves that it knows the token: by an
HMAC-SHA256 of both hellos and of its role. Nothing else is read before. The hello of the side that connects names the
purpose of the connection. After that every JSON message carries an HMAC with a key of this connection, a counter and
the direction. A message can therefore not be forged, repeated, or sent back to its author. Payload bytes are not
hashed: a host on the path between two islands could change them. Over networks of others, use a VPN.

If the token is empty on both sides, anyone who reaches the port may connect. Nothing is ever unpickled, and every
length is checked before memory is allocated.
"""

import hmac
import json
import logging
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

MOST_BYTES = 1 << 20  # of a JSON message, unless the caller allows more
HANDSHAKE_S = 10.0  # a peer that has not proved the token by then is dropped
MOST_UNKNOWN = 1024  # connections that may be in their handshake at one time
_HELLO = struct.Struct(">8s?16s32s")  # magic, whether there is a token, purpose, random bytes
_MAGIC = b"ndtrain\x01"
_HEAD = struct.Struct(">I32s")  # number of bytes of a JSON message, and its HMAC
_PROOF = 32  # bytes of an HMAC-SHA256
_CLIENT, _SERVER = b"client", b"server"
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # seconds, seconds, probes
_BACKLOG = 4096

log = logging.getLogger("ndtrain")


class WireError(Exception):
    """A connection that failed, or a message that is not as it must be. The text is one line."""


class Refused(WireError):
    """A connection that the host of the address has refused, because no process listens there."""


class _Ended(WireError):
    """A connection that the other side has closed."""


class _Seal:
    """The signatures of the messages in one direction of a connection."""

    def __init__(self, key: bytes, sender: bytes):
        self._key, self._sender, self._count = key, sender, 0

    def next(self, content: bytes) -> bytes:
        """Return the signature of the next message."""
        self._count += 1
        return hmac.digest(self._key, self._sender + self._count.to_bytes(8, "big") + content, "sha256")


class _Token(NamedTuple):
    """The knowledge that both sides of a connection share: the token, and both hellos."""

    key: bytes
    client_hello: bytes
    server_hello: bytes

    def derived(self, label: bytes) -> bytes:
        """Return the HMAC of a label and both hellos."""
        return hmac.digest(self.key, label + b"\0" + self.client_hello + self.server_hello, "sha256")

    def sessions(self, me: bytes, other: bytes) -> tuple[_Seal, _Seal]:
        """Return the seals of the messages that this side sends and receives."""
        key = self.derived(b"session")
        return _Seal(key, me), _Seal(key, other)


class Connection:
    """A TCP connection whose two sides have proved the token. One thread may send while another receives.

    After an error it is closed.

    Attributes:
        peer: the address of the other side, for messages.
        timeout_s: the most seconds that one call of a method may take. None: as long as the other side lives.
    """

    def __init__(self, connected: socket.socket, peer: str, timeout_s: float | None = None):
        self.peer, self.timeout_s = peer, timeout_s
        self._socket, self._lock, self._sending = connected, threading.Lock(), threading.Lock()
        self._users, self._closed = 0, False
        self._seals: tuple[_Seal, _Seal] | None = None
        connected.setblocking(True)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # No TCP_USER_TIMEOUT: it would end connections to a peer that computes for long before it reads on.
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    @property
    def closed(self) -> bool:
        return self._closed

    def send(self, value: Any, most: int = MOST_BYTES) -> None:
        """Send a value that JSON can express.

        Raises:
            WireError: it needs more than `most` bytes, or the connection failed.
        """
        content = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
        if len(content) > most:
            raise WireError(f"a message of {len(content)} bytes to {self.peer}: at most {most} are allowed")
        assert self._seals, "the handshake is over"
        with self._sending, self._using():  # messages leave in the order of their counters
            self._write(memoryview(_HEAD.pack(len(content), self._seals[0].next(content)) + content), self._deadline())

    def receive(self, most: int = MOST_BYTES) -> Any:
        """Return the next value.

        Raises:
            WireError: it is longer than `most` bytes, not signed, or not JSON; or the connection failed.
        """
        assert self._seals, "the handshake is over"
        with self._using():
            deadline = self._deadline()
            length, signature = _HEAD.unpack(self._read(_HEAD.size, deadline))
            if length > most:
                raise WireError(f"a message of {length} bytes from {self.peer}: at most {most} are allowed")
            content = self._read(length, deadline)
            if not hmac.compare_digest(signature, self._seals[1].next(content)):
                raise WireError(f"a message from {self.peer} has no valid signature of this connection")
            return _parsed(content, self.peer)

    def send_bytes(self, data: memoryview) -> None:
        """Send the bytes of a contiguous memory. The other side must know their number.

        Raises:
            WireError: the connection failed.
        """
        with self._sending, self._using():
            self._write(data.cast("B"), self._deadline())

    def receive_into(self, data: memoryview) -> None:
        """Fill a contiguous memory with the next bytes.

        Raises:
            WireError: the connection failed, or ended before.
        """
        with self._using():
            self._fill(data.cast("B"), self._deadline())

    def has_left(self) -> bool:
        """Return True if the other side has closed the connection. Does not wait."""
        with suppress(WireError), self._using():
            with suppress(BlockingIOError):
                return not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            return False
        return True

    def close(self) -> None:
        """Close the connection. Calls that other threads are blocked in raise WireError at once."""
        with self._lock:
            if not self._closed:
                self._closed = True
                with suppress(OSError):  # the other side may have ended it before
                    self._socket.shutdown(socket.SHUT_RDWR)
            self._release()

    def _release(self) -> None:
        """Free the file descriptor as soon as no thread uses it. Another socket may then get the same number."""
        if self._closed and not self._users:
            self._socket.close()

    @contextmanager
    def _using(self) -> Iterator[None]:
        """Return a context that turns errors of the socket into WireErrors and then closes the connection."""
        with self._lock:
            if self._closed:
                raise _Ended(f"the connection to {self.peer} is closed")
            self._users += 1
        try:
            yield
        except TimeoutError as error:
            self.close()
            raise WireError(f"{self.peer} did not answer in time ({error})") from error
        except OSError as error:
            self.close()
            raise _Ended(f"the connection to {self.peer} ended: {error.strerror or error}") from error
        except BaseException:
            self.close()
            raise
        finally:
            with self._lock:
                self._users -= 1
                self._release()

    def _deadline(self) -> float | None:
        return None if self.timeout_s is None else time.monotonic() + self.timeout_s

    def _read(self, count: int, deadline: float | None) -> bytes:
        content = bytearray(count)
        self._fill(memoryview(content), deadline)
        return bytes(content)

    def _fill(self, left: memoryview, deadline: float | None) -> None:
        while left:
            flags = self._ready(select.POLLIN, deadline, socket.MSG_WAITALL)
            with suppress(BlockingIOError):  # it was not ready after all
                count = self._socket.recv_into(left, len(left), flags)
                if not count:
                    raise _Ended(f"{self.peer} has closed the connection")
                left = left[count:]

    def _write(self, left: memoryview, deadline: float | None) -> None:
        while left:
            flags = self._ready(select.POLLOUT, deadline, 0)
            with suppress(BlockingIOError):  # it was not ready after all
                left = left[self._socket.send(left, flags) :]

    def _ready(self, event: int, deadline: float | None, blocking: int) -> int:
        """Wait until the socket is ready, and return the flags of the call that follows.

        The timeout of a Python socket is not used: it would hold for a thread that sends and one that receives.
        """
        if deadline is None:
            return blocking
        left = deadline - time.monotonic()
        poller = select.poll()
        poller.register(self._socket, event)
        if left <= 0 or not poller.poll(1000 * left):
            raise TimeoutError("timeout")
        return socket.MSG_DONTWAIT

    # ------------------------------------------------------------------------------------------------- handshake

    def _greet(self, token: str, purpose: str, deadline: float) -> tuple[bytes, bytes]:
        """Exchange hellos, and return the hello of this side and of the other side."""
        hello = _HELLO.pack(_MAGIC, bool(token), purpose.encode(), secrets.token_bytes(32))
        self._write(memoryview(hello), deadline)
        other = self._read(_HELLO.size, deadline)
        magic, signed, _, _ = _HELLO.unpack(other)
        if magic != _MAGIC:
            raise WireError(f"{self.peer} is no process of an island, or one of another version")
        if signed != bool(token):
            has, lacks = (self.peer, "this process") if signed else ("this process", self.peer)
            raise WireError(f"{has} has a token and {lacks} has none: give all islands the same token")
        return hello, other

    def _introduce(self, token: str, purpose: str, deadline: float) -> None:
        """Prove the token as the side that connects."""
        with self._using():
            shared = _Token(token.encode(), *self._greet(token, purpose, deadline))
            try:
                self._write(memoryview(shared.derived(_CLIENT)), deadline)
                proof = self._read(_PROOF, deadline)
            except (_Ended, ConnectionError) as error:
                reason = "give all islands the same token and version"
                raise WireError(f"{self.peer} refused the connection for {purpose!r}: {reason}") from error
            if not hmac.compare_digest(proof, shared.derived(_SERVER)):
                raise WireError(f"{self.peer} does not know the token: give all islands the same token")
            self._seals = shared.sessions(_CLIENT, _SERVER)

    def _welcome(self, token: str, purposes: Mapping[str, Any], deadline: float) -> str:
        """Prove the token as the side that listens. Return the purpose of the connection."""
        with self._using():
            mine, other = self._greet(token, "", deadline)
            shared = _Token(token.encode(), other, mine)
            if not hmac.compare_digest(self._read(_PROOF, deadline), shared.derived(_CLIENT)):
                raise WireError(f"{self.peer} does not know the token: give all islands the same token")
            purpose = _HELLO.unpack(other)[2].rstrip(b"\0").decode(errors="replace")
            if purpose not in purposes:
                raise WireError(f"{self.peer} connects for {purpose!r}, which this process does not serve")
            self._write(memoryview(shared.derived(_SERVER)), deadline)
            self._seals = shared.sessions(_SERVER, _CLIENT)
            return purpose


def _parsed(content: bytes, peer: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(content, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a message from {peer} is not JSON") from error


def connect(address: str, token: str, purpose: str, timeout_s: float) -> Connection:
    """Connect to a listener.

    Args:
        address: "host:port". An IPv6 address has brackets: "[::1]:port".
        purpose: at most 16 bytes.
        timeout_s: the most seconds until both sides have proved the token. The connection has no timeout afterwards.

    Raises:
        Refused: no process listens at this address.
        WireError: any other failure. A process may be there.
    """
    deadline = time.monotonic() + timeout_s
    try:
        connection = Connection(_connected(address, deadline), address)
    except OSError as error:
        raise WireError(f"the connection to {address} ended: {error.strerror}") from error
    connection._introduce(token, purpose, deadline)
    return connection


def _connected(address: str, deadline: float) -> socket.socket:
    """Return a socket that is connected to the first of the host's addresses that answers."""
    host, port = split_address(address)
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise WireError(f"{address}: the name of the host cannot be resolved ({error})") from error
    errors: list[OSError] = []
    for family, kind, protocol, _, place in places:
        made = socket.socket(family, kind, protocol)
        try:
            made.settimeout(max(0.001, deadline - time.monotonic()))
            made.connect(place)
            if made.getsockname() != made.getpeername():
                return made
            # The kernel chose the target as the port of this side, so this socket met itself: nobody listens.
            errors.append(ConnectionRefusedError("nobody listens"))
        except OSError as error:
            errors.append(error)
        made.close()
    if errors and all(isinstance(error, ConnectionRefusedError) for error in errors):
        raise Refused(f"{address}: connection refused: no process listens there")
    reason = next((e for e in errors if not isinstance(e, ConnectionRefusedError)), "no address")
    raise WireError(f"{address} cannot be reached: {reason}")


def split_address(address: str) -> tuple[str, int]:
    """Return the host and the port of "host:port".

    Raises:
        WireError: it has another form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or len(port) > 5 or not 0 < int(port) < 1 << 16:
        raise WireError(f"{address!r} is no address: write host:port, or [address]:port for IPv6")
    return host.removeprefix("[").removesuffix("]"), int(port)


Handler = Callable[[Connection], None]


class Place(NamedTuple):
    """The addresses of an island, and the token of its run.

    Attributes:
        host: the address of this host that the others can reach.
        token: the secret text of the run; empty: messages are not signed.
        doors: the known addresses, at which one of the islands listens.
    """

    host: str
    token: str
    doors: tuple[str, ...]


class Listener:
    """A server for authenticated connections. Each connection has a thread of its own, which ends with the process.

    Args:
        host: the name or address to listen on; "" for all addresses of this host.
        handlers: purpose -> what serves the connection. It is closed when the function returns or raises WireError.
        port: 0 for a free one.
        reserved: addresses whose ports are not taken as free ones: another listener is going to need them.

    Attributes:
        address: "host:port" for `connect`. If it listens on all addresses, the host is this host's name.

    Raises:
        WireError: the port is taken, or the address does not belong to this host.
    """

    def __init__(
        self, host: str, token: str, handlers: Mapping[str, Handler], port: int = 0, reserved: Collection[str] = ()
    ):
        self._token, self._handlers, self._closed = token, handlers, False
        self._lock, self._connections = threading.Lock(), set[Connection]()
        self._unknown = threading.BoundedSemaphore(MOST_UNKNOWN)
        try:
            self._socket = _listening(host, port) if port else _listening_at_free_port(host, reserved)
        except OSError as error:
            raise WireError(f"cannot listen on {host or 'all addresses'}, port {port}: {error.strerror}") from error
        self.port: int = self._socket.getsockname()[1]
        shown = host or socket.gethostname()
        self.address = f"[{shown}]:{self.port}" if ":" in shown else f"{shown}:{self.port}"
        self._thread = threading.Thread(target=self._accept, daemon=True, name=f"listener {self.address}")
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and close all connections."""
        with self._lock:
            self._closed = True
            left = list(self._connections)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        self._thread.join(1.0)
        self._socket.close()
        for connection in left:
            connection.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                accepted, place = self._socket.accept()
            except OSError:
                time.sleep(0.05)  # too many files are open: some will be closed
                continue
            if not self._unknown.acquire(blocking=False):
                accepted.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(accepted, f"{place[0]}:{place[1]}"), daemon=True).start()
            except RuntimeError:  # the host allows no more threads
                self._unknown.release()
                accepted.close()

    def _serve(self, accepted: socket.socket, peer: str) -> None:
        connection = None
        try:
            try:
                connection = self._known(accepted, peer)
                purpose = connection._welcome(self._token, self._handlers, time.monotonic() + HANDSHAKE_S)
            finally:
                self._unknown.release()
            self._handlers[purpose](connection)
        except (WireError, OSError) as error:
            log.info("a connection from %s ended: %s", peer, error)
        except Exception:
            log.exception("the connection from %s failed", peer)
        finally:
            if connection is None:
                accepted.close()
            else:
                connection.close()
                with self._lock:
                    self._connections.discard(connection)

    def _known(self, accepted: socket.socket, peer: str) -> Connection:
        connection = Connection(accepted, peer)
        with self._lock:
            if self._closed:
                raise WireError("the listener is closed")
            self._connections.add(connection)
        return connection


def _listening_at_free_port(host: str, reserved: Collection[str]) -> socket.socket:
    ports = {split_address(address)[1] for address in reserved}
    with ExitStack() as taken:  # until another port is found
        while (made := _listening(host, 0)).getsockname()[1] in ports:
            taken.enter_context(made)
        return made


def _listening(host: str, port: int) -> socket.socket:
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0] if host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)
