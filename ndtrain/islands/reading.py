"""The reader of a rank: it reads this rank's elements from the ranks of other islands that hold them."""

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ndtrain.islands.orders import Cancel
from ndtrain.islands.shelf import GONE, RANK, Tag
from ndtrain.islands.table import MOST_TABLE, Buffers, Selection, Staging, Table, UnitTable
from ndtrain.islands.wire import Connection, WireError, connect
from ndtrain.mesh.row_map import Held, Rows
from ndtrain.mesh.transfer import copies_between

_CONNECTING = -1  # in place of the index of a unit, while connections are made
AHEAD = 2  # units that are received before the consumer needs them
CONNECT_S = 30.0  # for a connection to one rank, with its table
_AT_ONCE = 16  # connections that are made at one time

Arrived = dict[str, dict[str, Tensor]]  # island -> the name of a buffer -> this rank's shard
Slots = list[dict[str, Tensor]]  # for AHEAD + 1 units: the name of a buffer -> memory of the largest shard
Allocate = Callable[[int, torch.dtype], Tensor]


class Gone(Exception):
    """The tensors of an island cannot be read: it has withdrawn them, or the connection ended, or `Reader.cancel`.

    Attributes:
        island: its name; "" after `Reader.cancel`.
    """

    def __init__(self, island: str, why: str):
        super().__init__(f"island {island}: {why}" if island else why)
        self.island = island


class _Taken(NamedTuple):
    """The elements of one unit that one rank of an island sends.

    Attributes:
        source, target: their positions in the shard of that rank, and in this rank's shard.
        counts: tensor -> the number of its elements.
    """

    source: Selection
    target: Selection
    counts: dict[str, int]


@dataclass(eq=False)
class _Peer:
    """The connection to one rank of another island.

    Attributes:
        units: unit name -> what this rank reads from it.
        busy: True while it sends. If a read ends meanwhile, the connection is of no more use.
    """

    island: str
    connection: Connection
    units: dict[str, _Taken]
    staging: Staging = field(default_factory=Staging)
    busy: bool = False


@dataclass(eq=False)
class _Island:
    """The connections to an island."""

    endpoints: tuple[str, ...]
    peers: list[_Peer]

    @property
    def is_usable(self) -> bool:
        return not any(peer.connection.closed for peer in self.peers)

    def close(self) -> None:
        for peer in self.peers:
            peer.connection.close()


class _Progress:
    """The progress of one read, which its threads and its consumer share."""

    def __init__(self, tags: Mapping[str, Tag]):
        self.tags = dict(tags)
        self._left: dict[int, int] = {}  # index of a unit, or _CONNECTING -> the number of ranks that are awaited
        self._at = 0  # index of the unit that the consumer has
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self.peers: list[_Peer] = []  # each has a thread that receives from it
        self.threads: list[threading.Thread] = []

    def expect(self, index: int) -> None:
        """Note that one more rank sends a unit."""
        self._left[index] = self._left.get(index, 0) + 1

    def may_fill(self, index: int) -> bool:
        """Wait until the consumer is close enough to a unit. Return False if the read has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or index <= self._at + AHEAD)
            return self._error is None

    def has_filled(self, index: int) -> None:
        """Note that one rank has sent a unit."""
        with self._changed:
            self._left[index] -= 1
            self._changed.notify_all()

    def wait(self, index: int) -> None:
        """Wait until all ranks have sent a unit. Raise the error of the read, if there is one."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or not self._left.get(index))
            if self._error:
                raise self._error

    def advance(self) -> None:
        """Note that the consumer is done with a unit."""
        with self._changed:
            self._at += 1
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """End the read, unless it has ended before."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()


class Reader:
    """Reads the elements that a rank holds from other islands. One thread reads; any thread may cancel.

    Args:
        wanted: all elements that this rank holds.
        token: the token that all islands share.
        allocate: makes the flat tensors that are filled, on the CPU: for example in pinned memory.
        timeout_s: the most seconds to connect to a rank.

    Attributes:
        nbytes: the bytes of elements that were read so far.
    """

    def __init__(
        self, wanted: Table, token: str, allocate: Allocate | None = None, timeout_s: float = CONNECT_S
    ) -> None:
        self.wanted, self._token, self._timeout_s = wanted, token, timeout_s
        self._allocate = allocate or (lambda numel, dtype: torch.empty(numel, dtype=dtype))
        self._padding = {name: _gaps(unit) for name, unit in wanted.units.items()}
        self._islands: dict[str, _Island] = {}
        self._slots: dict[str, tuple[Buffers, Slots]] = {}
        self.nbytes = 0
        self._lock = threading.Lock()
        self._progress: _Progress | None = None
        self._cancelled = Cancel(-1)

    # ----------------------------------------------------------------------------------------------- connections

    def connect(self, name: str, endpoints: Sequence[str]) -> None:
        """Connect to an island, instead of its previous ranks if there are any.

        Args:
            endpoints: the address of each of its ranks.

        Raises:
            Refused: at one of the addresses no process listens.
            WireError: a rank cannot be reached, or sends something else than its table.
            ValueError: the ranks do not hold each element of this rank once, or have other buffers.
        """
        self.disconnect(name)
        self._islands[name] = _Island(tuple(endpoints), self._connected(name, endpoints))

    def disconnect(self, name: str) -> None:
        """Close the connections to an island, if there are any."""
        if island := self._islands.pop(name, None):
            island.close()
        self._slots.pop(name, None)

    def close(self) -> None:
        """Close all connections."""
        self.cancel()
        for name in list(self._islands):
            self.disconnect(name)

    def _connected(self, name: str, endpoints: Sequence[str]) -> list[_Peer]:
        peers: list[_Peer] = []  # appended to by threads; all of them are closed if one fails
        try:
            _each(lambda endpoint: self._greet(name, endpoint, peers), endpoints)
            self._check_complete(name, peers)
        except BaseException:
            for peer in peers:
                peer.connection.close()
            raise
        for peer in peers:
            if not peer.units:
                peer.connection.close()
        return [peer for peer in peers if peer.units]

    def _greet(self, island: str, endpoint: str, peers: list[_Peer]) -> None:
        """Connect to one rank, and select what this rank takes from it."""
        connection = connect(endpoint, self._token, RANK, self._timeout_s)
        peer = _Peer(island, connection, {})
        peers.append(peer)
        connection.timeout_s = self._timeout_s
        try:
            table = Table.from_json(connection.receive(MOST_TABLE))
        except ValueError as error:
            raise WireError(f"{endpoint} has sent a malformed table: {error}") from error
        if table.buffers != self.wanted.buffers:
            raise ValueError(f"island {island}: its buffers {table.buffers} differ from {self.wanted.buffers} here")
        for name in self.wanted.units.keys() & table.units.keys():
            taken = _taken(table.units[name], self.wanted.units[name])
            if taken.counts:
                peer.units[name] = taken
        if peer.units:
            select = {name: [list(rows) for rows in taken.source.rows] for name, taken in peer.units.items()}
            connection.send({"select": select}, MOST_TABLE)
        connection.timeout_s = None

    def _check_complete(self, island: str, peers: Sequence[_Peer]) -> None:
        """Check that each element comes from one rank."""
        for name, unit in self.wanted.units.items():
            counts = [peer.units[name].counts for peer in peers if name in peer.units]
            for tensor, held in unit.tensors.items():
                needed = sum(h.rows.numel for h in held)
                coming = sum(of_peer.get(tensor, 0) for of_peer in counts)
                if coming != needed:
                    raise ValueError(f"{tensor}: {needed} elements are needed, but island {island} has {coming}")

    # --------------------------------------------------------------------------------------------------- reading

    def read_each(self, tag_of: Mapping[str, Tag], units: Sequence[str]) -> Iterator[tuple[str, Arrived]]:
        """Yield (unit, its shard from each island), in the order of `units` and of `tag_of`.

        The tensors hold this rank's shard in its own order; padding is zero. They are valid until the next iteration.

        Args:
            tag_of: the name of each island -> what to read from it. All tags have the same `what`.

        Raises:
            Gone: an island has withdrawn the tensors, or a connection ended, or `cancel` was called.
        """
        progress = self._started(tag_of)
        try:
            self._reconnect(progress)
            slots = {name: self._slots_of(name, tag.what) for name, tag in tag_of.items()}
            for i, unit in enumerate(units[: AHEAD + 1]):
                self._clear_padding(slots, i, unit)
            self._launch(progress, slots, units)
            for i, unit in enumerate(units):
                progress.wait(i)
                yield unit, {name: self._shard(slots[name], i, unit) for name in tag_of}
                for ahead in units[i + AHEAD + 1 : i + AHEAD + 2]:
                    self._clear_padding(slots, i + AHEAD + 1, ahead)
                progress.advance()
        finally:
            self._end(progress)

    def cancel(self, given_up: Cancel | None = None) -> None:
        """Make the read that is in progress raise `Gone` at once, in its own thread.

        Args:
            given_up: end only a read of these gradients, and refuse such reads until the next call with an argument.
        """
        with self._lock:
            self._cancelled = given_up or self._cancelled
            progress = self._progress
            if progress and (given_up is None or self._is_cancelled(progress.tags)):
                progress.fail(Gone("", "the read was cancelled"))

    def _is_cancelled(self, tags: Mapping[str, Tag]) -> bool:
        return any(tag.is_given_up(self._cancelled) for tag in tags.values())

    def _started(self, tag_of: Mapping[str, Tag]) -> _Progress:
        progress = _Progress(tag_of)
        if self._progress:  # its consumer has failed, and a traceback still holds the iterator
            self._end(self._progress)
        with self._lock:
            if self._is_cancelled(tag_of):
                raise Gone("", "the epoch was cancelled")
            for name in tag_of:
                if name not in self._islands:
                    raise Gone(name, "this rank is not connected to it")
            self._progress = progress
        return progress

    def _reconnect(self, progress: _Progress) -> None:
        """Connect again to islands that have lost a connection. Threads do it, so that `cancel` need not wait."""
        lost = [name for name in progress.tags if not self._islands[name].is_usable]
        for _ in lost:
            progress.expect(_CONNECTING)
        for name in lost:
            island = self._islands[name]
            island.close()
            threading.Thread(target=self._renew, args=(name, island, progress), daemon=True).start()
        progress.wait(_CONNECTING)

    def _renew(self, name: str, island: _Island, progress: _Progress) -> None:
        try:
            peers = self._connected(name, island.endpoints)
        except Exception as error:
            progress.fail(Gone(name, str(error)) if isinstance(error, WireError) else error)
            return
        with self._lock:
            is_needed = self._progress is progress
            if is_needed:
                island.peers = peers
        if not is_needed:  # cancelled meanwhile
            for peer in peers:
                peer.connection.close()
        progress.has_filled(_CONNECTING)

    def _launch(self, progress: _Progress, slots: dict[str, Slots], units: Sequence[str]) -> None:
        """Start a thread for each rank that sends some of the units."""
        todo = []
        for peer in (peer for name in progress.tags for peer in self._islands[name].peers):
            indices = [i for i, unit in enumerate(units) if unit in peer.units]
            for i in indices:
                progress.expect(i)
            if indices:
                progress.peers.append(peer)
                peer.busy = True  # before its thread begins: the read may end at any time
                todo.append((peer, progress, slots[peer.island], [(i, units[i]) for i in indices]))
        progress.threads = [threading.Thread(target=self._receive, args=each, daemon=True) for each in todo]
        for thread in progress.threads:
            thread.start()

    def _receive(self, peer: _Peer, progress: _Progress, slots: Slots, units: list[tuple[int, str]]) -> None:
        """Receive units from one rank, in a thread of their own."""
        what, step, epoch = progress.tags[peer.island]
        try:
            peer.connection.send({"what": what, "step": step, "epoch": epoch, "units": [unit for _, unit in units]})
            for i, unit in units:
                if not progress.may_fill(i):
                    return
                if not self._receive_unit(peer, unit, self._shard(slots, i, unit)):
                    peer.busy = False
                    raise Gone(peer.island, f"{peer.connection.peer} no longer offers {what} of step {step}")
                peer.busy = i != units[-1][0]
                progress.has_filled(i)
        except WireError as error:
            progress.fail(Gone(peer.island, str(error)))
        except BaseException as error:
            progress.fail(error)

    def _receive_unit(self, peer: _Peer, unit: str, shard: dict[str, Tensor]) -> bool:
        """Receive this rank's elements of a unit. Return False if they are gone."""
        taken = peer.units[unit]
        nbytes = sum(taken.target.nbytes(x.dtype) for x in shard.values())
        header = peer.connection.receive()
        if header == GONE:
            return False
        if header != {"unit": unit, "nbytes": nbytes}:
            raise WireError(f"{peer.connection.peer} sends something else than {nbytes} bytes of {unit}")
        for name in sorted(shard):
            taken.target.receive(peer.connection, shard[name], peer.staging)
        with self._lock:
            self.nbytes += nbytes
        return True

    def _end(self, progress: _Progress) -> None:
        """Stop the threads, once. When they have ended, nothing writes to the slots any more."""
        with self._lock:
            if self._progress is not progress:
                return
            self._progress = None
        progress.fail(Gone("", "the read has ended"))
        for peer in progress.peers:
            if peer.busy:
                peer.connection.close()
        for thread in progress.threads:
            thread.join()

    # ----------------------------------------------------------------------------------------------------- memory

    def _slots_of(self, name: str, what: str) -> Slots:
        """Return the memory for the units of an island. It is used again as long as the same buffers are read."""
        buffers = self.wanted.buffers[what]
        if name not in self._slots or self._slots[name][0] != buffers:
            self._slots.pop(name, None)  # first, so that both are never held
            most = max((unit.numel for unit in self.wanted.units.values()), default=0)
            made = [{b: self._allocate(most, dtype) for b, dtype in buffers.items()} for _ in range(AHEAD + 1)]
            self._slots[name] = buffers, made
        return self._slots[name][1]

    def _shard(self, slots: Slots, index: int, unit: str) -> dict[str, Tensor]:
        numel = self.wanted.units[unit].numel
        return {name: x[:numel] for name, x in slots[index % len(slots)].items()}

    def _clear_padding(self, slots: dict[str, Slots], index: int, unit: str) -> None:
        """Zero the elements that no rank sends, where another unit was before."""
        for of_island in slots.values():
            for x in self._shard(of_island, index, unit).values():
                for start, stop in self._padding[unit]:
                    x[start:stop].zero_()


def _each(work: Callable[[str], None], endpoints: Sequence[str]) -> None:
    """Work on some endpoints at one time. Raise the first error, if there is one.

    The threads end with the process. An executor would delay its exit if a host does not answer.
    """
    left: queue.SimpleQueue[str] = queue.SimpleQueue()
    errors: list[BaseException] = []

    def run() -> None:
        while not errors:
            try:
                work(left.get_nowait())
            except queue.Empty:
                return
            except BaseException as error:
                errors.append(error)

    for endpoint in endpoints:
        left.put(endpoint)
    threads = [threading.Thread(target=run, daemon=True) for _ in range(min(_AT_ONCE, len(endpoints)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _taken(source: UnitTable, target: UnitTable) -> _Taken:
    """Return the elements of a unit that both ranks hold."""
    copies = {}
    for tensor, held in target.tensors.items():
        there = source.tensors.get(tensor, ())
        if _may_meet(there, held) and (found := copies_between(there, held)):
            copies[tensor] = found
    each = [copy for found in copies.values() for copy in found]
    return _Taken(
        Selection(Rows(c.source, c.length, c.number, c.source_stride) for c in each),
        Selection(Rows(c.target, c.length, c.number, c.target_stride) for c in each),
        {tensor: sum(c.numel for c in found) for tensor, found in copies.items()},
    )


def _may_meet(one: Sequence[Held], other: Sequence[Held]) -> bool:
    """Return False if two ranks hold distant parts of a tensor. With many ranks that is the most frequent case."""
    first = lambda held: min(h.rows.start for h in held)
    end = lambda held: max(h.rows.start + h.rows.span for h in held)
    return bool(one and other) and first(one) < end(other) and first(other) < end(one)


def _gaps(unit: UnitTable) -> list[tuple[int, int]]:
    """Return the parts [start, stop) of a shard that hold no tensor."""
    spans = sorted((h.at, h.at + h.rows.numel) for held in unit.tensors.values() for h in held)
    edges = [(0, 0), *spans, (unit.numel, unit.numel)]
    return [(a[1], b[0]) for a, b in pairwise(edges) if a[1] < b[0]]
