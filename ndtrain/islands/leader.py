"""The leader of an island: runs the protocol in threads, with real sockets and a real clock.

Rank 0 of the island has it. Each island sends messages to the others over connections of its own, one for each address.
"""

import json
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from ndtrain.checkpoint.saving import flush_to_disk
from ndtrain.islands.epoch import Member, epoch_of, member_of
from ndtrain.islands.island import Island
from ndtrain.islands.messages import Start, ballot_of, from_json, to_json
from ndtrain.islands.orders import Cancel, Heal, Order, Rules, Save, Saved, Send, Stop, Tell, Work
from ndtrain.islands.shelf import CANCEL
from ndtrain.islands.wire import Connection, Listener, Place, Refused, WireError, connect, split_address

LEADER, RANKS = "leader", "ranks"
FILE = "island.json"
_TICK_S = 0.1
_CONNECT_S = 3.0
_IDLE_S = 60.0  # without a message, after which a connection is closed
_QUEUED = 1000  # messages that wait for one address; more are dropped
_MOST_RANKS = 1 << 20

log = logging.getLogger("ndtrain")


def reachable_host(door: str) -> str:
    """Return the address of this host on the route to a known address.

    Raises:
        WireError: the address has another form, or cannot be resolved.
    """
    host, port = split_address(door)
    try:
        family, _, _, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(there)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise WireError(f"{door}: there is no route to it ({error.strerror})") from error


class Leader:
    """Runs the protocol of an island. The methods are for the thread that trains.

    Args:
        name: of the island.
        grain: its number of rows is a multiple of this number.
        start: the state with which it has started.
        ranks: the address at which each rank of the island serves its tensors.
        folder: where it keeps its file.

    Raises:
        WireError: it cannot listen.
        OSError: its file cannot be read or written.
    """

    def __init__(
        self, name: str, grain: int, start: Start, rules: Rules, place: Place, ranks: Sequence[str], folder: Path
    ):
        self._place, self._file = place, folder / FILE
        self._changed = threading.Condition()
        self._events: queue.Queue[Callable[[float], None]] = queue.Queue()
        self._links: dict[tuple[str, str], _Link] = {}
        self._ranks, self._told, self._warned = list(ranks), list[str](), set[str]()
        self._ranks_of: dict[str, list[str]] = {}  # life of an island -> the addresses of its ranks
        self._closed, self._failure = False, ""
        self._handlers = {LEADER: self._hear, RANKS: self._name_ranks}
        self._doors: dict[str, Listener] = {}
        self._listener = Listener(place.host, place.token, self._handlers, reserved=place.doors)
        life, now, random = os.urandom(8).hex(), time.monotonic(), Random()
        me = Member(name, life, self._listener.address, grain)
        self._ranks_of[life] = self._ranks
        saved = read_saved(self._file)
        self.island = Island(me, start, rules, saved, False, place.doors, now, random)
        with self._changed:
            self._carry_out()
        self._open_doors()
        self._thread = threading.Thread(target=self._run, name="islands", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------ for the training thread

    @property
    def me(self) -> Member:
        return self.island.me

    def wait_for_order(self, seconds: float) -> Order | None:
        """Wait for what the island has to do. Return None if there is nothing to do within `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self.island.order() is not None, seconds)
            order = Stop(self._failure) if self._failure else self.island.order()
            if isinstance(order, Heal) and order.sources:
                self.island.begin_heal()
            return order

    def is_current(self, order: Order) -> bool:
        """Return True if the island still has to do this."""
        with self._changed:
            return self.island.order() == order

    def may_finish(self, step: int, epoch: int) -> bool:
        """Return True if the island may finish a step, and False if another epoch governs it now.

        Waits for learners that still read the weights before this step.
        """
        with self._changed:
            verdict = None
            while verdict is None and not self._failure:
                verdict = self.island.may_finish(step, epoch)
                if verdict is None:
                    self._changed.wait(_TICK_S)
            return bool(verdict)

    def offers(self, step: int) -> None:
        """Record that all ranks of the island offer their gradient of a step."""
        with self._changed:
            self.island.computed = step

    def awaited(self, step: int) -> str:
        """Return the islands that a step waits for, as `Island.awaited` does."""
        with self._changed:
            return self.island.awaited(step)

    def finish(self, step: int, ok: bool) -> None:
        """Record that all ranks have finished a step, or that some could not."""
        with self._changed:
            self.island.finish(step, ok, time.monotonic())
            self._carry_out()

    def heal(self, step: int, epoch: int) -> bool:
        """Record that all ranks have the state after a step. Return False if it is of no use any more."""
        with self._changed:
            ok = self.island.heal(step, epoch, time.monotonic())
            self._carry_out()
            return ok

    def leave(self) -> None:
        """Ask for an epoch without this island."""
        with self._changed:
            self.island.leave(time.monotonic())
            self._carry_out()

    def is_late(self, step: int) -> bool:
        """Return True if the other islands have waited for the gradients of a step for longer than the grace time."""
        with self._changed:
            return self.island.is_late(step, time.monotonic())

    def has_news(self, step: int, epoch: int) -> bool:
        """Return True if the island has something else to do than to work on a step in an epoch."""
        with self._changed:
            order = self.island.order()
            return order is not None and (not isinstance(order, Work) or (order.step, order.epoch) != (step, epoch))

    def set_speed(self, rows_per_s: float) -> None:
        """Set the measured speed of this island."""
        with self._changed:
            self.island.set_speed(rows_per_s)

    def messages(self) -> list[str]:
        """Return the lines for the user since the last call."""
        with self._changed:
            told, self._told = self._told, []
            return told

    def ranks_of(self, member: Member) -> list[str]:
        """Return the addresses at which the ranks of an island serve their tensors.

        Raises:
            WireError: it cannot be reached, or answers something else.
        """
        if member.life not in self._ranks_of:
            self._ranks_of[member.life] = self._asked_ranks(member)
        return self._ranks_of[member.life]

    def _asked_ranks(self, member: Member) -> list[str]:
        """Ask a leader for the addresses of its ranks. They are the same as long as its process lives."""
        connection = connect(member.address, self._place.token, RANKS, _CONNECT_S)
        try:
            connection.timeout_s = _CONNECT_S
            answer = connection.receive()
        finally:
            connection.close()
        if isinstance(answer, list) and len(answer) <= _MOST_RANKS and all(isinstance(x, str) for x in answer):
            return answer
        raise WireError(f"{member.address} has not answered with the addresses of its ranks")

    def close(self) -> None:
        """Stop the protocol, and close all connections."""
        with self._changed:
            self._closed = True
        self._events.put(lambda now: None)
        self._thread.join(2.0)
        for listener in (self._listener, *self._doors.values()):
            listener.close()
        for link in list(self._links.values()):
            link.close()

    # ----------------------------------------------------------------------------------------------------------- events

    def _run(self) -> None:
        try:
            next_door = 0.0
            while not self._closed:
                event = None
                with suppress(queue.Empty):
                    event = self._events.get(timeout=_TICK_S)
                with self._changed:
                    now = time.monotonic()
                    if event is not None:
                        event(now)
                    self.island.tick(now)
                    self._carry_out()
                if now > next_door:
                    next_door = now + 1.0
                    self._open_doors()
                    self._close_idle(now)
        except Exception as error:
            log.exception("the protocol of the islands has failed")
            with self._changed:
                self._failure = f"the protocol of the islands has failed: {error}"
                self._changed.notify_all()

    def _carry_out(self) -> None:
        """Carry out the effects of the protocol. The lock is held."""
        effects = self.island.effects
        while effects:
            match effects.popleft():
                case Send(address, message):
                    self._send(address, LEADER, {"from": list(self.me), "message": to_json(message)})
                case Save(saved):
                    write_saved(self._file, saved)
                case Cancel(epoch, step):
                    for address in self._ranks:
                        self._send(address, CANCEL, {"cancel": epoch, "step": step})
                case Tell(text):
                    self._told.append(text)
        self._changed.notify_all()

    def _send(self, address: str, purpose: str, value: Any) -> None:
        link = self._links.get((address, purpose))
        if link is None:
            ended = lambda: self._events.put(lambda now: self.island.process_ended(address, now))
            link = self._links[address, purpose] = _Link(address, self._place.token, purpose, ended, self._warn)
        link.send(value)

    def _warn(self, text: str) -> None:
        """Tell the user of a failure that does not pass by itself, once."""
        with self._changed:
            if text not in self._warned:
                self._warned.add(text)
                self._told.append(text)

    def _close_idle(self, now: float) -> None:
        with self._changed:
            for key, link in list(self._links.items()):
                if now - link.used > _IDLE_S:
                    link.close()
                    del self._links[key]

    def _open_doors(self) -> None:
        """Listen at the known addresses that belong to this host and are free."""
        for door in self._place.doors:
            if door not in self._doors:
                host, port = split_address(door)
                with suppress(WireError):
                    self._doors[door] = Listener(host, self._place.token, self._handlers, port)
        with self._changed:
            self.island.founder = self._place.doors[0] in self._doors

    def _hear(self, connection: Connection) -> None:
        """Handle the messages of another leader, until its connection ends."""
        address = ""
        try:
            while True:
                sender, message = _message_of(connection.receive())
                address = sender.address
                self._events.put(lambda now, s=sender, m=message: self.island.receive(s, m, now))
        finally:
            if address and not self._closed:
                self._events.put(
                    lambda now: self._links[address, LEADER].probe() if (address, LEADER) in self._links else None
                )

    def _name_ranks(self, connection: Connection) -> None:
        connection.send(self._ranks, most=64 << 20)
        connection.timeout_s = _CONNECT_S
        with suppress(WireError):
            connection.receive()  # ends when the other side closes


def _message_of(data: Any) -> tuple[Member, Any]:
    try:
        match data:
            case {"from": sender, "message": message, **rest} if not rest:
                return member_of(sender), from_json(message)
    except ValueError as error:
        raise WireError(f"a malformed message: {error}") from error
    raise WireError("a message of another form")


class _Link:
    """A thread that sends messages to one address, in order. A message that cannot be sent is dropped.

    Args:
        ended: is called if nobody listens there any more.
        warn: is called with a line about a wrong token.

    Attributes:
        used: the time of the last message.
    """

    def __init__(self, address: str, token: str, purpose: str, ended: Callable[[], None], warn: Callable[[str], None]):
        self._address, self._token, self._purpose, self._ended, self._warn = address, token, purpose, ended, warn
        self._queue: queue.Queue[Any] = queue.Queue(_QUEUED)
        self._connection: Connection | None = None
        self._closed, self.used = False, time.monotonic()
        threading.Thread(target=self._run, name=f"link {address}", daemon=True).start()

    def send(self, value: Any) -> None:
        """Send a message soon."""
        self.used = time.monotonic()
        with suppress(queue.Full):
            self._queue.put_nowait(value)

    def probe(self) -> None:
        """Find out whether a process still listens there."""
        self.send(None)

    def close(self) -> None:
        """End the thread and the connection."""
        self._closed = True
        with suppress(queue.Full):
            self._queue.put_nowait(None)
        if self._connection:
            self._connection.close()

    def _run(self) -> None:
        while not self._closed:
            value = self._queue.get()
            if self._closed:
                break
            for _ in range(2):  # a connection may have ended since the last message
                if self._try(value):
                    break
        if self._connection:
            self._connection.close()

    def _try(self, value: Any) -> bool:
        """Return False if the message should be tried again."""
        if value is None:
            self._drop()
        fresh = self._connection is None
        try:
            if self._connection is None:
                self._connection = connect(self._address, self._token, self._purpose, _CONNECT_S)
                self._connection.timeout_s = _CONNECT_S
            if value is not None:
                self._connection.send(value)
            return True
        except Refused:
            self._ended()
            return True
        except WireError as error:
            log.info("a message to %s was dropped: %s", self._address, error)
            if "token" in str(error):
                self._warn(f"warning: {error}")
            self._drop()
            return fresh

    def _drop(self) -> None:
        if self._connection:
            self._connection.close()
            self._connection = None


# ----------------------------------------------------------------------------------------------------------------- file


def write_saved(path: Path, saved: Saved) -> None:
    """Write what an island has to know after a restart, in one rename, and flush it to the disk.

    Raises:
        OSError: it cannot be written.
    """
    json_of = lambda epoch: None if epoch is None else epoch.to_json()
    data = {
        "epoch": json_of(saved.epoch),
        "promised": saved.promised,
        "accepted_ballot": saved.accepted_ballot,
        "accepted": json_of(saved.accepted),
    }
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(json.dumps(data))
    flush_to_disk(part)
    part.replace(path)
    flush_to_disk(path.parent)


def read_saved(path: Path) -> Saved | None:
    """Return what an earlier process has written; None if there is no file.

    Raises:
        ValueError: the file has another form.
        OSError: it cannot be read.
    """
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply") from error
    epoch_or_none = lambda value: None if value is None else epoch_of(value)
    match data:
        case {"epoch": epoch, "promised": promised, "accepted_ballot": ballot, "accepted": accepted, **rest} if (
            not rest
        ):
            return Saved(epoch_or_none(epoch), ballot_of(promised), ballot_of(ballot), epoch_or_none(accepted))
    raise ValueError(f"{path} is no file of an island")
