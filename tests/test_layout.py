"""Mesh arithmetic, runs and initial weights: properties that hold for every mesh and shape."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ndtrain.config import AXES, ConfigError, ModelConfig
from ndtrain.layout import Dim, FlatLayout, Layouts, even_cut
from ndtrain.mesh import MeshSpec
from ndtrain.model.init import fill, standard_normal

sizes = st.integers(1, 4)
meshes = st.builds(
    lambda order, n: MeshSpec(tuple(order), tuple(n)), st.permutations(AXES), st.lists(sizes, min_size=5, max_size=5)
)


@given(meshes)
def test_coords_and_rank_are_inverse(mesh):
    seen = [mesh.coords(r) for r in range(mesh.world_size)]
    assert [mesh.rank(c) for c in seen] == list(range(mesh.world_size))
    inner = mesh.order[-1]
    assert all(seen[r][inner] == r % mesh.size(inner) for r in range(mesh.world_size)), "the last axis has neighbours"


@given(meshes, st.sets(st.sampled_from(AXES)))
def test_groups_partition_the_ranks(mesh, axes):
    groups = mesh.groups(*axes)
    assert sorted(r for g in groups for r in g) == list(range(mesh.world_size))
    for group in groups:
        assert len(group) == mesh.size(*axes)
        assert [mesh.index(r, *axes) for r in group] == list(range(len(group)))
        fixed = [{a: c for a, c in mesh.coords(r).items() if a not in axes} for r in group]
        assert all(f == fixed[0] for f in fixed)


@given(st.integers(0, 100), st.integers(1, 9))
def test_even_cut_covers_once(size, parts):
    cuts = [even_cut(size, parts, i) for i in range(parts)]
    assert [i for a, b in cuts for i in range(a, b)] == list(range(size))


dims = st.lists(
    st.tuples(st.sampled_from(["heads", "mlp", "embed", "vocab"]), st.integers(1, 3), st.integers(1, 3)),
    min_size=1,
    max_size=3,
    unique_by=lambda d: d[0],
)
RULES = {"heads": "tp", "mlp": "cp", "embed": None, "vocab": "tp"}


@settings(max_examples=60, deadline=None)
@given(meshes, st.lists(dims, min_size=1, max_size=4), st.data())
def test_runs_cover_every_element_once_per_replica(mesh, shapes, data):
    """All ranks' runs together hold each element of each tensor as often as there are replicas of it, and a local
    tensor is the slice of the global one that its cut says."""
    tensors = {}
    for i, shape in enumerate(shapes):
        # heads and vocab share tp: at most one of them in a tensor, sizes that the axis divides
        shape = [d for k, d in enumerate(shape) if not (d[0] == "vocab" and any(e[0] == "heads" for e in shape))]
        tensors[f"t{i}"] = tuple(Dim(n, u * (mesh.size(RULES[n]) if RULES[n] else 1), w) for n, u, w in shape)
    known = {d.name for t in tensors.values() for d in t}
    rules = {d: a for d, a in RULES.items() if d in known}
    counts = {name: torch.zeros([d.size for d in ds], dtype=torch.int64) for name, ds in tensors.items()}
    for rank in range(mesh.world_size):
        layouts = Layouts(tensors, rules, mesh, rank)
        flat = FlatLayout.of([layouts[n] for n in tensors], mesh.size("fsdp", "cp"))
        start, stop = flat.bounds(mesh.index(rank, "fsdp", "cp"))
        for tensor, runs in flat.runs(start, stop):
            whole = torch.arange(tensor.numel).view(tensor.shape)
            local = whole[tuple(slice(a, a + n) for a, n in tensor.cut)].reshape(-1)
            at = flat.offsets[tensor.name]
            for run in runs:
                counts[tensor.name].view(-1)[run.global_start : run.global_start + run.length] += 1
                here = start + run.local_start - at
                expected = range(run.global_start, run.global_start + run.length)
                assert local[here : here + run.length].tolist() == list(expected)
    for name, count in counts.items():
        cut = {RULES[d.name] for d in tensors[name]} - {None}
        sharing = [a for a in mesh.order if a not in cut and a not in ("fsdp", "cp")]
        # an axis that cuts a dim *and* the flat buffer (cp, here) meets each element on one of its ranks only sometimes
        if "cp" not in cut:
            assert (count == mesh.size(*sharing)).all(), name


def test_matrices_come_first_and_padding_is_even():
    mesh = MeshSpec(AXES, (1, 1, 4, 1, 1))
    layouts = Layouts({"norm": (Dim("embed", 5),), "w": (Dim("mlp", 3), Dim("embed", 5))}, {}, mesh, 0)
    flat = FlatLayout.of([layouts["norm"], layouts["w"]], 4)
    assert flat.offsets == {"w": 0, "norm": 15} and flat.decayed == 15 and flat.numel == 20
    assert [flat.decayed_in(*flat.bounds(i)) for i in range(4)] == [5, 5, 5, 0]


def test_errors_name_the_parameter_the_dim_and_the_axis():
    mesh = MeshSpec(AXES, (1, 1, 1, 1, 4))
    with pytest.raises(ConfigError, match=r"wq: mesh\.tp=4 does not divide its 6 heads"):
        Layouts({"wq": (Dim("heads", 6, 8),)}, {"heads": "tp"}, mesh, 0)
    with pytest.raises(ConfigError, match=r"layout\.rules\.experts: no parameter has such a dim; known: heads"):
        Layouts({"wq": (Dim("heads", 4, 8),)}, {"experts": "tp"}, mesh, 0)
    with pytest.raises(KeyError, match="has no row"):
        Layouts({"wq": (Dim("heads", 4, 8),)}, {}, mesh, 0)["wk"]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 3), st.integers(0, 50), st.integers(0, 50))
def test_any_range_of_initial_weights_can_be_drawn_alone(seed, start, length):
    whole = standard_normal(seed, "model.layers.0.mlp.up_proj.weight", 0, 100)
    assert torch.equal(
        standard_normal(seed, "model.layers.0.mlp.up_proj.weight", start, length), whole[start : start + length]
    )


def test_initial_weights_are_normal_and_differ_by_name_and_seed():
    a, b, c = (standard_normal(s, n, 0, 100_000) for s, n in ((0, "x.weight"), (0, "y.weight"), (1, "x.weight")))
    assert abs(a.mean()) < 0.02 and abs(a.std() - 1) < 0.02 and abs(a.pow(4).mean() - 3) < 0.15
    assert abs((a * b).mean()) < 0.02 and abs((a * c).mean()) < 0.02
    m = ModelConfig(num_hidden_layers=8)
    out, down = torch.empty(100_000), torch.empty(100_000)
    fill(out, m, 0, "model.layers.0.mlp.up_proj.weight", 0)
    fill(down, m, 0, "model.layers.0.mlp.down_proj.weight", 0)
    assert abs(out.std() - 0.02) < 4e-4 and abs(down.std() - 0.02 / 4) < 1e-4
