"""The limit of open descriptors is raised, and a run that would exceed it is refused before its ranks connect."""

import multiprocessing
import os
import resource
import subprocess
import sys

import pytest

from ndtrain.config import ConfigError
from ndtrain.run import descriptors
from tests.lib.helpers import MODULE, arguments, write_corpus
from tests.lib.ranks import run_ranks


def limits_after(soft: int, hard: int) -> tuple[int, int]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    descriptors.raise_limit()
    return resource.getrlimit(resource.RLIMIT_NOFILE)


@pytest.mark.parametrize("soft", [200, 300])
def test_soft_limit_is_raised_to_hard_limit(soft):
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        assert pool.apply(limits_after, (soft, 300)) == (300, 300)


@pytest.mark.parametrize(
    ("world", "groups", "rank_0", "others"),
    [(8, [8], 54, 35), (16, [16], 72, 46), (64, [2, 2, 4, 4, 16], 150, 72), (64, [2, 2, 16, 32], 170, 92)],
)
def test_needed_descriptors_cover_measured_numbers(world, groups, rank_0, others, monkeypatch):
    """Measured with `lab.scale ranks`; rank 0 served the store."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert rank_0 < descriptors.needed("gloo", 0, world, groups) < 2 * rank_0
    assert others < descriptors.needed("gloo", 1, world, groups) < 2.5 * others
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert descriptors.needed("gloo", 0, world, groups) == descriptors.needed("gloo", 1, world, groups)


def test_needed_descriptors_hardly_grow_on_nccl():
    small, large = (descriptors.needed("nccl", 5, world, [world]) for world in (8, 16384))
    assert large - small == 2 * (14 - 3)


def open_files(on_use: bool) -> int:
    """Descriptors that a group of all ranks adds to this rank, after collectives over it."""
    import torch
    import torch.distributed as dist

    from ndtrain.mesh.gloo import gloo_group_of_all_ranks

    before = len(os.listdir("/proc/self/fd"))
    group = gloo_group_of_all_ranks() if on_use else dist.new_group()
    for _ in range(2):
        dist.all_reduce(torch.ones(1), group=group)
    added = len(os.listdir("/proc/self/fd")) - before
    dist.barrier()
    return added


def test_group_that_connects_on_use_opens_few_files():
    at_once, on_use = (max(run_ranks(open_files, 12, kind)) for kind in (False, True))
    assert on_use <= 4 + 2 + 1 < 11 <= at_once


def test_too_many_ranks_are_refused_in_one_line(tmp_path, monkeypatch):
    """One of 32 ranks alone: it waits for no other one."""
    corpus = write_corpus(tmp_path / "corpus.txt")
    args = arguments(tmp_path / "run", corpus, "mesh.fsdp=32", "train.global_batch=64")
    env = os.environ | {"RANK": "5", "WORLD_SIZE": "32", "LOCAL_RANK": "0"}
    limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
    done = subprocess.run(
        [sys.executable, *MODULE, *args], cwd=tmp_path, env=env, preexec_fn=limit, capture_output=True, text=True
    )
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    line = done.stderr.strip()
    assert "\n" not in line and "32 ranks: each needs about 107 open files" in line and "the limit is 60" in line


def test_require_accepts_one_process():
    descriptors.require("gloo", 0, 1)
    with pytest.raises(ConfigError, match="start fewer ranks"):
        descriptors.require("gloo", 0, 10_000_000)
