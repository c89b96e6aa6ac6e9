"""gloo groups that share a thread deliver the same messages as groups with threads of their own, and rows of all ranks
reach the first one along a tree."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ndtrain.config import MeshConfig
from ndtrain.mesh.gloo import gather_rows, gloo_group_of_all_ranks
from ndtrain.mesh.mesh import Mesh, MeshSpec
from tests.lib.ranks import run_ranks

SIZES = {"pp": 2, "fsdp": 2, "tp": 2}
NUMBERS = 100_000


def loops() -> int:
    """The threads of this process that serve gloo's sockets."""
    return sum(path.read_text() == "gloo_tcp_loop\n" for path in Path("/proc/self/task").glob("*/comm"))


def exchanged() -> tuple[int, int, bool]:
    """Use all axes at once. Returns the threads before and after, and whether every message was right."""
    before, mesh = loops(), Mesh(MeshSpec.of(MeshConfig(**SIZES)), dist.get_rank(), torch.device("cpu"))
    own = torch.arange(NUMBERS, dtype=torch.float64) + mesh.rank
    waits, right = [], []
    for _ in range(5):
        for axis in SIZES:
            group, ranks = mesh.group(axis), mesh.spec.members(mesh.rank, axis)
            total, other = own.clone(), torch.empty_like(own)
            there = 1 - mesh.index(axis)
            waits += [dist.all_reduce(total, group=group, async_op=True)]
            waits += [dist.isend(own, group=group, group_dst=there), dist.irecv(other, group=group, group_src=there)]
            right += [(total, sum(ranks)), (other, ranks[there])]
    for wait in waits:
        wait.wait()
    numbers = torch.arange(NUMBERS, dtype=torch.float64)
    sums = [torch.equal(x, numbers * (2 if n % 2 == 0 else 1) + add) for n, (x, add) in enumerate(right)]
    dist.barrier()
    return before, loops(), all(sums)


def test_groups_of_all_axes_share_one_thread():
    for before, after, right in run_ranks(exchanged, 8):
        assert right and after == before + 1


def gathered() -> torch.Tensor | None:
    """Rank r has r rows, which name it."""
    group, rank = gloo_group_of_all_ranks(), dist.get_rank()
    dist.all_reduce(torch.zeros(1), group=group)
    return gather_rows(torch.full((rank, 3), rank), group)


@pytest.mark.parametrize("ranks", [2, 7, pytest.param(8, marks=pytest.mark.full)])
def test_rows_of_all_ranks_reach_the_first_in_order(ranks):
    first, *others = run_ranks(gathered, ranks)
    assert first.tolist() == [[rank] * 3 for rank in range(ranks) for _ in range(rank)]
    assert others == [None] * (ranks - 1)
