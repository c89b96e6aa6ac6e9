"""Predictions of real programs: memory against the dry run, the waterfall, the command, and published runs."""

import json
from dataclasses import replace

import pytest

from ndtrain.config import Config, load_config, resolve
from ndtrain.mesh.mesh import MeshSpec
from ndtrain.model.flops import flops_per_token
from ndtrain.plan.__main__ import main
from ndtrain.plan.dry import dry_run
from ndtrain.plan.events import Kernel
from ndtrain.plan.hardware import load_hardware
from ndtrain.plan.memory import held_bytes, rank_memory
from ndtrain.plan.predict import Predictor, plan_step
from ndtrain.plan.price import Prices, Rates

H100 = load_hardware("h100")
SHAPE = ["recipe=llama_debug", "train.global_batch=16", "train.micro_batch=2", "precision.compute=bf16"]


def configured(overrides: str, ranks: int) -> Config:
    return resolve(load_config([*SHAPE, *overrides.split()]), ranks)


EXPERTS = "model.model_type=qwen3_moe model.num_experts=8 model.num_experts_per_tok=2 model.moe_intermediate_size=64"

# --------------------------------------------------------------------------------------------------------------- memory

MEMORY = {
    "mesh.pp=2 mesh.fsdp=2 mesh.zero=2 schedule=zb_h1": 4,
    f"{EXPERTS} mesh.fsdp=4 mesh.ep=2 mesh.zero=2 recompute=full": 4,
}
MORE_MEMORY = {
    "mesh.fsdp=2 mesh.zero=3 recompute=selective": 2,
    "mesh.pp=2 mesh.tp=2 mesh.zero=1 recompute=full model.tie_word_embeddings=true": 4,
    "": 1,
    "mesh.dp=2 mesh.zero=1": 2,
    "mesh.fsdp=2 mesh.zero=1 precision.compute=fp32": 2,
    "mesh.cp=2 mesh.fsdp=2": 4,
    "mesh.fsdp=2 recompute=every model.num_hidden_layers=8": 2,
    "mesh.fsdp=2 optim.state_dtype=bf16 optim.ema=0.9": 2,
    "mesh.pp=2 mesh.fsdp=2 schedule=interleaved schedule.chunks=2 model.num_hidden_layers=8": 4,
    "mesh.pp=2 schedule=zb_v model.num_hidden_layers=8": 2,
    "mesh.pp=4 schedule=dualpipe_v model.num_hidden_layers=8": 4,
    "mesh.pp=2 schedule=gpipe mesh.tp=2 mesh.cp=2": 8,
    f"{EXPERTS} mesh.tp=2 mesh.zero=1": 2,
    f"{EXPERTS} mesh.pp=2 mesh.dp=2 mesh.fsdp=2 mesh.ep=4 model.decoder_sparse_step=2": 8,
}


@pytest.mark.parametrize(
    ("mesh", "ranks"), [*MEMORY.items(), *(pytest.param(*c, marks=pytest.mark.full) for c in MORE_MEMORY.items())]
)
def test_predicted_state_equals_dry_run_and_peak_within_1_percent(mesh, ranks):
    cfg = configured(f"train.compile=false {mesh}", ranks)
    plan, spec = plan_step(cfg, "cuda"), MeshSpec.of(cfg.mesh)
    for pp, own in enumerate(plan.program.ranks):
        dry = dry_run(cfg, spec.rank(dict.fromkeys(spec.order, 0) | {"pp": pp}), "cuda")
        assert sum(held_bytes(plan.program.units[u], plan.program, plan.sizes) for u in own.units) == sum(
            dry.state.values()
        )
        peak = sum(rank_memory(plan.program, own, plan.pieces, plan.sizes))
        assert peak == pytest.approx(dry.peak_bytes, rel=0.01)


OWNERS = {  # short sequences, so that the update needs more memory than the passes
    "mesh.fsdp=2": 2, "": 1, "mesh.fsdp=2 optim.normalize=neurons": 2, "mesh.dp=2": 2,
    "mesh.tp=2 optim.ns=gram": 2, "model=moe_small mesh.dp=2 mesh.ep=2": 2, "mesh.fsdp=2 optim.split=heads": 2,
    "mesh.fsdp=2 optim.ns_dtype=fp32 optim.ns=polar_express": 2, "mesh.pp=2 mesh.fsdp=2": 4,
}  # fmt: skip


@pytest.mark.parametrize("mesh", [pytest.param(m, marks=pytest.mark.full) if i else m for i, m in enumerate(OWNERS)])
def test_predicted_peak_of_an_update_by_owners_within_3_percent(mesh):
    ranks = OWNERS[mesh]
    words = f"train.compile=false model=llama_small optim=muon train.seq_len=8 train.micro_batch=1 {mesh}"
    plan = plan_step(configured(words, ranks), "cuda")
    dry = max(dry_run(plan.cfg, rank, "cuda").peak_bytes for rank in range(ranks))
    assert plan.tensor_bytes == pytest.approx(dry, rel=0.03)
    passes = [replace(own, rounds=(), program=replace(own.program, update=())) for own in plan.program.ranks]
    without = max(sum(rank_memory(plan.program, own, plan.pieces, plan.sizes)) for own in passes)
    assert without < 0.97 * dry, "the update has the peak"


# ------------------------------------------------------------------------------------------------------- the prediction


def test_waterfall_sums_to_step_time_without_negative_parts():
    cfg = configured("mesh.pp=2 mesh.dp=2 mesh.fsdp=2 mesh.cp=2 mesh.tp=2 recompute=full", 32)
    p = Predictor(H100).predict(cfg)
    assert sum(p.waterfall.values()) == pytest.approx(p.step_time_s, rel=1e-9)
    assert min(p.waterfall.values()) >= -1e-12
    assert all(p.waterfall[f"exposed {axis}"] > 0 for axis in ("pp", "dp", "fsdp", "cp", "tp"))
    assert p.waterfall["recompute"] > 0 and p.waterfall["bubble"] > 0 and p.hfu > p.mfu


def test_predicted_mfu_follows_formula_of_logged_mfu():
    cfg = configured("mesh.fsdp=2", 2)
    p = Predictor(H100).predict(cfg, explain=False)
    t = cfg.train
    assert p.waterfall == {} and p.tokens_per_s == pytest.approx(t.global_batch * t.seq_len / p.step_time_s)
    assert p.tokens_per_s_per_device == pytest.approx(p.tokens_per_s / 2)
    assert p.mfu == pytest.approx(p.tokens_per_s_per_device * flops_per_token(cfg.model, t.seq_len) / 989.5e12)
    assert p.hfu == pytest.approx(p.mfu)


def test_predict_command_writes_table_json_and_svg(tmp_path, capsys):
    run = ["recipe=llama3_8b", "hardware=h100", "nodes=1", "mesh.fsdp=8"]
    assert main(["predict", *run, f"json={tmp_path}/prediction.json", f"svg={tmp_path}/step.svg"]) == 0
    out = capsys.readouterr().out
    assert "8 ranks of h100: fsdp=8, zero=3, 16 microbatches" in out and "where the step time goes" in out
    body = json.loads((tmp_path / "prediction.json").read_text())
    assert "exposed fsdp" in (tmp_path / "step.svg").read_text()
    assert body["rates"]["matmul"] > 0 and sum(body["waterfall"].values()) == pytest.approx(body["step_time_s"])


@pytest.mark.full
@pytest.mark.parametrize(("fsdp", "mfu"), [(64, 0.43), (128, 0.41)])
def test_llama_3_405b_is_predicted_within_15_percent_of_its_paper(fsdp, mfu):
    """Llama Team, 2024, arXiv:2407.21783, table 4, on 8,192 and 16,384 GPUs."""
    cfg = resolve(load_config(["recipe=llama3_405b", f"mesh.fsdp={fsdp}"]), 128 * fsdp)
    assert Predictor(H100).predict(cfg, explain=False).mfu == pytest.approx(mfu, rel=0.15)


MISTAKES = {
    "no rates": (["hardware=cpu", "ranks=1"], "hardware=cpu: memory_gb_s is missing"),
    "mesh": (["hardware=h100", "nodes=1", "mesh.tp=3"], "mesh tp=3 needs 3 ranks but 8 started"),
    "offload": (
        ["hardware=h100", "ranks=1", "optim.offload=true"],
        "optim.offload=true: hardware descriptions have no rate",
    ),
    "budget": (
        ["hardware=h100", "ranks=1", "recompute=budget", "recompute.budget=1GiB"],
        "recompute=budget:",
    ),
    "imbalance": (["hardware=h100", "ranks=1", "imbalance=0.5"], "imbalance=0.5: must be a number from 1"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_bad_argument_is_one_line_error(name, capsys):
    args, text = MISTAKES[name]
    assert main(["predict", "recipe=llama_debug", *args]) == 2
    err = capsys.readouterr().err
    assert text in err and err.startswith("error: ") and err.count("\n") == 1


# -------------------------------------------------------------------------------------------------------------- experts

LARGE = (
    "model.model_type=qwen3_moe model.hidden_size=2048 model.num_attention_heads=16 model.num_key_value_heads=4 "
    "model.num_experts=64 model.num_experts_per_tok=4 model.moe_intermediate_size=1024 train.seq_len=2048 "
    "model.max_position_embeddings=2048 train.compile=true mesh.fsdp=8 mesh.ep=8"
)


@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.full)])
def test_hf_balance_costs_one_more_forward(recompute):
    plain, ahead = (of_experts(more=f"moe.balance={balance} recompute={recompute}") for balance in ("none", "hf"))
    forward = plain.waterfall["matmul at peak"] / 3
    assert ahead.waterfall["matmul at peak"] - plain.waterfall["matmul at peak"] == pytest.approx(forward, rel=0.1)
    assert ahead.step_time_s > plain.step_time_s + forward
    assert sum(ahead.waterfall.values()) == pytest.approx(ahead.step_time_s)
    assert ahead.memory_bytes == pytest.approx(plain.memory_bytes, rel=0.01)


def of_experts(imbalance: float = 1.0, more: str = ""):
    cfg = configured(f"{LARGE} {more}", 8)
    return Predictor(H100, Rates(imbalance=imbalance)).predict(cfg)


@pytest.mark.full
def test_capacity_prediction_ignores_imbalance():
    predicted = [of_experts(imbalance, "moe.capacity=1.5") for imbalance in (1.0, 2.0)]
    assert predicted[0] == predicted[1]


@pytest.mark.full
def test_imbalance_delays_all_ranks():
    even, uneven = of_experts(), of_experts(imbalance=1.5)
    assert uneven.waterfall["exposed ep"] == pytest.approx(1.5 * even.waterfall["exposed ep"], rel=0.02)
    grown = uneven.waterfall["matmul at peak"] / even.waterfall["matmul at peak"]
    assert 1.1 < grown < 1.5, "attention's and the head's matmuls stay"
    assert uneven.memory_bytes > even.memory_bytes
    alone = [of_experts(times, "mesh.ep=1").step_time_s for times in (1.0, 1.5)]
    assert alone[1] == pytest.approx(alone[0], rel=1e-3), "all rows of a rank are its own"


def test_grouped_matmul_of_few_rows_wastes_tiles():
    """The same work in more groups takes longer, by half a tile of rows each."""
    prices = Prices(H100, Rates(kernel_s=0), MeshSpec.of(configured("", 1).mesh))
    seconds = lambda groups: prices.kernel(
        Kernel("matmul", 10**12, 0, "bf16", (groups, 8192 // groups, 4096, 4096), "_grouped_mm")
    )
    assert seconds(64) / seconds(1) == pytest.approx((1 + 64 / 128) / (1 + 64 / 8192))


def test_expert_exchange_between_hosts_costs_more():
    within = of_experts().waterfall["exposed ep"]
    across = Predictor(replace(H100, gpus_per_node=4)).predict(configured(LARGE, 8)).waterfall["exposed ep"]
    assert across > 3 * within > 0
