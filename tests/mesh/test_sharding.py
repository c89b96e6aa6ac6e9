"""Mesh arithmetic, runs and initial weights: properties that hold for every mesh and shape."""

import threading
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ndtrain.config import AXES, ConfigError, ModelConfig, load_config
from ndtrain.mesh.mesh import MeshSpec
from ndtrain.mesh.sharding import Dim, FlatLayout, Layouts, UnitGroups, balanced_split, even_split
from ndtrain.model.init import fill, fill_all, standard_normal
from ndtrain.model.spec import Init, Param

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
        assert mesh.members(group[-1], *axes) == group
        fixed = [{a: c for a, c in mesh.coords(r).items() if a not in axes} for r in group]
        assert all(f == fixed[0] for f in fixed)


@given(st.integers(0, 100), st.integers(1, 9))
def test_even_split_covers_once(size, parts):
    bounds = [even_split(size, parts, i) for i in range(parts)]
    assert [i for a, b in bounds for i in range(a, b)] == list(range(size))


@given(st.integers(0, 100), st.integers(1, 9))
def test_balanced_split_covers_once_and_differs_by_one(size, parts):
    bounds = [balanced_split(size, parts, i) for i in range(parts)]
    assert [i for a, b in bounds for i in range(a, b)] == list(range(size))
    assert max(b - a for a, b in bounds) - min(b - a for a, b in bounds) <= 1


RULES = {"heads": "tp", "kv_heads": "tp", "mlp": "tp", "vocab": "tp"}


@st.composite
def tensor(draw, tp: int) -> tuple[Dim, ...]:
    """One to three dims, at most one of them sharded, of sizes that its rule allows."""
    factors = [k for k in range(1, tp + 1) if tp % k == 0]
    units = {
        "heads": tp * draw(st.integers(1, 2)),
        "mlp": tp * draw(st.integers(1, 3)),
        "kv_heads": draw(st.sampled_from([*factors, 2 * tp])),
        "vocab": tp + draw(st.integers(0, 5)),
    }
    sharded = draw(st.sampled_from([None, *units]))
    dims = [Dim(sharded, units[sharded], draw(st.integers(1, 3)))] if sharded else []
    others = draw(st.lists(st.sampled_from(["embed", "head_dim"]), min_size=not sharded, max_size=2, unique=True))
    dims += [Dim(name, draw(st.integers(1, 5))) for name in others]
    return tuple(draw(st.permutations(dims)))


@settings(max_examples=60)
@given(meshes, st.data())
def test_runs_cover_every_element_once_per_replica(mesh, data):
    """All ranks' runs together hold each element once for each of its replicas. The owners' runs hold it once for each
    dp replica. A local shard is the slice of the global tensor that `shard` names."""
    shapes = data.draw(st.lists(tensor(mesh.size("tp")), min_size=1, max_size=4))
    tensors = {f"t{i}": dims for i, dims in enumerate(shapes)}
    rules = {d: a for d, a in RULES.items() if d in {d.name for t in shapes for d in t}}
    held, owned = ({n: torch.zeros([d.size for d in ds], dtype=torch.int64) for n, ds in tensors.items()} for _ in "12")
    tp_replicas = {}
    for rank in range(mesh.world_size):
        layouts = Layouts(tensors, rules, mesh, rank)
        (groups,) = {layouts.groups(n) for n in tensors}
        flat = FlatLayout.of([layouts[n] for n in tensors], groups)
        start, stop = flat.own
        assert (start, stop) == flat.bounds(mesh.index(rank, "fsdp", "cp"))
        mine = flat.slices(start, stop, lambda t: t.tp_replica == 0)
        for t, runs in flat.runs(start, stop):
            tp_replicas[t.name] = t.tp_replicas
            whole = torch.arange(t.numel).view(t.shape)
            local = whole[tuple(slice(a, a + n) for a, n in t.shard)].reshape(-1)
            for run in runs:
                here = start + run.local_start - flat.offsets[t.name]
                expected = range(run.global_start, run.global_start + run.length)
                assert local[here : here + run.length].tolist() == list(expected)
                held[t.name].view(-1)[run.global_start : run.global_start + run.length] += 1
                if any(s.start <= run.local_start and run.local_start + run.length <= s.stop for s in mine):
                    owned[t.name].view(-1)[run.global_start : run.global_start + run.length] += 1
    for name, count in tp_replicas.items():
        assert (owned[name] == mesh.size("pp", "dp")).all(), name
        assert (held[name] == mesh.size("pp", "dp") * count).all(), name


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_gradients_are_partial_where_activations_are_sharded(sequence_parallel):
    """tp=4, 2 K/V heads. Gradients of norms on the residual stream are summed over tp only with sequence parallelism.
    Gradients of norms on heads and of replicated K/V heads are always summed."""
    mesh = MeshSpec(AXES, (1, 1, 1, 1, 4))
    tensors = {
        "q": (Dim("heads", 8, 4), Dim("embed", 8)), "k": (Dim("kv_heads", 2, 4), Dim("embed", 8)),
        "down": (Dim("embed", 8), Dim("mlp", 8)), "norm": (Dim("embed", 8),), "q_norm": (Dim("head_dim", 4),),
        "head": (Dim("vocab", 11), Dim("embed", 8)),
    }  # fmt: skip
    token_axes = ("dp", "fsdp", "cp", *(["tp"] if sequence_parallel else []))
    rules = {**RULES, "vocab": None}
    layouts = [Layouts(tensors, rules, mesh, rank, token_axes) for rank in range(4)]
    summed = {name for name in tensors if "tp" in layouts[0][name].partial}
    assert summed == {"k", "q_norm"} | ({"norm", "head"} if sequence_parallel else set())
    assert all({"dp", "fsdp", "cp"} <= layouts[0][name].partial for name in tensors)
    assert [(ls["k"].tp_replicas, ls["k"].tp_replica, ls["k"].shard[0]) for ls in layouts] == [
        (2, 0, (0, 4)), (2, 1, (0, 4)), (2, 0, (4, 4)), (2, 1, (4, 4))
    ]  # fmt: skip
    assert [ls["norm"].tp_replica for ls in layouts] == [0, 1, 2, 3] and [ls["q"].tp_replica for ls in layouts] == [
        0
    ] * 4


def test_the_groups_of_a_tensor_follow_from_its_partial_gradient():
    """A tensor whose gradient is partial over fewer axes is split and replicated over fewer ranks."""
    mesh = MeshSpec(AXES, (1, 2, 2, 3, 1))
    rank = mesh.rank({"pp": 0, "dp": 1, "fsdp": 0, "cp": 2, "tp": 0})
    of = lambda token_axes: Layouts({"w": (Dim("embed", 4),)}, {}, mesh, rank, token_axes).groups("w")
    assert of(("dp", "fsdp", "cp", "tp")) == UnitGroups(("fsdp", "cp"), ("dp",), 6, 2, 2, 1)
    assert of(("dp", "cp")) == UnitGroups(("cp",), ("dp",), 3, 2, 2, 1)
    assert of(("fsdp",)) == UnitGroups(("fsdp",), (), 2, 0, 1, 0)


def test_vocab_is_sharded_unevenly_without_padding():
    mesh = MeshSpec(AXES, (1, 1, 1, 1, 4))
    tensors = {"e": (Dim("vocab", 11), Dim("embed", 2))}
    shards = [Layouts(tensors, {"vocab": "tp"}, mesh, rank)["e"].shard[0] for rank in range(4)]
    assert shards == [(0, 2), (2, 3), (5, 3), (8, 3)]


def test_flat_layout_orders_matrices_first_and_pads_evenly():
    mesh = MeshSpec(AXES, (1, 1, 4, 1, 1))
    tensors = {"norm": (Dim("embed", 3),), "w": (Dim("mlp", 3), Dim("embed", 3)), "u": (Dim("mlp", 1), Dim("embed", 3))}
    layouts = Layouts(tensors, {}, mesh, 0)
    flat = FlatLayout.of([layouts[name] for name in tensors], UnitGroups(shards=4))
    assert flat.offsets == {"w": 0, "u": 9, "norm": 12} and flat.matrix_numel == 12 and flat.numel == 32
    by_rank = [flat.grouped(*flat.bounds(i), lambda t: len(t.dims)) for i in range(4)]
    assert by_rank == [[(2, slice(0, 8))], [(2, slice(0, 4)), (1, slice(4, 7))], [], []]
    assert flat.grouped(6, 32, lambda t: t.name) == [("w", slice(0, 3)), ("u", slice(3, 6)), ("norm", slice(6, 9))]
    assert flat.slices(6, 32, lambda t: t.name != "w") == [slice(3, 9)]


def test_layout_errors_name_parameter_dim_and_axis():
    mesh = MeshSpec(AXES, (1, 1, 1, 1, 4))
    with pytest.raises(ConfigError, match=r"wq: mesh\.tp=4 does not divide its 6 heads"):
        Layouts({"wq": (Dim("heads", 6, 8),)}, {"heads": "tp"}, mesh, 0)
    with pytest.raises(ConfigError, match=r"layout\.rules\.experts: no parameter has such a dim; known: heads"):
        Layouts({"wq": (Dim("heads", 4, 8),)}, {"experts": "tp"}, mesh, 0)
    with pytest.raises(ConfigError, match=r"layout\.rules\.heads=dp: only tp shards dims"):
        Layouts({"wq": (Dim("heads", 4, 8),)}, {"heads": "dp"}, mesh, 0)
    with pytest.raises(KeyError, match="has no row"):
        Layouts({"wq": (Dim("heads", 4, 8),)}, {}, mesh, 0)["wk"]


@settings(max_examples=50)
@given(st.integers(0, 3), st.integers(0, 50), st.integers(0, 50))
def test_standard_normal_draws_any_range_alone(seed, start, length):
    whole = standard_normal(seed, "model.layers.0.mlp.up_proj.weight", 0, 100)
    assert torch.equal(
        standard_normal(seed, "model.layers.0.mlp.up_proj.weight", start, length), whole[start : start + length]
    )


def matrix(name: str, init: Init = Init.NORMAL) -> Param:
    return Param(name, ("mlp", "embed"), "model.layers.0", 0, init=init)


def test_initial_weights_are_normal_and_differ_by_name_and_seed():
    a, b, c = (standard_normal(s, n, 0, 100_000) for s, n in ((0, "x.weight"), (0, "y.weight"), (1, "x.weight")))
    assert abs(a.mean()) < 0.02 and abs(a.std() - 1) < 0.02 and abs(a.pow(4).mean() - 3) < 0.15
    assert abs((a * b).mean()) < 0.02 and abs((a * c).mean()) < 0.02
    m = ModelConfig(num_hidden_layers=8)
    out, down = torch.empty(100_000), torch.empty(100_000)
    fill(out, m, 0, matrix("model.layers.0.mlp.up_proj.weight"), 0)
    fill(down, m, 0, matrix("model.layers.0.mlp.down_proj.weight", Init.TO_STREAM), 0)
    assert abs(out.std() - 0.02) < 4e-4 and abs(down.std() - 0.02 / 4) < 1e-4


def test_init_mult_scales_initial_weights():
    m = ModelConfig(init_mult={"*.down_proj.weight": 4, "*.input_layernorm.*": 4})
    inits = ("down_proj", 4, Init.TO_STREAM), ("up_proj", 1, Init.NORMAL), ("input_layernorm", 1, Init.ONES)
    for name, factor, init in inits:
        plain, times, param = torch.empty(100), torch.empty(100), matrix(f"model.layers.0.{name}.weight", init)
        fill(plain, ModelConfig(), 0, param, 0)
        fill(times, m, 0, param, 0)
        assert torch.equal(times, factor * plain), name


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_initial_weights_do_not_depend_on_threads(threads, monkeypatch):
    """Blocks of runs that begin anywhere equal the same part of the whole stream."""
    monkeypatch.setattr("ndtrain.model.init._BLOCK", 7)
    m, param = load_config([]).model, matrix("model.layers.0.mlp.up_proj.weight")
    whole = torch.empty(500, dtype=torch.float64)
    fill(whole, m, 3, param, 0)
    out, cuts = torch.zeros(500, dtype=torch.float64), [0, 1, 6, 100, 333, 500]
    pieces = [(out[a:b], param, a) for a, b in pairwise(cuts)]
    begun = []
    fill_all(pieces, m, 3, standard_normal, threads, lambda: begun.append(threading.get_ident()))
    assert torch.equal(out, whole)
    assert threads == 1 or (begun and threading.get_ident() not in begun), "each thread chooses its GPU"
    with pytest.raises(ZeroDivisionError):
        fill_all(pieces, m, 3, lambda *args: 1 / 0, threads)
