"""A model beyond memory is refused before anything is allocated, and one that fits never is."""

from contextlib import nullcontext

import pytest
import torch

from ndtrain.config import Config, ConfigError, load_config, resolve, world_from_env
from ndtrain.device import memory
from ndtrain.device.memory import memory_limit_bytes
from ndtrain.engine import memory_check
from ndtrain.engine.memory_check import least_bytes, require_memory
from tests.lib.ranks import run_ranks
from tests.lib.stages import RankStages
from tests.parallel.test_memory import SHAPE, measure

CPU = torch.device("cpu")
KINDS = {
    "fp32": [],
    "zero 1": ["mesh.zero=1"],
    "bf16": ["precision.compute=bf16"],
    "bf16 moments": ["precision.compute=bf16", "optim.state_dtype=bf16", "mesh.zero=2"],
    "an average": ["optim.ema=0.9"],
    "tied": ["model.tie_word_embeddings=true"],
    "fp64": ["precision.params=fp64", "precision.compute=fp64"],
}
MESHES = {
    "fsdp2": ["mesh.fsdp=2"],
    "zero2": ["mesh.fsdp=2", "mesh.zero=2"],
    "tp2": ["mesh.tp=2", "model.vocab_size=767"],
    "pp2": ["mesh.pp=2"],
    "pp2 tied": ["mesh.pp=2", "model.tie_word_embeddings=true"],
    "cp2": ["mesh.cp=2"],
}


def config(overrides: list[str], world: int = 1) -> Config:
    return resolve(load_config([*SHAPE, "train.global_batch=8", *overrides]), world)


@pytest.mark.parametrize("kind", KINDS)
def test_least_bytes_equals_state_of_one_process(kind):
    run = RankStages.build([*SHAPE, *KINDS[kind]])
    assert least_bytes(run.cfg, 0) == (run.stages.units.state_bytes(), 0)


def test_least_bytes_counts_offloaded_state_as_host_memory():
    run = RankStages.build([*SHAPE, "optim.offload=true", "optim.ema=0.9", "precision.compute=bf16"])
    numel = sum(unit.layout.numel for unit in run.stages.units.units.values())
    assert least_bytes(run.cfg, 0) == (run.stages.units.state_bytes(), (4 + 8 + 4) * numel)


def both(overrides: list[str]) -> tuple[int, int, int]:
    """On one rank: the bound, what it holds between steps, and what it holds at the peak of a step."""
    rank, _, world = world_from_env()
    measured = measure(overrides)
    return least_bytes(config(overrides, world), rank)[0], measured["held"], measured["held"] + measured["peak"]


@pytest.mark.full
@pytest.mark.parametrize("mesh", MESHES)
def test_least_bytes_is_reached_on_mesh(mesh):
    for bound, held, peak in run_ranks(both, 2, MESHES[mesh]):
        assert held <= bound * 1.001 and bound <= peak


def test_require_memory_accepts_exact_fit(monkeypatch):
    cfg = config(["mesh.fsdp=4"], 4)
    needed = sum(sum(least_bytes(cfg, rank)) for rank in (2, 3))
    monkeypatch.setattr(memory_check, "memory_limit_bytes", lambda: needed)
    require_memory(cfg, CPU, [2, 3])
    monkeypatch.setattr(memory_check, "memory_limit_bytes", lambda: needed - 1)
    with pytest.raises(ConfigError, match=r"at least 0.0 GiB in host memory \(2 ranks here\) .*more hosts \(mesh.fsdp"):
        require_memory(cfg, CPU, [2, 3])


EXPERTS = ["model_type=qwen3_moe", "num_experts=4", "num_experts_per_tok=2", "moe_intermediate_size=16"]
HOSTS = {
    "stages and odd slices": ["mesh.pp=2", "mesh.tp=2", "mesh.fsdp=2", "model.vocab_size=767"],
    "cp": ["mesh.fsdp=2", "mesh.cp=2", "mesh.dp=2", "mesh.zero=1"],
    "experts": ["mesh.ep=2", "mesh.fsdp=2", "mesh.dp=2", "mesh.tp=2", *(f"model.{key}" for key in EXPERTS)],
}


@pytest.mark.parametrize("host", HOSTS)
def test_require_memory_counts_every_rank_of_host(host, monkeypatch):
    cfg = config(HOSTS[host], 8)
    needed = sum(sum(least_bytes(cfg, rank)) for rank in range(8))
    for short in (0, 1):
        monkeypatch.setattr(memory_check, "memory_limit_bytes", lambda short=short: needed - short)
        with pytest.raises(ConfigError) if short else nullcontext():
            require_memory(cfg, CPU, range(8))


def test_require_memory_checks_one_rank_per_gpu(monkeypatch):
    cfg = config(["mesh.fsdp=2", "mesh.zero=1", "optim.offload=true"], 2)
    on_device, _ = least_bytes(cfg, 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, on_device))
    require_memory(cfg, torch.device("cuda"), [0, 1])  # all of it, whatever others hold now
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, on_device - 1))
    with pytest.raises(
        ConfigError, match=r"on a GPU with .*mesh.zero=1, but this GPU has .*more GPUs.* set mesh.zero=3"
    ):
        require_memory(cfg, torch.device("cuda"), [0, 1])


def test_memory_limit_is_smallest_of_nested_cgroups(monkeypatch, tmp_path):
    whole = memory_limit_bytes()
    monkeypatch.setattr(memory, "_PROC", tmp_path)
    monkeypatch.setattr(memory, "_CGROUP", tmp_path / "cgroup")
    assert memory_limit_bytes() >= whole > 1 << 28
    (tmp_path / "cgroup/job/step").mkdir(parents=True)
    (tmp_path / "cgroup").joinpath("memory.max").write_text("max\n")
    (tmp_path / "cgroup").joinpath("cgroup").write_text("")
    (tmp_path / "cgroup/job/memory.max").write_text(f"{1 << 26}\n")
    (tmp_path / "cgroup/job/memory.swap.max").write_text("0\n")
    (tmp_path / "cgroup/job/step/memory.max").write_text(f"{1 << 27}\n")
    (tmp_path / "cgroup/job/step/memory.swap.max").write_text("0\n")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cgroup").write_text("0::/job/step\n")
    monkeypatch.setattr(memory, "_PROC", tmp_path / "proc")
    assert memory_limit_bytes() == 1 << 26


def test_memory_limit_reads_cgroups_v1(monkeypatch, tmp_path):
    (tmp_path / "memory/job").mkdir(parents=True)
    (tmp_path / "memory/memory.limit_in_bytes").write_text(f"{2**63 - 4096}\n")
    (tmp_path / "memory/job/memory.limit_in_bytes").write_text(f"{1 << 20}\n")
    (tmp_path / "cgroup").write_text("5:cpuset:/\n4:memory:/job\n0::/\n")
    monkeypatch.setattr(memory, "_PROC", tmp_path)
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    swap = memory._number(memory.Path("/proc/meminfo"), r"^SwapTotal:\s*(\d+) kB") * 1024
    assert memory_limit_bytes() == (1 << 20) + swap
