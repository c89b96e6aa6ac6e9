"""Tables and selections: JSON of a table is checked, and selections pack what they name."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ndtrain.islands import table as table_module
from ndtrain.islands.table import MOST_NUMEL, Selection, Staging, Table, UnitTable, count_of, joined, rows_of
from ndtrain.islands.wire import Listener, connect
from ndtrain.mesh.row_map import Held, Rows
from tests.lib.islands import BUFFERS, TENSORS, mesh_of, tables

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@st.composite
def unit_tables(draw) -> UnitTable:
    at, tensors = 0, {}
    for name in draw(st.lists(st.text(min_size=1, max_size=4), unique=True, max_size=3)):
        held = []
        for _ in range(draw(st.integers(0, 3))):
            length, number = draw(st.integers(1, 50)), draw(st.integers(1, 9))
            stride = draw(st.integers(length, 99)) if number > 1 else 0
            at += draw(st.integers(0, 5))
            held.append(Held(at, Rows(draw(st.integers(0, 1 << 40)), length, number, stride)))
            at += length * number
        tensors[name] = tuple(held)
    return UnitTable(at + draw(st.integers(0, 8)), tensors)


made_tables = st.builds(
    Table,
    st.dictionaries(st.text(max_size=4), unit_tables(), max_size=3),
    st.dictionaries(st.text(max_size=4), st.just({"grad": torch.float32, "ema": torch.bfloat16}), max_size=2),
)


@settings(max_examples=40)
@given(made_tables)
def test_table_from_json_of_to_json_is_equal(table):
    assert Table.from_json(table.to_json()) == table


@settings(max_examples=60)
@given(json_values)
def test_table_from_json_any_other_value_raises_value_error(value):
    for data in (value, {"units": value, "buffers": {}}, {"units": {"u": value}, "buffers": {}},
                 {"units": {"u": {"numel": 8, "tensors": {"t": value}}}, "buffers": {}},
                 {"units": {"u": {"numel": 8, "tensors": {"t": [value]}}}, "buffers": {}},
                 {"units": {}, "buffers": {"grad": value}}):  # fmt: skip
        try:
            table = Table.from_json(data)
        except ValueError:
            continue
        assert Table.from_json(table.to_json()) == table


numbers = st.one_of(st.integers(-3, 40), st.sampled_from([2**24 + 1, 2**53, 2**64, 10**30, True, 1.0, None, "1"]))


@settings(max_examples=200)
@given(st.lists(numbers, min_size=5, max_size=5), numbers)
def test_table_from_json_accepts_only_elements_inside_of_shard(record, numel):
    data = {"units": {"u": {"numel": numel, "tensors": {"t": [record]}}}, "buffers": {}}
    try:
        unit = Table.from_json(data).units["u"]
    except ValueError:
        return
    ((at, rows),) = unit.tensors["t"]
    assert all(type(n) is int and n >= 0 for n in (at, *rows, unit.numel))
    assert rows.length > 0 and rows.number > 0 and at + rows.numel <= unit.numel
    assert rows.number == 1 or rows.stride >= rows.length
    assert rows.start + rows.span <= MOST_NUMEL


@pytest.mark.parametrize(
    "held", [[[0, 0, 4, 1, 0], [3, 9, 4, 1, 0]], [[0, 0, 4, 2, 4], [7, 9, 1, 1, 0]], [[5, 0, 4, 1, 0]]]
)
def test_table_from_json_overlapping_or_outside_raises(held):
    with pytest.raises(ValueError, match="overlap, or are outside"):
        Table.from_json({"units": {"u": {"numel": 8, "tensors": {"t": held}}}, "buffers": {}})


@pytest.mark.parametrize("dtype", ["int16", "float", "torch.float32", "", 3])
def test_table_from_json_unknown_dtype_raises(dtype):
    with pytest.raises(ValueError, match="buffers"):
        Table.from_json({"units": {}, "buffers": {"grad": {"grad": dtype}}})


def test_rows_of_out_of_bounds_raises():
    assert rows_of([2, 3, 2, 4], 9) == Rows(2, 3, 2, 4)
    for data in (
        [2, 3, 2, 4, 0],
        [2, 3, 2, 5],
        [2, 4, 2, 3],
        [9, 1, 1, 0],
        [0, 0, 1, 0],
        [0, 1, 0, 0],
        [0, 1, -1, 0],
        [True, 1, 1, 0],
    ):
        with pytest.raises(ValueError):
            rows_of(data, 9)


@pytest.mark.parametrize("data", [-1, MOST_NUMEL + 1, True, 1.0, "1", None])
def test_count_of_other_value_raises(data):
    with pytest.raises(ValueError, match="not a count"):
        count_of(data)
    assert count_of(MOST_NUMEL) == MOST_NUMEL


def test_table_of_owned_elements_holds_each_element_once():
    """Of a mesh with replicas along dp and tp, and of two stages with tied embeddings."""
    for mesh in (mesh_of(dp=2, fsdp=2, tp=2), mesh_of(tp=4, cp=2), mesh_of(pp=2, tp=2)):
        held: dict[str, list[int]] = {name: [] for name in TENSORS}
        for table in tables(mesh, owned_only=True):
            assert table.buffers == BUFFERS
            for unit in table.units.values():
                for name, pieces in unit.tensors.items():
                    held[name] += [h.rows.start + i * h.rows.stride + j for h in pieces
                                   for i in range(h.rows.number) for j in range(h.rows.length)]  # fmt: skip
        for name, dims in TENSORS.items():
            assert sorted(held[name]) == list(range(torch.Size(d.size for d in dims).numel())), name


def test_joined_makes_runs_of_contiguous_rows():
    assert joined([Rows(0, 4), Rows(4, 2, 3, 2), Rows(10, 1), Rows(20, 2, 2, 5)]) == [Rows(0, 11), Rows(20, 2, 2, 5)]
    assert joined([Rows(4, 2), Rows(0, 4)]) == [Rows(4, 2), Rows(0, 4)]


def moved(send: Selection, source: torch.Tensor, receive: Selection, target: torch.Tensor) -> None:
    """Moves elements over a connection."""
    listener = Listener("127.0.0.1", "", {"t": lambda c: send.send(c, source, Staging())})
    connection = connect(listener.address, "", "t", 5.0)
    connection.timeout_s = 5.0
    receive.receive(connection, target, Staging())
    listener.close()


@pytest.mark.parametrize("staging", [64, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_selection_moves_exactly_its_elements_in_order(monkeypatch, dtype, staging):
    """Runs that are sent without a copy, and rows that are packed in several pieces. The two sides have other ones."""
    monkeypatch.setattr(table_module, "STAGING", staging)
    monkeypatch.setattr(table_module, "DIRECT", 128)
    rows = [Rows(50, 3, 20, 7), Rows(0, 40), Rows(200, 1), Rows(203, 9, 2, 30), Rows(45, 2)]
    pieces = [slice(r.start + i * r.stride, r.start + i * r.stride + r.length) for r in rows for i in range(r.number)]
    source, run = torch.arange(300).to(dtype), Selection([Rows(3, 121)])
    packed, spread = torch.full((130,), -1.0).to(dtype), torch.full((300,), -1.0).to(dtype)
    assert Selection(rows).numel == run.numel
    moved(Selection(rows), source, run, packed)
    assert torch.equal(packed[3:124], torch.cat([source[p] for p in pieces]))
    assert (packed[:3] == -1).all() and (packed[124:] == -1).all()
    moved(run, packed, Selection(rows), spread)
    wanted = torch.full((300,), -1.0).to(dtype)
    for p in pieces:
        wanted[p] = source[p]
    assert torch.equal(spread, wanted)
