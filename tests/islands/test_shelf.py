"""What a rank offers: reads wait for it, end when it is gone, and never see tensors that have changed."""

import threading
import time

import pytest
import torch

from ndtrain.islands.orders import Cancel
from ndtrain.islands.shelf import CANCEL, GONE, RANK, Shelf, Tag
from ndtrain.islands.table import Table, UnitTable
from ndtrain.islands.wire import Connection, Listener, WireError, connect
from ndtrain.mesh.row_map import Held, Rows
from tests.lib.islands import BUFFERS, TOKEN

NUMEL = 24
GRAD = Tag("grad", 3, 1)
TABLE = Table({"u": UnitTable(NUMEL, {"w": (Held(0, Rows(0, 20)),)}), "v": UnitTable(8, {})}, BUFFERS)


@pytest.fixture
def shelf():
    made = Shelf(TABLE)
    yield made
    made.close()


@pytest.fixture
def listener(shelf):
    made = Listener("127.0.0.1", TOKEN, shelf.handlers())
    yield made
    made.close()


def reader(listener: Listener, select=None) -> Connection:
    """A connection that has received the table and selected elements."""
    connection = connect(listener.address, TOKEN, RANK, 5.0)
    connection.timeout_s = 5.0
    assert Table.from_json(connection.receive()) == TABLE
    connection.send({"select": {"u": [[0, 20, 1, 0]]} if select is None else select})
    return connection


def read_of(tag: Tag, *units: str) -> dict:
    return {**tag._asdict(), "units": list(units)}


def grad(numel: int = NUMEL) -> dict[str, torch.Tensor]:
    return {"grad": torch.arange(numel, dtype=torch.float32)}


def floats(connection: Connection, numel: int) -> list[float]:
    data = torch.empty(numel)
    connection.receive_into(memoryview(data.numpy()))
    return data.tolist()


def soon(condition) -> bool:
    end = time.monotonic() + 5
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_serve_offered_unit_sends_selected_elements_of_each_buffer(shelf, listener):
    connection = reader(listener, {"u": [[2, 3, 2, 5], [1, 1, 1, 0]]})
    shelf.offer(GRAD, "u", grad())
    connection.send(read_of(GRAD, "u"))
    assert connection.receive() == {"unit": "u", "nbytes": 28}
    assert floats(connection, 7) == [2, 3, 4, 7, 8, 9, 1]
    state = Tag("state", 3, 1)
    master = torch.arange(NUMEL, dtype=torch.float32)
    shelf.offer(state, "u", {"master": master, "exp_avg": -master.bfloat16()})
    connection.send(read_of(state, "u"))
    assert connection.receive() == {"unit": "u", "nbytes": 7 * 6}
    averages = torch.empty(7, dtype=torch.bfloat16)
    connection.receive_into(memoryview(averages.view(torch.int16).numpy()))
    assert averages.tolist() == [-2, -3, -4, -7, -8, -9, -1]  # buffers come in the order of their names
    assert floats(connection, 7) == [2, 3, 4, 7, 8, 9, 1]


def test_serve_waits_until_unit_is_offered(shelf, listener):
    connection = reader(listener)
    connection.send(read_of(GRAD, "u"))
    connection.timeout_s = 0.2
    time.sleep(0.1)
    assert not connection.has_left()
    shelf.offer(Tag("grad", 4, 1), "u", grad())
    shelf.offer(Tag("sum", 3, 1), "u", grad())
    with pytest.raises(WireError, match="in time"):
        connection.receive()


@pytest.mark.parametrize(
    "select",
    [
        {"u": [[0, NUMEL + 1, 1, 0]]}, {"u": [[NUMEL, 1, 1, 0]]}, {"u": [[0, 2, 12, 3]]}, {"u": [[-1, 1, 1, 0]]},
        {"u": [[0, 13, 1, 0], [0, 12, 1, 0]]}, {"w": [[0, 1, 1, 0]]}, {"u": []}, {"u": [[0, 1, 1]]}, {"u": 3}, [],
        {"u": [[0.0, 1, 1, 0]]}, {"u": [[0, 1, 2**60, 1]]},
    ],
)  # fmt: skip
def test_serve_selection_out_of_bounds_ends_connection(listener, caplog, select):
    connection = reader(listener, select)
    with pytest.raises(WireError, match=r"closed the connection|ended"):
        connection.receive()
    assert not [record for record in caplog.records if record.exc_info]  # it was expected


@pytest.mark.parametrize(
    "read",
    [
        read_of(Tag("weights", 3, 1), "u"), read_of(Tag("grad", -1, 1), "u"), read_of(Tag("grad", 3, 1.5), "u"),
        read_of(GRAD, "v"), read_of(GRAD, "w"), read_of(GRAD, 3), {"what": "grad"}, [],
    ],
)  # fmt: skip
def test_serve_malformed_read_ends_connection(listener, caplog, read):
    connection = reader(listener)
    connection.send(read)
    with pytest.raises(WireError, match=r"closed the connection|ended"):
        connection.receive()
    assert not [record for record in caplog.records if record.exc_info]  # it was expected


def test_withdraw_answers_gone_to_waiting_and_later_reads(shelf, listener):
    connection = reader(listener)
    connection.send(read_of(GRAD, "u"))
    time.sleep(0.05)
    shelf.withdraw(GRAD)
    assert connection.receive() == GONE
    shelf.offer(GRAD, "u", grad())  # too late
    connection.send(read_of(GRAD, "u"))
    assert connection.receive() == GONE
    later = GRAD._replace(step=4)
    shelf.offer(later, "u", grad())
    connection.send(read_of(later, "u"))
    assert connection.receive() == {"unit": "u", "nbytes": 80}


def test_cancel_answers_gone_only_for_gradients_of_past_epochs(shelf, listener):
    connections = {epoch: reader(listener) for epoch in (1, 2, 3)}
    for epoch, connection in connections.items():
        connection.send(read_of(GRAD._replace(epoch=epoch), "u"))
    leader = connect(listener.address, TOKEN, CANCEL, 5.0)
    time.sleep(0.05)
    leader.send({"cancel": 2, "step": None})
    assert leader.receive() == {"cancelled": 2}
    assert connections[1].receive() == connections[2].receive() == GONE
    for tag in (GRAD._replace(epoch=3), Tag("sum", 3, 1), Tag("state", 3, 1)):
        shelf.offer(tag, "u", {b: torch.zeros(NUMEL, dtype=d) for b, d in BUFFERS[tag.what].items()})
    assert connections[3].receive()["unit"] == "u"
    connections[1].send(read_of(Tag("sum", 3, 1), "u"))
    assert connections[1].receive()["unit"] == "u"
    shelf.offer(GRAD, "u", grad())
    assert shelf.wait(GRAD, "u", 0) is None
    last = GRAD.epoch - 1
    leader.send({"cancel": last, "step": GRAD.step + 1})  # the epoch goes on, and what was offered meanwhile is there
    assert leader.receive() == {"cancelled": last}
    assert shelf.wait(GRAD, "u", 0) is not None
    leader.send({"cancel": last, "step": GRAD.step})  # it goes on up to the step before
    assert leader.receive() == {"cancelled": last}
    assert shelf.wait(GRAD, "u", 0) is None


@pytest.mark.parametrize("refused", [{"cancel": -1, "step": 1}, {"cancel": 1, "step": -1}, {"cancel": 1}])
def test_serve_cancel_calls_the_rank_and_refuses_other_messages(refused, shelf):
    given_up = []
    shelf = Shelf(TABLE, given_up.append)
    listener = Listener("127.0.0.1", TOKEN, shelf.handlers())
    leader = connect(listener.address, TOKEN, CANCEL, 5.0)
    leader.send({"cancel": 7, "step": 3})
    leader.receive()
    leader.send(refused)
    with pytest.raises(WireError):
        leader.receive()
    assert given_up == [Cancel(7, 3)]
    listener.close()


def test_wait_returns_tensors_or_raises_after_timeout(shelf):
    with pytest.raises(TimeoutError, match=r"unit u of .* was not offered"):
        shelf.wait(GRAD, "u", 0.05)
    threading.Timer(0.05, shelf.offer, (GRAD, "u", offered := grad())).start()
    assert shelf.wait(GRAD, "u", 5) is offered
    shelf.close()
    assert shelf.wait(GRAD, "u", 5) is None


@pytest.mark.parametrize(
    "buffers", [{}, grad(NUMEL - 1), {"grad": torch.zeros(NUMEL).double()}, {"grad": torch.zeros(2 * NUMEL)[::2]}]
)
def test_offer_other_tensors_than_table_describes_raises(shelf, buffers):
    with pytest.raises(ValueError, match="unit u is offered with other tensors"):
        shelf.offer(GRAD, "u", buffers)


def test_withdraw_during_send_disconnects_the_reader():
    """The reader is slow. Its tensors change after `withdraw`, so it must not get them to the end."""
    numel = 16 << 20
    shelf = Shelf(Table({"u": UnitTable(numel, {"w": (Held(0, Rows(0, numel)),)})}, BUFFERS))
    listener = Listener("127.0.0.1", TOKEN, shelf.handlers())
    shelf.offer(GRAD, "u", {"grad": torch.zeros(numel)})
    connection = connect(listener.address, TOKEN, RANK, 5.0)
    connection.receive()
    connection.send({"select": {"u": [[0, numel, 1, 0]]}})
    connection.send(read_of(GRAD, "u"))
    connection.receive()
    begin = time.monotonic()
    shelf.withdraw(GRAD, grace_s=0.2)
    assert 0.1 < time.monotonic() - begin < 3
    with pytest.raises(WireError):
        connection.receive_into(memoryview(bytearray(4 * numel)))
    listener.close()


def test_serve_ends_its_thread_when_waiting_reader_has_left(shelf, listener, monkeypatch):
    monkeypatch.setattr("ndtrain.islands.shelf.PROBE_S", 0.05)
    connection = reader(listener)
    connection.send(read_of(Tag("state", 3, 1), "u"))
    assert soon(lambda: len(listener._connections) == 1)
    connection.close()
    assert soon(lambda: not listener._connections)
