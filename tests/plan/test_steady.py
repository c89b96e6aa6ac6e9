"""A dry run of many microbatches: counted from two short steps, it equals the step that runs them all."""

from dataclasses import asdict

import pytest

from ndtrain.config import Config, load_config, resolve
from ndtrain.mesh.mesh import MeshSpec
from ndtrain.plan import dry, steady

SHAPE = [
    "recipe=llama_debug", "model.vocab_size=101", "model.hidden_size=32", "model.intermediate_size=48",
    "model.num_hidden_layers=8", "train.seq_len=32", "train.loss_chunk=20", "train.micro_batch=1",
    "train.compile=false",
]  # fmt: skip
EXPERTS = (
    "model.model_type=qwen3_moe model.num_experts=4 model.num_experts_per_tok=2 model.moe_intermediate_size=16 "
    "model.mlp_only_layers=[1]"
)
DEFAULT = ["mesh.fsdp=2 mesh.zero=3 model.num_hidden_layers=4 microbatches=12"]
FULL = [
    "mesh.pp=2 schedule=gpipe microbatches=21",
    "microbatches=10", "mesh.dp=2 microbatches=40", "mesh.fsdp=2 mesh.zero=1 microbatches=17",
    "mesh.fsdp=2 mesh.zero=2 recompute=full microbatches=17", "mesh.fsdp=2 recompute=selective microbatches=17",
    "mesh.fsdp=2 data.pack=true microbatches=12", "schedule=gpipe microbatches=30",
    "mesh.fsdp=2 optim.offload=true precision.compute=bf16 microbatches=12",
    "mesh.tp=2 tp.overlap=true microbatches=12", "mesh.cp=2 microbatches=12",
    "mesh.pp=2 schedule=1f1b microbatches=19", "mesh.pp=4 schedule=1f1b mesh.zero=3 mesh.fsdp=2 microbatches=40",
    "mesh.pp=4 schedule=gpipe microbatches=40", "mesh.pp=4 schedule=gpipe recompute=full mesh.fsdp=2 microbatches=70",
    "mesh.pp=2 schedule=interleaved microbatches=26", "mesh.pp=2 schedule=interleaved microbatches=27",
    "mesh.pp=4 schedule=interleaved microbatches=52", "mesh.pp=4 schedule=interleaved microbatches=71",
    "mesh.pp=2 schedule=interleaved schedule.chunks=4 mesh.fsdp=2 mesh.zero=2 microbatches=34",
    "mesh.pp=4 schedule=zb_h1 microbatches=40", "mesh.pp=4 schedule=zb_h1 mesh.fsdp=2 mesh.zero=2 microbatches=41",
    "mesh.pp=4 schedule=zb_v microbatches=40", "mesh.pp=2 schedule=zb_v mesh.fsdp=2 mesh.zero=3 microbatches=23",
    "mesh.pp=4 schedule=dualpipe_v microbatches=40", "mesh.pp=4 schedule=dualpipe_v recompute=full microbatches=47",
    f"mesh.fsdp=2 mesh.ep=2 {EXPERTS} microbatches=12", f"mesh.pp=2 {EXPERTS} moe.balance=hf microbatches=20",
]  # fmt: skip


def config(case: str) -> Config:
    """The run of a case; `microbatches=` sets the global batch."""
    words = [*SHAPE, *case.split()]
    (count,) = [int(w.partition("=")[2]) for w in words if w.startswith("microbatches=")]
    words = [w for w in words if not w.startswith("microbatches=")]
    size = lambda axis: int(next((w.partition("=")[2] for w in words if w.startswith(f"mesh.{axis}=")), 1))
    world = size("pp") * size("dp") * size("fsdp") * size("cp") * size("tp")
    return resolve(load_config([*words, f"train.global_batch={count * size('dp') * size('fsdp')}"]), world)


def compare(case: str, device: str) -> None:
    cfg = config(case)
    spec = MeshSpec.of(cfg.mesh)
    for pp in range(spec.size("pp")):
        rank = spec.rank(dict.fromkeys(spec.order, 0) | {"pp": pp})
        assert steady.sample_of(cfg) is not None, "all microbatches would run anyway"
        counted, walked = dry.dry_run(cfg, rank, device), dry.walk(cfg, rank, device).record
        a, b = (asdict(record) | {"seconds": 0} for record in (counted, walked))
        off = {key: (a[key], b[key]) for key in a if a[key] != b[key]}
        assert not off, f"{case}, {device}, rank {rank}: (counted, walked) {off}"
        assert walked.flops["matmul"] > 1e6


@pytest.mark.parametrize("case", DEFAULT)
def test_extrapolated_dry_run_equals_full_run(case):
    compare(case, "cuda")


@pytest.mark.full
@pytest.mark.parametrize("case", FULL)
def test_extrapolated_dry_run_equals_full_run_in_every_mode(case):
    compare(case, "cuda")


@pytest.mark.full
@pytest.mark.parametrize("case", FULL[2::5])
def test_extrapolated_dry_run_equals_full_run_on_cpu(case):
    compare(case, "cpu")


def test_sample_of_runs_constant_number_of_microbatches():
    samples = [steady.sample_of(config(f"mesh.pp=2 microbatches={n}")) for n in (64, 1024)]
    assert [(s.fewer, s.more) for s in samples if s] == [(7, 8)] * 2


def test_sample_of_is_none_if_microbatch_count_matters():
    few = steady.sample_of(config("microbatches=7"))
    budget = steady.sample_of(config("recompute=budget recompute.budget=300000 microbatches=64"))
    assert few is None and budget is None
