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


def test_needed_descriptors_cover_measured_numbers(monkeypatch):
    """Measured with gloo: 107 for a rank of 32. Of 128 ranks, rank 0 with the store had 576, the others 319."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert descriptors.needed("gloo", 1, 32) == 104 and descriptors.needed("gloo", 1, 128) == 296
    assert descriptors.needed("gloo", 0, 128) == 603
    assert descriptors.needed("gloo", 1, 128, [2, 2, 4, 2, 4]) == 296 + 28 >= 319, (
        "several axes have groups of their own"
    )
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert descriptors.needed("gloo", 0, 128) == 296 and descriptors.needed("nccl", 5, 1000) == 1040


def open_files() -> int:
    """Descriptors of this rank after all its groups are made."""
    import torch
    import torch.distributed as dist

    background = dist.new_group(backend="gloo")
    for group in (None, background):
        dist.all_reduce(torch.ones(1), group=group)
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.full
def test_ranks_open_no_more_files_than_needed():
    for opened in run_ranks(open_files, 8):
        assert opened <= descriptors.needed("gloo", 1, 8)


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
    assert "\n" not in line and "32 ranks: each needs about 104 open files" in line and "the limit is 60" in line


def test_require_accepts_one_process():
    descriptors.require("gloo", 0, 1)
    with pytest.raises(ConfigError, match="start fewer ranks"):
        descriptors.require("gloo", 0, 10_000_000)
