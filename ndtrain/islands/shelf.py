"""The tensors that a rank offers to the ranks of other islands, and the server that sends them."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from ndtrain.islands.orders import Cancel
from ndtrain.islands.table import MOST_TABLE, Selection, Staging, Table, count_of, rows_of, text_of
from ndtrain.islands.wire import Connection, Handler, WireError

RANK, CANCEL = "rank", "cancel"  # purposes of connections
GRAD = "grad"  # the kind of tags that end with their epoch
SUM, STATE = "sum", "state"
GONE = {"gone": True}  # the answer to a read of tensors that will not be offered
PROBE_S = 1.0  # between two looks whether a waiting reader has left
GRACE_S = 1.0  # for readers to finish before their tensors are withdrawn
_REMEMBERED = 4096  # withdrawn tags

Offered = Mapping[str, Tensor]  # the name of a buffer -> this rank's shard


class Tag(NamedTuple):
    """The name of what is read together.

    Attributes:
        what: "grad": the gradients of one island; "sum": their sum over the islands; "state": weights and optimizer.
        step: the step that they belong to; for a state, the number of finished steps.
        epoch: the epoch in which they are read.
    """

    what: str
    step: int
    epoch: int

    def is_given_up(self, cancelled: Cancel) -> bool:
        """Return True if these are gradients that are given up."""
        return self.what == GRAD and cancelled.covers(self.epoch, self.step)


class Shelf:
    """The tensors that a rank offers. All methods may be called from any thread.

    Args:
        table: the elements that this rank serves, each of them on one rank of the island alone.
        cancelled: is called when the leader of the island cancels gradients.
    """

    def __init__(self, table: Table, cancelled: Callable[[Cancel], None] = lambda given_up: None):
        self.table, self._on_cancel = table, cancelled
        self._document = table.to_json()
        self._changed = threading.Condition()
        self._offers: dict[Tag, dict[str, Offered]] = {}
        self._withdrawn: dict[Tag, None] = {}
        self._readers: dict[Connection, Tag] = {}  # those that tensors are being sent to
        self._cancelled, self._closed = Cancel(-1), False

    def handlers(self) -> dict[str, Handler]:
        """Return the handlers for a `Listener`."""
        return {RANK: self.serve, CANCEL: self.serve_cancel}

    # ---------------------------------------------------------------------------------------------------- offers

    def offer(self, tag: Tag, unit: str, buffers: Offered) -> None:
        """Make a unit readable. Its tensors must not change until `withdraw` has returned.

        Does nothing if the tag is withdrawn.

        Args:
            buffers: flat tensors on the CPU, one for each buffer of the table's `tag.what`.

        Raises:
            ValueError: the tensors are not as the table describes them.
        """
        named, numel = self.table.buffers[tag.what], self.table.units[unit].numel
        fits = lambda x, dtype: (
            x.dtype == dtype and x.shape == (numel,) and x.is_contiguous() and x.device.type == "cpu"
        )
        if buffers.keys() != named.keys() or not all(fits(buffers[name], dtype) for name, dtype in named.items()):
            raise ValueError(f"unit {unit} is offered with other tensors than its table describes for {tag.what!r}")
        with self._changed:
            if not self._closed and tag not in self._withdrawn:
                self._offers.setdefault(tag, {})[unit] = buffers
                self._changed.notify_all()

    def withdraw(self, tag: Tag, grace_s: float = GRACE_S) -> None:
        """Stop offering what has this tag. After the return nobody reads the tensors, so they may change.

        Args:
            grace_s: the most seconds to wait for readers. Then their connections are closed. A reader never gets
                elements that have changed while they were sent.
        """
        with self._changed:
            self._offers.pop(tag, None)
            self._withdrawn[tag] = None
            if len(self._withdrawn) > _REMEMBERED:
                del self._withdrawn[next(iter(self._withdrawn))]
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._readers_of(tag), grace_s)
            for connection in self._readers_of(tag):
                connection.close()
            self._changed.wait_for(lambda: not self._readers_of(tag))

    def cancel(self, given_up: Cancel) -> None:
        """Answer "gone" to all who wait for the gradients that are given up, until the next call.

        Gradients that are being sent are sent to the end. Their tensors must not change until `withdraw`.
        """
        with self._changed:
            self._cancelled = given_up
            self._changed.notify_all()

    def wait(self, tag: Tag, unit: str, timeout_s: float | None = None) -> Offered | None:
        """Wait until a unit is offered, and return its tensors. Return None if it is gone.

        Raises:
            TimeoutError: it was not offered in time.
        """
        found = lambda: self._is_gone(tag) or unit in self._offers.get(tag, ())
        with self._changed:
            if not self._changed.wait_for(found, timeout_s):
                raise TimeoutError(f"unit {unit} of {tag} was not offered within {timeout_s:g} s")
            return None if self._is_gone(tag) else self._offers[tag][unit]

    def close(self) -> None:
        """Withdraw everything, and answer "gone" from now on."""
        with self._changed:
            self._closed = True
            tags = list(self._offers)
        for tag in tags:
            self.withdraw(tag, grace_s=0.0)
        with self._changed:
            self._changed.notify_all()

    def _is_gone(self, tag: Tag) -> bool:
        return self._closed or tag in self._withdrawn or tag.is_given_up(self._cancelled)

    def _readers_of(self, tag: Tag) -> list[Connection]:
        return [connection for connection, its in self._readers.items() if its == tag]

    # ----------------------------------------------------------------------------------------------------- server

    def serve(self, connection: Connection) -> None:
        """Serve a rank of another island: send the table, receive its selection, and answer its reads.

        Raises:
            WireError: the connection ended, or a message is not as it must be.
        """
        connection.send(self._document, MOST_TABLE)
        selections = _checked(_selections_of, connection.receive(MOST_TABLE), self.table)
        staging = Staging()
        while True:
            tag, units = _checked(_read_of, connection.receive(), self.table)
            for unit in units:
                if unit not in selections:
                    raise WireError(f"{connection.peer} reads unit {unit!r}, of which it has selected nothing")
                if not self._send(connection, tag, unit, selections[unit], staging):
                    break

    def serve_cancel(self, connection: Connection) -> None:
        """Serve the leader of this island, which cancels gradients.

        Raises:
            WireError: the connection ended, or a message is not as it must be.
        """
        while True:
            given_up = _checked(_cancel_of, connection.receive())
            self.cancel(given_up)
            self._on_cancel(given_up)
            connection.send({"cancelled": given_up.epoch})

    def _send(self, connection: Connection, tag: Tag, unit: str, selection: Selection, staging: Staging) -> bool:
        """Send one unit as soon as it is offered. Return False if it is gone."""
        with self._lent(connection, tag, unit) as buffers:
            if buffers is None:
                connection.send(GONE)
                return False
            nbytes = sum(selection.nbytes(x.dtype) for x in buffers.values())
            connection.send({"unit": unit, "nbytes": nbytes})
            for name in sorted(buffers):
                selection.send(connection, buffers[name], staging)
        return True

    @contextmanager
    def _lent(self, connection: Connection, tag: Tag, unit: str) -> Iterator[Offered | None]:
        """Return a context in which the tensors of a unit are not withdrawn from a reader unless it is disconnected."""
        with self._changed:
            buffers = self._awaited(connection, tag, unit)
            if buffers is not None:
                self._readers[connection] = tag
        try:
            yield buffers
        finally:
            with self._changed:
                self._readers.pop(connection, None)
                self._changed.notify_all()

    def _awaited(self, connection: Connection, tag: Tag, unit: str) -> Offered | None:
        """Wait as `wait` does, as long as the reader is there."""
        while True:
            try:
                return self.wait(tag, unit, PROBE_S)
            except TimeoutError:
                if connection.has_left():
                    raise WireError(f"{connection.peer} has left") from None


def _checked(parse: Callable[..., Any], *given: Any) -> Any:
    """Return the parsed message. A message of another form ends the connection."""
    try:
        return parse(*given)
    except ValueError as error:
        raise WireError(f"a message has another form than expected: {error}") from error


def _cancel_of(data: Any) -> Cancel:
    match data:
        case {"cancel": epoch, "step": step, **rest} if not rest:
            return Cancel(count_of(epoch), None if step is None else count_of(step))
    raise ValueError("not a cancelled epoch")


def _selections_of(data: Any, table: Table) -> dict[str, Selection]:
    match data:
        case {"select": dict(units), **rest} if not rest:
            return {name: _selection_of(rows, table.units[name].numel) for name, rows in _known(units, table)}
    raise ValueError("not a selection of elements")


def _known(units: dict[str, Any], table: Table) -> Iterator[tuple[str, Any]]:
    if not units.keys() <= table.units.keys():
        raise ValueError("a selection of a unit that is not in the table")
    yield from units.items()


def _selection_of(data: Any, numel: int) -> Selection:
    if not isinstance(data, list) or not data:
        raise ValueError("not a selection of a unit")
    selection = Selection(rows_of(rows, numel) for rows in data)
    if selection.numel > numel:
        raise ValueError("a selection has more elements than its unit")
    return selection


def _read_of(data: Any, table: Table) -> tuple[Tag, list[str]]:
    match data:
        case {"what": str(what), "step": step, "epoch": epoch, "units": list(units), **rest} if not rest:
            if what in table.buffers:
                return Tag(what, count_of(step), count_of(epoch)), [text_of(unit) for unit in units]
    raise ValueError("not a read of tensors")
