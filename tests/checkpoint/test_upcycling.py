"""Mixtures of experts that start from a dense model (`moe.upcycle`)."""

import math
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file

from ndtrain import checkpoint
from ndtrain.checkpoint.safetensors_reader import Reader
from ndtrain.checkpoint.upcycling import dense_origins
from ndtrain.config import Config, ConfigError, load_config, resolve, world_from_env
from ndtrain.engine.setup import model_of_folder
from ndtrain.engine.train_step import TrainingStep
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.model import params, tensor_shapes
from ndtrain.model.families.hf_config import from_hf
from ndtrain.model.init import fill
from ndtrain.parallel.build import build_stages
from tests.lib.parity import FP64, Run, assemble, make_batches, owned
from tests.lib.ranks import run_ranks
from tests.model.test_families import LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, write

BASE = [
    "recipe=moe_debug", *FP64, "train.seq_len=16", "train.global_batch=4", "train.micro_batch=1",
    "hardware.device=cpu", "data.tokenizer=byte", "model.vocab_size=131", "model.hidden_size=32",
    "model.num_attention_heads=4", "model.num_experts=4", "model.num_experts_per_tok=2",
]  # fmt: skip
COMMON = {"sliding_window": None, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None}
DENSE: dict[str, dict[str, Any]] = {
    "qwen3_moe": QWEN3 | COMMON,
    "mixtral": MISTRAL | COMMON,
    "qwen2_moe": QWEN2 | COMMON,
    "olmoe": LLAMA | COMMON | {"num_key_value_heads": 4},
    "glm4_moe": LLAMA | COMMON,
}
OWN = {  # what makes the run's model go with that folder
    "qwen3_moe": ["model.head_dim=16", "model.moe_intermediate_size=48"],
    "mixtral": [
        "model.model_type=mixtral", "model.moe_intermediate_size=null", "model.norm_topk_prob=false",
        "model.intermediate_size=48",
    ],
    "qwen2_moe": [
        "model.model_type=qwen2_moe", "model.moe_intermediate_size=48", "model.shared_expert_intermediate_size=48",
        "model.mlp_only_layers=[1]", "model.intermediate_size=48",
    ],
    "glm4_moe": [
        "model.model_type=glm4_moe", "model.moe_intermediate_size=48", "model.intermediate_size=48",
        "model.n_shared_experts=1", "model.routed_scaling_factor=1.5", "model.first_k_dense_replace=1",
    ],
}  # fmt: skip
MESHES = {1: [], 2: ["mesh.fsdp=2", "mesh.ep=2"]}


def dense_folder(folder: Path, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A dense model in fp32; its tensors."""
    write(folder, config)
    draw = torch.Generator().manual_seed(0)
    shapes = tensor_shapes(from_hf(config))
    weights = {n: 0.1 * torch.randn(shape, generator=draw) + n.endswith("norm.weight") for n, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return weights


def start(overrides: list[str]) -> tuple[Run, list[tuple], int]:
    """On one rank: the first loss, the weights before it that the rank holds, and how many elements it has read."""
    rank, _, world = world_from_env()
    cfg, _ = model_of_folder(load_config(overrides), rank)
    cfg = resolve(cfg, world)
    mesh = Mesh(MeshSpec.of(cfg.mesh), rank, torch.device("cpu"))
    stages, elements = build_stages(cfg, mesh), []
    with patch.object(Reader, "read", autospec=True, side_effect=counted(elements)):
        checkpoint.load_start(Path(cfg.init_from), stages, mesh, cfg.run.seed if cfg.moe.upcycle else None)
    pieces = list(owned(stages, "weight", lambda u: u.master))
    report = TrainingStep(cfg, mesh, stages).run(1, make_batches(cfg, mesh, 1, "none")).wait()
    return Run([report.loss], [report.grad_norm]), pieces, sum(elements)


def counted(elements: list[int]):
    read = Reader.read

    def counting(self, name, rows, *into):
        elements.append(rows.numel)
        return read(self, name, rows, *into)

    return counting


def assembled(ranks: list[tuple[Run, list[tuple], int]]) -> Run:
    return assemble([(run, pieces) for run, pieces, _ in ranks])


def first_drawn(cfg: Config, name: str) -> torch.Tensor:
    """A tensor of a new model with the run's seed."""
    shape = tensor_shapes(cfg.model)[name]
    out = torch.empty(math.prod(shape), dtype=torch.float64)
    fill(out, cfg.model, cfg.run.seed, params(cfg.model)[name], 0)
    return out.view(shape)


@pytest.mark.parametrize("family", [pytest.param("qwen3_moe", marks=pytest.mark.full), "mixtral"])
def test_upcycled_model_computes_same_as_dense(family, tmp_path):
    """With weights that add up to 1, the first loss is the dense one's. One process and experts on two ranks start from
    the same bits: each expert is the layer's MLP, and the router is drawn as for a new model. A rank reads only what it
    holds."""
    weights = dense_folder(tmp_path, DENSE[family])
    base = [word for word in BASE if not word.startswith("model.")]
    dense, *_ = start([*base, f"init_from={tmp_path}"])
    overrides = [*BASE, *OWN[family], f"init_from={tmp_path}", "moe.upcycle=true"]
    cfg = resolve(model_of_folder(load_config(overrides), 0)[0], 1)
    origins = dense_origins(cfg.model)
    drawn = {name for name, origin in origins.items() if origin is None}
    for world, mesh in MESHES.items():
        ranks = run_ranks(start, world, [*overrides, *mesh]) if mesh else [start(overrides)]
        run = assembled(ranks)
        assert abs(run.losses[0] - dense.losses[0]) < 1e-9
        tensors = run.tensors["weight"]
        assert tensors.keys() == tensor_shapes(cfg.model).keys() and len(drawn) == 2
        for name, got in tensors.items():
            want = first_drawn(cfg, name) if name in drawn else weights[origins.get(name) or name].double()
            assert torch.equal(got, want), name
        for _, pieces, elements in ranks:
            assert elements == sum(values.numel() for _, name, _, _, values in pieces if name not in drawn)


def test_ungated_shared_expert_adds_dense_mlp_once_more(tmp_path):
    """It adds to the output of a token's experts, whose weights add up to the scaling factor."""
    weights = dense_folder(tmp_path / "dense", DENSE["glm4_moe"])
    overrides = [*BASE, *OWN["glm4_moe"], f"init_from={tmp_path / 'dense'}", "moe.upcycle=true"]
    upcycled, *_ = start(overrides)
    shutil.copytree(tmp_path / "dense", tmp_path / "wider")
    weights["model.layers.1.mlp.down_proj.weight"] *= 1.5 + 1
    save_file(weights, tmp_path / "wider" / "model.safetensors", {"format": "pt"})
    base = [word for word in BASE if not word.startswith("model.")]
    dense, *_ = start([*base, f"init_from={tmp_path / 'wider'}"])
    assert abs(upcycled.losses[0] - dense.losses[0]) < 1e-6, "weights in fp32 were multiplied"


def test_dense_layers_and_shared_experts_copy_dense_mlp(tmp_path):
    weights = dense_folder(tmp_path, DENSE["qwen2_moe"])
    overrides = [*BASE, *OWN["qwen2_moe"], f"init_from={tmp_path}", "moe.upcycle=true"]
    tensors = assembled([start(overrides)]).tensors["weight"]
    for name in ("gate_proj", "up_proj", "down_proj"):
        sparse, dense = (weights[f"model.layers.{i}.mlp.{name}.weight"].double() for i in (0, 1))
        assert torch.equal(tensors[f"model.layers.0.mlp.shared_expert.{name}.weight"], sparse)
        assert torch.equal(tensors[f"model.layers.0.mlp.experts.3.{name}.weight"], sparse)
        assert torch.equal(tensors[f"model.layers.1.mlp.{name}.weight"], dense)
    assert tensors["model.layers.0.mlp.shared_expert_gate.weight"].any()


QWEN3_RUN = OWN["qwen3_moe"]
REFUSED = {  # of a Qwen3 folder -> overrides, what the line must say
    "a dense run": (["model.model_type=qwen3"], ["model.num_experts", "does not use it"]),
    "a dense model": (["model=llama_debug"], ["model.model_type=llama has no experts", "model=moe_debug"]),
    "another width": (
        [*QWEN3_RUN, "model.hidden_size=64", "model.rope_theta=5.0"],
        ["model.hidden_size", "differ", "set model.hidden_size=32 model.rope_theta=10000.0"],
    ),
    "fewer layers": ([*QWEN3_RUN, "model.num_hidden_layers=1"], ["set model.num_hidden_layers=2"]),
    "a tied head": ([*QWEN3_RUN, "model.tie_word_embeddings=true"], ["set model.tie_word_embeddings=false"]),
    "half as wide experts": (
        [*QWEN3_RUN, "model.moe_intermediate_size=24"],
        ["model.moe_intermediate_size=24", "size 24", "intermediate_size is 48", "make them equal"],
    ),
    "wider dense layers": (
        [*QWEN3_RUN, "model.mlp_only_layers=[0]", "model.intermediate_size=96"], ["model.intermediate_size=96", "48"]
    ),
    "norms that have no place": (
        [*OWN["mixtral"], "model.head_dim=16"], ["model.model_type=mixtral", "q_norm.weight", "same attention"]
    ),
    "no such model": ([*QWEN3_RUN, "model.num_experts_per_tok=9"], ["model.num_experts_per_tok=9 exceeds"]),
}  # fmt: skip


def refused(overrides: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        model_of_folder(load_config(overrides), 0)
    line = str(caught.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize("name", REFUSED)
def test_upcycling_refuses_unsupported_settings(name, tmp_path):
    overrides, said = REFUSED[name]
    dense_folder(tmp_path, DENSE["qwen3_moe"])
    base = BASE if not overrides[0].startswith("model=") else BASE[:1]
    line = refused([*base, *overrides, f"init_from={tmp_path}", "moe.upcycle=true"])
    assert all(word in line for word in said), line


def test_upcycling_refuses_other_query_norm_shape(tmp_path):
    """OLMoE normalizes over all heads at once, with weights of the same names as Qwen3's."""
    dense_folder(tmp_path, DENSE["qwen3_moe"])
    olmoe = ["model.model_type=olmoe", "model.head_dim=16", "model.moe_intermediate_size=null"]
    line = refused([*BASE, *olmoe, "model.intermediate_size=48", f"init_from={tmp_path}", "moe.upcycle=true"])
    assert "model.model_type=olmoe" in line and "q_norm.weight would be (64,)" in line and "(16,)" in line


def test_upcycling_refuses_moe_folder(tmp_path):
    write(tmp_path, MIXTRAL)
    save_file({f"tensor {i}": torch.zeros(1) for i in range(1000)}, tmp_path / "model.safetensors")
    line = refused([*BASE, *OWN["mixtral"], f"init_from={tmp_path}", "moe.upcycle=true"])
    assert f"init_from={tmp_path} already is a mixture of experts (mixtral)" in line and "remove moe.upcycle" in line


def test_upcycle_in_recipe_allows_model_fields(tmp_path):
    """Fields of the model may then be set together with init_from. Otherwise they are refused."""
    (tmp_path / "recipe").mkdir()
    recipe = "# @package _global_\ndefaults:\n  - override /model: moe_debug\nmoe:\n  upcycle: true\n"
    (tmp_path / "recipe" / "mine.yaml").write_text(recipe)
    overrides = ["recipe=mine", "init_from=folder", "model.num_experts=4"]
    assert load_config(overrides, [str(tmp_path)]).model.num_experts == 4
    with pytest.raises(ConfigError, match=r"model\.num_experts=4: init_from=folder takes the model"):
        load_config([*overrides, "moe.upcycle=false"], [str(tmp_path)])
