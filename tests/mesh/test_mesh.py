"""The process groups of a mesh: which ones are created, in how many calls, and with which options. NCCL's calls are
stubbed; PyTorch's fake process group replaces the others."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from ndtrain.config import AXES
from ndtrain.mesh.mesh import Mesh, MeshSpec, disjoint, nccl_options
from ndtrain.schedule import build, forwards, links

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@contextmanager
def fake_group(rank: int, world: int) -> Iterator[list[list[int]]]:
    """A process group without communication; yields the ranks of every group that is created beside it."""
    made, new_group = [], dist.new_group
    record = lambda ranks, **options: made.append(ranks) or new_group(ranks, **options)
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        with mock.patch.object(dist, "new_group", record):
            yield made
    finally:
        dist.destroy_process_group()


class Options:
    """Stands for `ProcessGroupNCCL.Options`."""

    def __init__(self, is_high_priority_stream: bool = False):
        self.is_high_priority_stream = is_high_priority_stream


@contextmanager
def stubbed_nccl(rank: int) -> Iterator[list[list[list[int]]]]:
    """A world whose communicator is bound to a device; yields the ranks of each split of it."""
    splits = []

    def split_group(split_ranks, pg_options):
        assert pg_options.is_high_priority_stream
        splits.append(split_ranks)
        own = next(ranks for ranks in split_ranks if rank in ranks)
        name, index = f"{len(splits)}", own.index(rank)
        return SimpleNamespace(group_name=name, ranks=own, size=lambda: len(own), rank=lambda: index)

    world = SimpleNamespace(bound_device_id=GPU, ranks=[], group_name="world")
    stubs = {
        "group": SimpleNamespace(WORLD=world),
        "split_group": split_group,
        "get_process_group_ranks": lambda group: group.ranks,
    }
    nccl = SimpleNamespace(Options=Options)
    with (
        mock.patch.multiple(dist, **stubs),
        mock.patch.object(dist, "ProcessGroupNCCL", nccl, create=True),
        mock.patch.object(Mesh, "_set_timeout"),  # tests/mesh/test_mesh_groups.py
    ):
        yield splits


def spec(**sizes: int) -> MeshSpec:
    return MeshSpec(AXES, tuple(sizes.get(axis, 1) for axis in AXES))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(lambda p: p[0] != p[1]), unique=True))
def test_disjoint_groups_pairs_without_common_rank(pairs):
    lists = disjoint(pairs)
    assert sorted(chain(*lists)) == sorted(pairs)
    for together in lists:
        assert max(Counter(chain(*together)).values()) == 1
    if pairs:  # greedy: a pair has at most as many lists before it as it has neighbours
        assert len(lists) <= 2 * max(Counter(chain(*pairs)).values()) - 1


def test_mesh_creates_only_groups_in_use():
    with fake_group(3, 8) as made:
        mesh = Mesh(spec(dp=2, tp=4), 3, CPU)
        assert [mesh.group(axis) for axis in ("pp", "fsdp", "cp")] == [None] * 3 and made == []
        assert mesh.group("tp") is mesh.group("tp", "fsdp") and made == [[0, 1, 2, 3]]
        assert mesh.world is mesh.group("dp", "tp") is dist.group.WORLD and len(made) == 1
        assert mesh.group("tp", lane="reductions") is mesh.group("tp") and len(made) == 1, "gloo needs no second one"


def test_links_on_gloo_share_the_group_of_the_axis():
    with fake_group(2, 4) as made:
        mesh = Mesh(spec(pp=4), 2, CPU)
        ends = mesh.links("pp", links(build("interleaved", 4, 8)))
        assert {pair: end.peer for pair, end in ends.items()} == {(1, 2): 1, (2, 1): 1, (2, 3): 3, (3, 2): 3}
        assert {end.group for end in ends.values()} == {mesh.world} and made == []


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb_v"])
def test_links_in_order_have_one_group_per_direction(name):
    """Each pair of neighbours has a group per direction, on its two ranks only, with the same name on both although
    only two of the stages have made a link before. Evaluation creates no more groups."""
    schedule, names = build(name, 4, 8), defaultdict(set)
    for rank in range(8):
        with fake_group(rank, 8) as made:
            mesh = Mesh(spec(pp=4, tp=2), rank, CPU, in_order=True)
            mesh.links("pp", [(0, 2)])
            made.clear()
            pairs = links(schedule)
            ends, stage = mesh.links("pp", pairs), mesh.coords["pp"]
            assert list(ends) == [pair for pair in pairs if stage in pair]
            assert len({end.group.group_name for end in ends.values()}) == len(ends)
            for (source, target), (group, peer) in ends.items():
                other = mesh.spec.rank(mesh.coords | {"pp": source + target - stage})
                assert dist.get_process_group_ranks(group)[peer] == other
                names[frozenset((rank, other)), source < target].add(group.group_name)
            shared = [ranks for ranks in made if ranks != [rank]]
            assert len(shared) == len(ends), "a rank makes no groups of others"
            before = len(made)
            assert mesh.links("pp", links(forwards(schedule))).items() <= ends.items() and len(made) == before
            assert {*Counter(map(tuple, shared)).values()} == {2}, "one for each direction"
    assert {len(name) for name in names.values()} == {1}


@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
def test_nccl_splits_world_once_per_axis(name):
    """Every rank takes part in each split, and is in one group of it, so that all count the same groups. Some of
    1f1b's pairs leave out the first and the last stage."""
    mesh_spec, calls = spec(pp=4, fsdp=2, tp=2), []
    for rank in range(16):
        with stubbed_nccl(rank) as splits:
            mesh = Mesh(mesh_spec, rank, GPU)
            for axis in ("dp", "fsdp", "cp", "tp"):
                mesh.group(axis)
            mesh.group("fsdp", lane="reductions")
            assert len(splits) == 3
            ends = mesh.links("pp", links(build(name, 4, 8)))
            for (source, target), (group, peer) in ends.items():
                other = mesh.spec.rank(mesh.coords | {"pp": source + target - mesh.coords["pp"]})
                assert sorted(group.ranks) == sorted((rank, other)) and group.ranks[peer] == other
            calls.append(splits)
    assert all(splits == calls[0] for splits in calls)
    for split in calls[0]:
        assert sorted(chain(*split)) == list(range(16))


def test_nccl_splits_do_not_grow_with_ranks():
    with stubbed_nccl(5) as splits:
        mesh = Mesh(spec(pp=16, fsdp=32, tp=8), 5, GPU)
        ends = mesh.links("pp", links(build("interleaved", 16, 32)))
    assert list(ends) == [(0, 1), (0, 15), (1, 0), (15, 0)]
    assert len(splits) <= 6


def test_device_mesh_has_same_groups():
    with fake_group(5, 8) as made:
        mesh = Mesh(spec(dp=2, cp=2, tp=2), 5, CPU)
        device_mesh = mesh.device_mesh("dp", "tp")
        assert device_mesh.mesh_dim_names == ("dp", "tp") and device_mesh.mesh.tolist() == [[0, 1], [4, 5]]
        assert device_mesh.get_group("tp").group_name == mesh.group("tp").group_name
        assert len(made) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nccl_options_use_high_priority_stream():
    assert nccl_options().is_high_priority_stream
