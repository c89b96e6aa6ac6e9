"""The recipes of the Llama 3 paper (arXiv:2407.21783) and of mixtures of experts: their meshes and batches, and that
they fit."""

import pytest

from ndtrain.config import Config, load_config, resolve
from ndtrain.mesh.mesh import MeshSpec
from ndtrain.parallel.distribution import Distribution
from ndtrain.plan.dry import dry_run

GPU_BYTES = 80e9
BESIDES = 6e9  # for what no tensor holds: CUDA's context, NCCL's buffers, fragmentation
RECIPES = {  # recipe -> (GPUs, overrides that leave the peak as it is)
    "llama3_70b": (512, ["train.global_batch=128"]),  # two microbatches instead of 32
    "llama3_405b": (16_384, []),
    "llama3_405b_long": (16_384, []),
}
# of mixtures: recipe -> (GPUs, overrides that leave the peak as it is, ranks whose peaks differ)
MIXTURES = {
    "mixtral_8x7b": (64, ["train.global_batch=128"], (0, 63)),
    "qwen3_30b_a3b": (32, ["train.global_batch=64"], (0, 31)),
    # 16 microbatches; the first stage has the dense layers, the second one most microbatches of experts
    "deepseek_v3": (2048, ["train.global_batch=1024"], (0, 128, 2047)),
}


def config(name: str, *more: str) -> Config:
    return resolve(load_config([f"recipe={name}", *more]), (RECIPES | MIXTURES)[name][0])


@pytest.mark.parametrize("name", RECIPES)
def test_llama_3_recipe_step_has_16_million_tokens(name):
    cfg = config(name)
    assert cfg.train.global_batch * cfg.train.seq_len == 2**24


@pytest.mark.parametrize(("name", "sizes"), [("llama3_405b", (8, 1, 16, 128)), ("llama3_405b_long", (8, 16, 16, 8))])
def test_llama_3_recipe_meshes_equal_table_4(name, sizes):
    cfg = config(name)
    spec = MeshSpec.of(cfg.mesh)
    assert tuple(spec.size(axis) for axis in ("tp", "cp", "pp", "fsdp")) == sizes and cfg.microbatches == 16
    assert spec.members(0, "tp") == list(range(8)), "tp is inside a host"


def test_llama_3_405b_end_stages_have_no_layers():
    layers = [len(stage) for stage in Distribution.of(config("llama3_405b")).placement.layers]
    assert layers == [0, *[1] * 126, 0]


def test_deepseek_recipe_mesh_equals_report():
    """Section 3.2: sixteen stages, experts over 64 ranks, zero 1. Each rank has four experts of a layer."""
    cfg = config("deepseek_v3")
    assert (cfg.mesh.pp, cfg.mesh.ep, cfg.mesh.zero) == (16, 64, 1) and cfg.model.num_experts // cfg.mesh.ep == 4
    assert MeshSpec.of(cfg.mesh).members(0, "tp") == [0, 1], "tp is inside a host"


def peaks_fit(name: str, same_peak: list[str], ranks: tuple[int, ...]) -> None:
    cfg = config(name, *same_peak)
    for rank in ranks:
        record = dry_run(cfg, rank, "cuda")
        assert record.compiled and record.attention == "flash"
        assert sum(record.state.values()) < record.peak_bytes < GPU_BYTES - BESIDES, f"rank {rank}"


@pytest.mark.full
@pytest.mark.parametrize("name", RECIPES)
def test_llama_3_recipe_first_and_last_rank_fit(name):
    gpus, same_peak = RECIPES[name]
    peaks_fit(name, same_peak, (0, gpus - 1))


@pytest.mark.full
@pytest.mark.parametrize("name", MIXTURES)
def test_moe_recipes_fit(name):
    peaks_fit(name, *MIXTURES[name][1:])
