"""Mixtures of experts: any mesh, schedule and recompute mode trains as one process does."""

import math
from functools import cache
from unittest.mock import patch

import pytest
import torch

from ndtrain.model.families import moe
from ndtrain.model.moe.router import Routing
from tests.lib.parity import FP64, SHAPE, Run, assemble, compare, rank_run, train
from tests.lib.ranks import run_ranks

FULL = pytest.mark.full
SIX = ["model.num_experts=6", "model.num_experts_per_tok=2"]
LATENT = [
    "model.num_key_value_heads=8",
    "model.kv_lora_rank=10",
    "model.qk_nope_head_dim=5",
    "model.qk_rope_head_dim=4",
    "model.v_head_dim=6",
    "model.n_shared_experts=2",
    "model.moe_intermediate_size=20",
    "model.norm_topk_prob=true",
    "model.routed_scaling_factor=2.5",
]
MODELS = {
    "mixtral": ["model.model_type=mixtral", *SIX],
    # a dense layer among sparse ones, and a shared expert
    "qwen2-moe": [
        "model.model_type=qwen2_moe", *SIX, "model.moe_intermediate_size=20", "model.mlp_only_layers=[1]",
        "model.shared_expert_intermediate_size=24",
    ],
    "qwen3-moe": ["model.model_type=qwen3_moe", *SIX, "model.moe_intermediate_size=20", "model.head_dim=10"],
    "olmoe": ["model.model_type=olmoe", *SIX, "model.clip_qkv=0.7"],
    # a dense layer first, choices from one of two groups, latent queries, values narrower than keys
    "deepseek-v3": [
        "model.model_type=deepseek_v3", *SIX, *LATENT, "model.q_lora_rank=14", "model.n_group=2", "model.topk_group=1",
        "model.first_k_dense_replace=1", "model.rope_scaling={rope_type:yarn,factor:4,mscale:1,mscale_all_dim:1,"
        "original_max_position_embeddings:8}",
    ],
    "glm4-moe": [
        "model.model_type=glm4_moe", "model.num_experts=4", "model.num_experts_per_tok=1", "model.n_shared_experts=1",
        "model.moe_intermediate_size=20", "model.routed_scaling_factor=2.0", "model.first_k_dense_replace=1",
    ],
    "moonlight": ["model.model_type=deepseek_v3", *SIX, *LATENT, "model.attention_bias=true"],
}  # fmt: skip
# 2, 4 and 8 divide the heads of these
EVEN = ["model.num_attention_heads=8", "model.num_key_value_heads=2", "model.hidden_size=32", "train.seq_len=16"]
MODEL = [*SHAPE, *FP64, *EVEN, "train.global_batch=8"]
AXES = ("pp", "dp", "fsdp", "cp", "tp")


@cache
def reference(name: str, mask: str = "uneven", *changes: str) -> Run:
    """The one-process, one-microbatch run."""
    return train(1, [*MODEL, *MODELS[name], "train.micro_batch=8", *changes], mask)


def check(name: str, mesh: dict[str, int], *changes: str, micro_batch: int = 2) -> None:
    """The changes of the model apply to the reference too."""
    sizes = [f"mesh.{axis}={size}" for axis, size in mesh.items()]
    overrides = [*MODEL, *MODELS[name], *sizes, f"train.micro_batch={micro_batch}", *changes]
    run = train(ranks_of(mesh), overrides, "uneven")
    of_model = [c for c in changes if c.startswith("model.")]
    compare(run, reference(name, "uneven", *of_model), loss=1e-10, state=1e-9)


def ranks_of(mesh: dict[str, int]) -> int:
    """ep has the ranks of other axes."""
    return math.prod(size for axis, size in mesh.items() if axis != "ep")


def meshes(ranks: int, axes: tuple[str, ...] = AXES):
    """Every factorisation of `ranks` over the axes, without those of size 1."""
    if not axes:
        return [{}] if ranks == 1 else []
    first, *rest = axes
    sizes = [n for n in (1, 2, 4, 8) if ranks % n == 0]
    return [({first: n} if n > 1 else {}) | m for n in sizes for m in meshes(ranks // n, tuple(rest))]


def sweep():
    for i, mesh in enumerate(m for n in (2, 4, 8) for m in meshes(n) if m.get("pp", 1) < 4):
        label = " ".join(f"{axis}{size}" for axis, size in mesh.items())
        name = "qwen2-moe" if label == "fsdp2 tp2" else list(MODELS)[i % len(MODELS)]
        name = "mixtral" if mesh.get("tp") == 8 else name  # 8 does not divide the dense MLPs of others
        yield pytest.param(name, mesh, marks=FULL, id=f"{name} {label}")


@pytest.mark.parametrize(("name", "mesh"), list(sweep()))
def test_moe_on_mesh_equals_one_process(name, mesh):
    check(name, mesh, micro_batch=8 // (mesh.get("dp", 1) * mesh.get("fsdp", 1)) // (2 if "pp" in mesh else 1) or 1)


@FULL
@pytest.mark.parametrize("name", MODELS)
def test_every_family_on_eight_ranks_equals_one_process(name):
    check(name, {"fsdp": 2, "cp": 2, "tp": 2})


@pytest.mark.parametrize("name", [pytest.param(n, marks=[FULL] * (n != "deepseek-v3")) for n in MODELS])
def test_moe_without_sequence_parallelism_equals_one_process(name):
    check(name, {"tp": 2}, "tp.sequence_parallel=false")


@FULL
@pytest.mark.parametrize("tp", [2, 4])
def test_shared_kv_heads_are_normalised_once(tp):
    """There is one norm over all K/V heads, and there are fewer K/V heads than ranks."""
    check("olmoe", {"tp": tp})


@FULL
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("recompute", ["none", "full", "selective", "every", "budget"])
def test_moe_with_recompute_and_zero_equals_one_process(recompute, zero):
    more = {"every": ["recompute.every=2"], "budget": ["recompute.budget=1MB"]}.get(recompute, [])
    check("qwen2-moe", {"fsdp": 2}, f"recompute={recompute}", f"mesh.zero={zero}", *more)


KEPT = [["router"], ["dispatch"], ["experts"], ["combine"], ["core", "router", "dispatch", "experts", "combine"]]


@pytest.mark.parametrize("keep", [pytest.param(k, marks=[FULL] * (len(k) == 1)) for k in KEPT], ids=str)
def test_moe_with_kept_ops_equals_one_process(keep):
    check("qwen2-moe", {}, "recompute=selective", f"recompute.keep=[{','.join(keep)}]")


@FULL
@pytest.mark.parametrize("name", ["qwen2-moe", "deepseek-v3"])
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_moe_with_recompute_on_cp_and_tp_equals_one_process(recompute, name):
    check(name, {"cp": 2, "tp": 2}, f"recompute={recompute}")


LATENT_CHANGES = {
    "ulysses": ({"cp": 2}, ["cp.kind=ulysses"]),
    "ring of Ulysses groups": ({"cp": 4}, ["cp.ulysses=2"]),
    "messages in parts": ({"tp": 2}, ["tp.overlap=true"]),
    "in parts, without sequence parallelism": ({"tp": 2}, ["tp.overlap=true", "tp.sequence_parallel=false"]),
    "heads on every rank": (
        {"tp": 2}, ["tp.sequence_parallel=false", "layout.rules.heads=null", "layout.rules.kv_heads=null"],
    ),
    "latents kept": ({"fsdp": 2}, ["recompute=selective", "recompute.keep=[qkv_proj,core,o_proj]"]),
}  # fmt: skip


@FULL
@pytest.mark.parametrize("changes", LATENT_CHANGES)
@pytest.mark.parametrize("name", ["deepseek-v3", "moonlight"])
def test_latent_attention_on_mesh_equals_one_process(name, changes):
    mesh, more = LATENT_CHANGES[changes]
    check(name, mesh, *more)


SCHEDULES = {"gpipe": 2, "1f1b": 2, "interleaved": 4, "zb_h1": 2, "zb_v": 4, "dualpipe_v": 4}  # -> stages of 2 ranks


@FULL
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_moe_with_schedules_equals_one_process(schedule):
    """The backward of weights, where it is an action of its own, covers router and experts."""
    layers = f"model.num_hidden_layers={SCHEDULES[schedule]}"
    overrides = [*MODEL, *MODELS["qwen2-moe"], layers]
    run = train(2, [*overrides, "mesh.pp=2", f"schedule={schedule}", "train.micro_batch=1"], "uneven")
    compare(run, reference("qwen2-moe", "uneven", layers), loss=1e-10, state=1e-9)


# ------------------------------------------------------------------------------------------------------- load


def all_on_one(logits_NX: torch.Tensor, k: int, renormalise: bool, bias_X: torch.Tensor) -> Routing:
    """Every token goes to expert 3 alone; its weight depends on all logits."""
    assert k == 1
    experts_N1 = torch.full((len(logits_NX), 1), 3, device=logits_NX.device)
    return Routing(logits_NX.softmax(-1).gather(1, experts_N1), experts_N1)


def none_for_two(logits_NX: torch.Tensor, k: int, renormalise: bool, bias_X: torch.Tensor) -> Routing:
    """Experts 0 and 4 get no token."""
    masked = logits_NX.clone()
    masked[:, [0, 4]] = -torch.inf
    weights, experts = masked.softmax(-1).topk(k, dim=-1)
    return Routing(weights, experts)


def routed(rule, overrides: list[str], mask: str):
    """On one rank."""
    with patch.object(moe, "softmax_top_k", rule):
        return rank_run(overrides, mask)


LOADED = [{"fsdp": 2}, {"tp": 2}, {"cp": 2}, {"dp": 2, "ep": 2}, {"dp": 3, "fsdp": 2, "ep": 6}]


@pytest.mark.parametrize("mesh", [{"fsdp": 2, "ep": 2}, *(pytest.param(m, marks=FULL) for m in LOADED)], ids=str)
@pytest.mark.parametrize("rule", [all_on_one, pytest.param(none_for_two, marks=FULL)])
def test_experts_without_tokens_have_zero_gradient(rule, mesh):
    """An expert that no token goes to has a gradient of zeros, on one rank or on all. With ep all tokens go to the
    experts of one rank, or a rank gets none."""
    k = "model.num_experts_per_tok=1" if rule is all_on_one else "model.num_experts_per_tok=2"
    overrides = [*MODEL, *MODELS["mixtral"], k, "train.global_batch=12"]
    expected = assemble(run_ranks(routed, 1, rule, [*overrides, "train.micro_batch=12"], "uneven"))
    sizes = [f"mesh.{axis}={size}" for axis, size in mesh.items()]
    run = assemble(run_ranks(routed, ranks_of(mesh), rule, [*overrides, *sizes, "train.micro_batch=2"], "uneven"))
    compare(run, expected, loss=1e-10, state=1e-9)
    idle = [n for n in run.tensors["gradient"] if ".experts.0." in n or ".experts.4." in n]
    assert len(idle) == 2 * 3 * 3 and not any(run.tensors["gradient"][n].any() for n in idle)
    assert run.tensors["gradient"]["model.layers.0.block_sparse_moe.experts.3.w1.weight"].any()


# --------------------------------------------------------------------------------------------------- precision


@pytest.mark.parametrize("compute", ["fp32", pytest.param("bf16", marks=FULL)])
def test_moe_in_fp32_and_bf16_is_near_one_process(compute):
    """Products are grouped, and gradients accumulate in fp32. In bf16 only fp32 sums change their order."""
    even = ["model.hidden_size=32", "model.intermediate_size=48", f"precision.compute={compute}", "train.steps=1"]
    base = [*SHAPE, *EVEN, *MODELS["mixtral"], *even, "train.global_batch=8", "train.micro_batch=2"]
    bounds = {"fp32": {"loss": 1e-6, "state": 1e-5}, "bf16": {"loss": 1e-5, "state": 1e-4}}[compute]
    compare(train(2, [*base, "mesh.fsdp=2"], "uneven"), train(1, base, "uneven"), **bounds)
