"""Predictions of real programs: memory against the dry run, the waterfall, the command, and published runs."""

import json

import pytest

from ndtrain.config import Config, load_config, resolve
from ndtrain.distributed.mesh import MeshSpec
from ndtrain.model.flops import flops_per_token
from ndtrain.plan.__main__ import main
from ndtrain.plan.dry import dry_run
from ndtrain.plan.hardware import load_hardware
from ndtrain.plan.memory import peak_bytes, state_bytes
from ndtrain.plan.predict import Predictor, plan_step

H100 = load_hardware("h100")
SHAPE = ["recipe=llama_debug", "train.global_batch=16", "train.micro_batch=2", "precision.compute=bf16"]


def configured(overrides: str, ranks: int) -> Config:
    return resolve(load_config([*SHAPE, *overrides.split()]), ranks)


# --------------------------------------------------------------------------------------------------------------- memory

MEMORY = {
    "mesh.fsdp=2 mesh.zero=3 recompute=selective": 2,
    "mesh.pp=2 mesh.fsdp=2 mesh.zero=2 schedule=zb_h1": 4,
}
MORE_MEMORY = {
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
}


@pytest.mark.parametrize(
    ("mesh", "ranks"), [*MEMORY.items(), *(pytest.param(*c, marks=pytest.mark.full) for c in MORE_MEMORY.items())]
)
def test_state_is_that_of_the_dry_run_and_the_peak_within_a_hundredth(mesh, ranks):
    cfg = configured(f"train.compile=false {mesh}", ranks)
    plan, spec = plan_step(cfg, "cuda"), MeshSpec.of(cfg.mesh)
    for pp, own in enumerate(plan.program.ranks):
        dry = dry_run(cfg, spec.rank(dict.fromkeys(spec.order, 0) | {"pp": pp}), "cuda")
        assert sum(state_bytes(plan.program.units[u], plan.program, plan.sizes) for u in own.units) == sum(
            dry.state.values()
        )
        peak = peak_bytes(plan.program, own, plan.pieces, plan.sizes)
        assert peak == pytest.approx(dry.peak_bytes, rel=0.01)


# ------------------------------------------------------------------------------------------------------- the prediction


def test_the_waterfall_sums_to_the_step_and_has_no_negative_part():
    cfg = configured("mesh.pp=2 mesh.dp=2 mesh.fsdp=2 mesh.cp=2 mesh.tp=2 recompute=full", 32)
    p = Predictor(H100).predict(cfg)
    assert sum(p.waterfall.values()) == pytest.approx(p.step_time_s, rel=1e-9)
    assert min(p.waterfall.values()) >= -1e-12
    assert all(p.waterfall[f"exposed {axis}"] > 0 for axis in ("pp", "dp", "fsdp", "cp", "tp"))
    assert p.waterfall["recompute"] > 0 and p.waterfall["bubble"] > 0 and p.hfu > p.mfu


def test_mfu_is_what_a_run_logs():
    cfg = configured("mesh.fsdp=2", 2)
    p = Predictor(H100).predict(cfg, explain=False)
    t = cfg.train
    assert p.waterfall == {} and p.tokens_per_s == pytest.approx(t.global_batch * t.seq_len / p.step_time_s)
    assert p.tokens_per_s_per_device == pytest.approx(p.tokens_per_s / 2)
    assert p.mfu == pytest.approx(p.tokens_per_s_per_device * flops_per_token(cfg.model, t.seq_len) / 989.5e12)
    assert p.hfu == pytest.approx(p.mfu)


def test_the_command(tmp_path, capsys):
    run = ["recipe=llama3_8b", "hardware=h100", "nodes=1", "mesh.fsdp=8"]
    assert main(["predict", *run, f"json={tmp_path}/prediction.json", f"svg={tmp_path}/step.svg"]) == 0
    out = capsys.readouterr().out
    assert "8 ranks of h100: fsdp=8, zero=3, 16 microbatches" in out and "where the step goes" in out
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
    "no rates": (["hardware=cpu", "ranks=1"], "hardware=cpu: memory_gb_s is not listed"),
    "mesh": (["hardware=h100", "nodes=1", "mesh.tp=3"], "mesh tp=3 needs 3 ranks but 8 started"),
    "offload": (["hardware=h100", "ranks=1", "optim.offload=true"], "optim.offload=true: a prediction needs"),
    "budget": (
        ["hardware=h100", "ranks=1", "recompute=budget", "recompute.budget=1GiB"],
        "recompute=budget:",
    ),
    "experts": (["recipe=moe_debug", "hardware=h100", "ranks=1"], "model.num_experts=8: the time of a mixture"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(name, capsys):
    args, text = MISTAKES[name]
    recipe = [] if args[0].startswith("recipe=") else ["recipe=llama_debug"]
    assert main(["predict", *recipe, *args]) == 2
    err = capsys.readouterr().err
    assert text in err and err.startswith("error: ") and err.count("\n") == 1
