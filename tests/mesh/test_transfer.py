"""Transfers: what one mesh holds of random tensors comes to another mesh, element by element."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from ndtrain.config import AXES
from ndtrain.mesh.mesh import MeshSpec
from ndtrain.mesh.row_map import Held, Rows
from ndtrain.mesh.sharding import Dim, FlatLayout, Layouts
from ndtrain.mesh.transfer import Placement, Transfer, copies_between
from tests.lib.ranks import run_ranks

TENSORS = {
    "q": (Dim("heads", 4, 3), Dim("embed", 5)), "k": (Dim("kv_heads", 2, 3), Dim("embed", 5)),
    "down": (Dim("embed", 5), Dim("mlp", 8)), "norm": (Dim("embed", 5),), "table": (Dim("vocab", 11), Dim("embed", 5)),
}  # fmt: skip
RULES = {"heads": "tp", "kv_heads": "tp", "mlp": "tp", "vocab": "tp"}
CPU = torch.float64, torch.device("cpu")
SIZES = {name: int(np.prod([d.size for d in dims])) for name, dims in TENSORS.items()}

meshes = st.builds(
    lambda dp, fsdp, cp, tp: MeshSpec(AXES, (1, dp, fsdp, cp, tp)),
    st.integers(1, 2), st.integers(1, 3), st.integers(1, 2), st.sampled_from([1, 2, 4]),
)  # fmt: skip


def placed(mesh: MeshSpec, owners: bool) -> list[dict[str, list[Held]]]:
    """What each rank of a mesh holds, or with `owners` the first replica of each element alone."""
    placement = []
    for rank in range(mesh.world_size):
        layouts = Layouts(TENSORS, RULES, mesh, rank)
        (groups,) = {layouts.groups(name) for name in TENSORS}
        flat = FlatLayout.of([layouts[name] for name in TENSORS], groups)
        placement.append({})
        for tensor, held in flat.held(*flat.own):
            if not owners or (tensor.owned and groups.replica == 0):
                placement[-1].setdefault(tensor.name, []).append(held)
    return placement


def memory(held: list[Held], whole: torch.Tensor | None = None) -> torch.Tensor:
    """A rank's memory: the elements of a whole tensor where it holds them, and NaN elsewhere."""
    out = torch.full((max((at + rows.numel for at, rows in held), default=0),), float("nan"), dtype=torch.float64)
    for at, rows in held if whole is not None else []:
        for i in range(rows.number):
            piece = whole[rows.start + i * rows.stride :][: rows.length]
            out[at + i * rows.length :][: rows.length] = piece
    return out


@settings(max_examples=60)
@given(meshes, meshes)
def test_copies_between_any_two_meshes_fill_shards(one, other):
    source, target = placed(one, owners=True), placed(other, owners=False)
    for name, size in SIZES.items():
        whole = torch.arange(size, dtype=torch.float64)
        for wanted in (held.get(name, []) for held in target):
            got, want = memory(wanted), memory(wanted, whole)
            for held in (of_rank.get(name, []) for of_rank in source):
                data = memory(held, whole)
                for copy in copies_between(held, wanted):
                    for i in range(copy.number):
                        a, b = copy.source + i * copy.source_stride, copy.target + i * copy.target_stride
                        assert got[b : b + copy.length].isnan().all(), "an element is copied twice"
                        got[b : b + copy.length] = data[a : a + copy.length]
            assert torch.equal(got.nan_to_num(-1), want.nan_to_num(-1))


def test_copies_between_column_shards_are_one_copy():
    """A matrix sharded along its inputs moves from a rank of tp=2 to a rank of tp=4."""
    half, quarter = Rows(0, 512, 1024, 1024), Rows(256, 256, 1024, 1024)
    (copy,) = copies_between([Held(10, half)], [Held(0, quarter)])
    assert copy == (10 + 256, 0, 256, 1024, 512, 256)
    assert copies_between([Held(0, Rows(0, 100))], [Held(7, Rows(100, 50))]) == []


def transferred(source: Placement, target: Placement) -> dict[str, list[torch.Tensor]]:
    """On one rank: what comes to it, of two tensors for each name."""
    rank, group = dist.get_rank(), dist.group.WORLD
    transfer = Transfer(group, rank, source, target, CPU, width=2)
    wholes = {n: [torch.arange(size) + 0.0, -torch.arange(size) - 1.0] for n, size in SIZES.items()}
    given_ = {n: [memory(held, whole.double()) for whole in wholes[n]] for n, held in source[rank].items()}
    taken = {n: [memory(held) for _ in range(2)] for n, held in target[rank].items()}
    transfer.start(given_, taken).wait()
    for name, held in target[rank].items():
        for got, whole in zip(taken[name], wholes[name], strict=True):
            assert torch.equal(got.nan_to_num(-1), memory(held, whole.double()).nan_to_num(-1)), name
    return taken


def test_transfer_moves_shards_between_meshes():
    one = MeshSpec(AXES, (1, 1, 2, 1, 2))
    other = MeshSpec(AXES, (1, 2, 1, 1, 2))
    taken = run_ranks(transferred, 4, placed(one, owners=True), placed(other, owners=False))
    assert all(of_rank.keys() == SIZES.keys() for of_rank in taken)


def test_transfer_on_one_rank_copies_locally():
    source = [{"norm": [Held(2, Rows(0, 5))]}]
    transfer = Transfer(None, 0, source, [{"norm": [Held(0, Rows(1, 3))]}], CPU)
    out = torch.zeros(3, dtype=torch.float64)
    transfer.start({"norm": [torch.arange(7).double()]}, {"norm": [out]}).wait()
    assert out.tolist() == [3, 4, 5]


@pytest.mark.parametrize(("held", "count"), [([(0, 3)], 3), ([(0, 5), (2, 3)], 8)])
def test_transfer_refuses_missing_or_duplicate_elements(held, count):
    source = [{"norm": [Held(0, Rows(start, length))]} for start, length in held]
    target = [{"norm": [Held(0, Rows(0, 5))]}] + [{}] * (len(held) - 1)
    with pytest.raises(ValueError, match=f"norm: 5 elements are needed, but the source has {count}"):
        Transfer(None, 0, source, target, CPU)
