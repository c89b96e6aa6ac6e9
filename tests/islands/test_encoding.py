"""Outer gradients: rounding to fewer bits, error feedback, the weighted mean, and integers of 4 bits on the wire."""

import pytest
import torch

from ndtrain.islands.encoding import Outer, Part
from ndtrain.islands.table import NIBBLES, Selection, Staging, _equal_blocks, pack_nibbles, unpack_nibbles
from ndtrain.mesh.row_map import Rows
from tests.lib.islands import TENSORS, mesh_of, shard, tables, wholes

LEVELS = {"int8": 127, "int4": 7}
MESHES = [mesh_of(), mesh_of(tp=2), mesh_of(fsdp=2, tp=2), mesh_of(fsdp=3), mesh_of(pp=2, fsdp=2)]


def widths() -> dict[str, tuple[int, ...]]:
    """The shape of each tensor, as whole numbers of elements: heads count with the elements of a head."""
    numel = {name: x.numel() for name, x in wholes().items()}
    return {name: (numel[name] // dims[-1].size, dims[-1].size) for name, dims in TENSORS.items()}


def encoded(codec: str, mesh, values: dict[str, torch.Tensor]):
    """Round a gradient on all ranks of a mesh. Return each rank's encoding, table, scales, and rounded shards."""
    held = tables(mesh, owned_only=False)
    encodings = [Outer(codec, torch.float32, table, {name: [] for name in table.units}, widths()) for table in held]
    shards = [{name: shard(unit, values) for name, unit in table.units.items()} for table in held]
    scales = torch.stack([e.scales_here(s) for e, s in zip(encodings, shards, strict=True)]).amax(0)
    sent = []
    for encoding, of_rank in zip(encodings, shards, strict=True):
        out = {name: torch.zeros(x.numel(), dtype=encoding.dtype) for name, x in of_rank.items()}
        for name, x in of_rank.items():
            encoding.write(name, x, scales, out[name])
        sent.append(out)
    return encodings, held, scales, sent


def expected(codec: str, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    out = {}
    for name, x in values.items():
        rows = x.view(widths()[name])
        step = rows.abs().amax(1, keepdim=True) / LEVELS[codec]
        out[name] = ((rows / step).round() * step).flatten()
    return out


def gradient(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(x.numel(), generator=draw) for name, x in wholes().items()}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("codec", LEVELS)
def test_write_on_any_mesh_rounds_rows_of_whole_tensors(codec, mesh):
    values = gradient(0)
    wanted = expected(codec, values)
    for encoding, table, scales, sent in zip(*[x if isinstance(x, list) else [x] * mesh.world_size
                                               for x in encoded(codec, mesh, values)], strict=True):  # fmt: skip
        for name, unit in table.units.items():
            got = encoding.read(name, sent[name], scales)
            whole = shard(unit, wanted)
            for held in unit.tensors.values():
                for h in held:
                    span = slice(h.at, h.at + h.rows.numel)
                    torch.testing.assert_close(got[span], whole[span], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
def test_write_again_and_again_the_sum_of_what_is_sent_equals_the_sum_of_the_gradients(codec):
    """Error feedback: what rounding has left out is sent later."""
    (table,) = tables(mesh_of(), owned_only=False)
    encoding = Outer(codec, torch.float32, table, {name: [] for name in table.units}, widths())
    total, sent = torch.zeros(0), torch.zeros(0)
    name = "block"
    numel = table.units[name].numel
    total, sent = torch.zeros(numel), torch.zeros(numel)
    for seed in range(20):
        x = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
        total += x
        values = {n: torch.zeros(u.numel) for n, u in table.units.items()} | {name: x.clone()}
        scales = encoding.scales_here(values)
        out = torch.zeros(numel, dtype=encoding.dtype)
        encoding.write(name, values[name], scales, out)
        sent += encoding.read(name, out, scales)
    largest = {"bf16": 0.02, "int8": 0.03, "int4": 0.5}[codec]
    assert 1e-7 < float((total - sent).abs().max()) < largest


def test_add_weights_the_islands_by_their_rows():
    (table,) = tables(mesh_of(), owned_only=False)
    numel = table.units["block"].numel
    encoding = Outer("fp32", torch.float32, table, {"block": [slice(0, numel)]}, widths())
    one, other = torch.full((numel,), 1.0), torch.full((numel,), 5.0)
    out = torch.empty(numel)
    encoding.begin_sum(2)
    parts = [Part(one, torch.tensor([3.0]), one), Part(other, torch.tensor([1.0]), one)]
    encoding.add("block", parts, out)
    assert out.tolist() == [2.0] * numel
    mean, *each = encoding.products[2:].tolist()
    assert (mean, each) == (4 * numel, [numel, 2 * numel, 25 * numel, 10 * numel])


@pytest.mark.parametrize("numel", [1, 2, 7, 8])
def test_pack_unpack_are_inverse(numel):
    integers = torch.randint(0, 16, (numel,), dtype=NIBBLES).numpy()
    packed = pack_nibbles(integers)
    assert len(packed) == -(-numel // 2) and unpack_nibbles(packed)[:numel].tolist() == integers.tolist()


@pytest.mark.parametrize("size", [1, 2, 4, 6, 64])
def test_equal_blocks_have_the_same_elements_in_the_same_order(size):
    found = [Rows(0, 3, 4, 5), Rows(30, 7), Rows(50, 2, 3, 2)]
    elements = lambda rows: [r.start + i * r.stride + j for r in rows for i in range(r.number) for j in range(r.length)]
    blocks = list(_equal_blocks(found, size))
    assert [x for block in blocks for x in elements(block)] == elements(found)
    assert all(sum(r.numel for r in block) == size for block in blocks[:-1])


class Pipe:
    """A connection that gives back what was sent."""

    def __init__(self):
        self.data = bytearray()

    def send_bytes(self, memory) -> None:
        self.data += bytes(memory)

    def receive_into(self, memory) -> None:
        memory[:] = self.data[: len(memory)]
        del self.data[: len(memory)]


def test_selection_of_nibbles_with_other_rows_on_each_side_arrives(monkeypatch):
    monkeypatch.setattr("ndtrain.islands.table.STAGING", 8)
    source, target = Selection([Rows(1, 3, 5, 4)]), Selection([Rows(0, 5, 3, 9)])
    sent = torch.randint(0, 16, (40,), dtype=NIBBLES)
    got, pipe = torch.zeros(40, dtype=NIBBLES), Pipe()
    source.send(pipe, sent, Staging())
    assert len(pipe.data) == source.nbytes(NIBBLES) == 8
    target.receive(pipe, got, Staging())
    flat = [sent[1 + 4 * i + j].item() for i in range(5) for j in range(3)]
    assert [got[9 * i + j].item() for i in range(3) for j in range(5)] == flat
