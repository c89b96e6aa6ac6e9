"""Readers: what one mesh holds arrives at the ranks of another mesh, each element once."""

import os
import socket
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ndtrain.islands.orders import Cancel
from ndtrain.islands.reading import AHEAD, Gone, Reader
from ndtrain.islands.shelf import Tag
from ndtrain.islands.table import Table, UnitTable
from ndtrain.islands.wire import Listener, Refused, WireError
from ndtrain.mesh.row_map import Held, Rows
from tests.lib.islands import BUFFERS, TOKEN, ServedIsland, mesh_of, shard, tables, wholes

GRAD = Tag("grad", 3, 1)
MESHES = {
    "tp2_fsdp2": mesh_of(fsdp=2, tp=2), "fsdp3": mesh_of(fsdp=3), "one": mesh_of(), "dp2_tp4": mesh_of(dp=2, tp=4),
    "pp2_tp2": mesh_of(pp=2, tp=2), "cp2_fsdp2": mesh_of(fsdp=2, cp=2),
}  # fmt: skip
PAIRS = [
    ("tp2_fsdp2", "fsdp3"), ("fsdp3", "tp2_fsdp2"), ("pp2_tp2", "cp2_fsdp2"), ("dp2_tp4", "pp2_tp2"),
    ("cp2_fsdp2", "dp2_tp4"), ("one", "one"),
]  # fmt: skip


@pytest.fixture
def island():
    made = ServedIsland.of(MESHES["tp2_fsdp2"])
    yield made
    made.close()


@pytest.fixture
def reader(island):
    made = Reader(tables(MESHES["fsdp3"], owned_only=False)[1], TOKEN)
    made.connect("a", island.endpoints)
    yield made
    made.close()


def read_all(reader: Reader, tag: Tag = GRAD, name: str = "a") -> dict[str, dict[str, torch.Tensor]]:
    units = list(reader.wanted.units)
    return {u: {b: x.clone() for b, x in got[name].items()} for u, got in reader.read_each({name: tag}, units)}


def assert_is_shard(reader: Reader, got, whole, what: str = "grad") -> None:
    assert got.keys() == reader.wanted.units.keys()
    for name, unit in reader.wanted.units.items():
        assert got[name].keys() == BUFFERS[what].keys()
        for buffer, dtype in BUFFERS[what].items():
            assert torch.equal(got[name][buffer], shard(unit, whole, dtype)), (name, buffer)


def started(work) -> tuple[threading.Thread, list]:
    """A thread that does the work, and the list that gets what it raises, with the time."""
    raised: list[tuple[BaseException, float]] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append((error, time.monotonic()))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, raised


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_read_each_between_two_meshes_fills_every_shard(source, target):
    """Gradients, then the state with a buffer in bf16, then gradients again in the same memory: padding is zero."""
    island, whole = ServedIsland.of(MESHES[source]), wholes()
    try:
        for tag in (GRAD, Tag("state", 3, 1), Tag("sum", 3, 1)):
            island.offer(tag, whole)
        for table in tables(MESHES[target], owned_only=False):
            with closing(Reader(table, TOKEN)) as reader:
                reader.connect("a", island.endpoints)
                for tag in (GRAD, Tag("state", 3, 1), Tag("sum", 3, 1)):
                    assert_is_shard(reader, read_all(reader, tag), whole, tag.what)
    finally:
        island.close()


sizes = st.sampled_from([1, 2])


@settings(max_examples=4)
@given(st.tuples(sizes, st.integers(1, 3), sizes, st.sampled_from([1, 2, 4])), st.sampled_from(list(MESHES)))
def test_read_each_from_any_mesh_fills_shards(axes, target):
    dp, fsdp, cp, tp = axes
    island, whole = ServedIsland.of(mesh_of(dp=dp, fsdp=fsdp, cp=cp, tp=tp)), wholes()
    try:
        island.offer(GRAD, whole)
        with closing(Reader(tables(MESHES[target], owned_only=False)[-1], TOKEN)) as reader:
            reader.connect("a", island.endpoints)
            assert_is_shard(reader, read_all(reader), whole)
    finally:
        island.close()


def test_read_each_of_two_islands_yields_them_in_order(island):
    other = ServedIsland.of(MESHES["pp2_tp2"])
    with closing(Reader(tables(MESHES["fsdp3"], owned_only=False)[0], TOKEN)) as reader:
        for name, of_island in (("b", other), ("a", island)):
            of_island.offer(GRAD, wholes(seed=ord(name)))
            reader.connect(name, of_island.endpoints)
        for unit, got in reader.read_each({"b": GRAD, "a": GRAD}, ["last", "block", "embed"]):
            assert list(got) == ["b", "a"]
            for name, shards in got.items():
                assert torch.equal(shards["grad"], shard(reader.wanted.units[unit], wholes(seed=ord(name))))
        reader.disconnect("b")
        with pytest.raises(Gone, match="island b: this rank is not connected"):
            list(reader.read_each({"b": GRAD}, ["last"]))
        assert_is_shard(reader, read_all(reader), wholes(seed=ord("a")))
    other.close()


def test_connect_keeps_only_ranks_with_common_elements():
    island = ServedIsland.of(mesh_of(fsdp=3))
    (table, *_) = tables(mesh_of(fsdp=3), owned_only=False)
    with closing(Reader(table, TOKEN)) as reader:
        reader.connect("a", island.endpoints)
        assert [peer.connection.peer for peer in reader._islands["a"].peers] == island.endpoints[:1]
    island.close()


def test_read_each_waits_for_units_and_receives_two_ahead():
    """The units are offered one after another; those that are there arrive before the consumer needs them."""
    numel, names = 1 << 16, [f"u{i}" for i in range(6)]
    unit = UnitTable(numel, {"w": (Held(0, Rows(0, numel)),)})
    table = Table(dict.fromkeys(names, unit), BUFFERS)
    island = ServedIsland.of_tables([table])
    with closing(Reader(table, TOKEN)) as reader:
        reader.connect("a", island.endpoints)
        seen = reader.read_each({"a": GRAD}, names)
        for i, name in enumerate(names):
            island.shelves[0].offer(GRAD, name, {"grad": torch.full((numel,), float(i))})
        _, got = next(seen)
        time.sleep(0.2)
        slots = [slot["grad"] for slot in reader._slots["a"][1]]
        assert len(slots) == AHEAD + 1
        assert [x.unique().tolist() for x in slots] == [[0.0], [1.0], [2.0]]  # unit 3 has not overwritten unit 0
        assert got["a"]["grad"].unique().tolist() == [0.0]
        assert [got["a"]["grad"].unique().tolist() for _, got in seen] == [[float(i)] for i in range(1, 6)]
    island.close()


@pytest.mark.parametrize("fault", ["missing", "twice"])
def test_connect_to_incomplete_island_raises(island, fault):
    endpoints = island.endpoints[1:] if fault == "missing" else [*island.endpoints, island.endpoints[0]]
    reader = Reader(tables(MESHES["one"], owned_only=False)[0], TOKEN)
    with pytest.raises(ValueError, match=r"\w+: \d+ elements are needed, but island a has \d+"):
        reader.connect("a", endpoints)


def test_connect_to_island_with_other_buffers_raises(island):
    (table,) = tables(MESHES["one"], owned_only=False, buffers={"grad": {"grad": torch.float64}})
    with pytest.raises(ValueError, match="island a: its buffers"):
        Reader(table, TOKEN).connect("a", island.endpoints)


def test_connect_to_other_token_or_dead_rank_raises(island):
    (table,) = tables(MESHES["one"], owned_only=False)
    with pytest.raises(WireError, match="same token"):
        Reader(table, "other").connect("a", island.endpoints)
    island.listeners[2].close()
    with pytest.raises(Refused):
        Reader(table, TOKEN).connect("a", island.endpoints)


def test_connect_to_malformed_table_raises():
    listener = Listener("127.0.0.1", TOKEN, {"rank": lambda c: c.send({"units": {"u": {"numel": -1}}})})
    (table,) = tables(MESHES["one"], owned_only=False)
    with pytest.raises(WireError, match="malformed table"):
        Reader(table, TOKEN).connect("a", [listener.address])
    listener.close()


def test_read_each_of_withdrawn_tag_raises_gone_and_connections_serve_on(island, reader):
    island.offer(GRAD, wholes(), ["embed"])
    thread, raised = started(lambda: read_all(reader))
    time.sleep(0.1)
    for shelf in island.shelves:
        shelf.cancel(Cancel(1))
    thread.join(5)
    ((error, _),) = raised
    assert isinstance(error, Gone) and error.island == "a" and "no longer offers grad of step 3" in str(error)
    again = GRAD._replace(epoch=2)
    island.offer(again, wholes(seed=2))
    assert_is_shard(reader, read_all(reader, again), wholes(seed=2))


def test_read_each_reconnects_after_connections_have_ended(island, reader):
    island.offer(GRAD, wholes())
    read_all(reader)
    before = reader._islands["a"].peers
    for listener in island.listeners:
        for connection in list(listener._connections):
            connection.close()
    with pytest.raises(Gone):
        read_all(reader)
    assert_is_shard(reader, read_all(reader), wholes())
    assert reader._islands["a"].peers is not before


@pytest.mark.parametrize("given_up", [None, Cancel(1), Cancel(0, GRAD.step)])
def test_cancel_makes_blocked_read_raise_within_50_ms(island, reader, given_up):
    island.offer(GRAD, wholes(), ["embed"])
    thread, raised = started(lambda: read_all(reader))
    time.sleep(0.2)
    reader.cancel(Cancel(0, GRAD.step + 1))  # an earlier epoch, and a later step of this one: the read goes on
    time.sleep(0.05)
    assert thread.is_alive()
    begin = time.monotonic()
    reader.cancel(given_up)
    thread.join(5)
    ((error, when),) = raised
    assert isinstance(error, Gone) and when - begin < 0.05
    if given_up is not None:
        with pytest.raises(Gone, match="was cancelled"):
            read_all(reader)
    again = GRAD._replace(epoch=2)
    island.offer(again, wholes())
    assert_is_shard(reader, read_all(reader, again), wholes())


def test_cancel_ends_wait_for_a_host_that_does_not_answer(reader):
    """Its kernel accepts the connection, but the process is stopped."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        reader._islands["a"].endpoints = (f"127.0.0.1:{silent.getsockname()[1]}",)
        reader._islands["a"].close()
        thread, raised = started(lambda: read_all(reader))
        time.sleep(0.2)
        assert thread.is_alive()
        begin = time.monotonic()
        reader.cancel()
        thread.join(5)
        assert isinstance(raised[0][0], Gone) and raised[0][1] - begin < 0.05


def big_island(numel: int) -> tuple[Table, ServedIsland]:
    table = Table({"u": UnitTable(numel, {"w": (Held(0, Rows(0, numel)),)})}, BUFFERS)
    return table, ServedIsland.of_tables([table])


def test_read_each_from_server_that_dies_in_payload_raises_gone():
    table, island = big_island(1 << 20)

    def die(connection) -> None:
        connection.send(table.to_json())
        connection.receive()
        connection.receive()
        connection.send({"unit": "u", "nbytes": 4 << 20})
        connection.send_bytes(memoryview(bytes(3 << 20)))

    dying = Listener("127.0.0.1", TOKEN, {"rank": die})
    with closing(Reader(table, TOKEN)) as reader:
        reader.connect("a", [dying.address])
        with pytest.raises(Gone, match=r"island a: .* has closed the connection"):
            read_all(reader)
        reader.connect("a", island.endpoints)  # the same rank at another address
        island.offer(GRAD, {"w": torch.arange(1 << 20).float()})
        assert torch.equal(read_all(reader)["u"]["grad"], torch.arange(1 << 20).float())
    dying.close()
    island.close()


@pytest.mark.parametrize("header", [{"unit": "u", "nbytes": 1}, {"unit": "v", "nbytes": 32}, 5, {"gone": False}])
def test_read_each_with_unexpected_header_raises_gone(header):
    table, island = big_island(8)
    island.close()

    def serve(connection) -> None:
        connection.send(table.to_json())
        connection.receive()
        connection.receive()
        connection.send(header)

    listener = Listener("127.0.0.1", TOKEN, {"rank": serve})
    with closing(Reader(table, TOKEN)) as reader:
        reader.connect("a", [listener.address])
        with pytest.raises(Gone, match="sends something else than 32 bytes of u"):
            read_all(reader)
    listener.close()


def test_read_each_that_is_abandoned_does_not_disturb_the_next(island, reader):
    island.offer(GRAD, wholes())
    held = reader.read_each({"a": GRAD}, list(reader.wanted.units))  # as a traceback would hold it
    next(held)
    again = GRAD._replace(step=4)
    island.offer(again, wholes(seed=4))
    assert_is_shard(reader, read_all(reader, again), wholes(seed=4))
    with pytest.raises(Gone, match="the read has ended"):
        next(held)
    assert_is_shard(reader, read_all(reader, again), wholes(seed=4))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_read_each_many_times_keeps_memory_and_connections():
    numel = 1 << 18
    table, island = big_island(numel)
    made: list[int] = []
    allocate = lambda n, dtype: made.append(n) or torch.empty(n, dtype=dtype)
    with closing(Reader(table, TOKEN, allocate)) as reader:
        reader.connect("a", island.endpoints)
        (peer,) = reader._islands["a"].peers
        for step in range(120):
            tag = Tag("grad", step, 1)
            island.shelves[0].offer(tag, "u", {"grad": torch.full((numel,), float(step))})
            for _, got in reader.read_each({"a": tag}, ["u"]):
                assert got["a"]["grad"][[0, -1]].tolist() == [step, step]
            island.shelves[0].withdraw(tag)
            if step == 20:
                before, threads = resident_bytes(), threading.active_count()
        assert made == [numel] * (AHEAD + 1)
        assert reader._islands["a"].peers == [peer] and not peer.connection.closed
        assert threading.active_count() <= threads
        assert resident_bytes() - before < 8 << 20  # 100 reads are 100 MiB
    island.close()
