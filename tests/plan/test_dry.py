"""A dry run against the real step on gloo ranks: state, peak, FLOPs, collectives and checkpoint are equal."""

import time
from collections.abc import Callable
from dataclasses import asdict
from unittest import mock

import pytest
import torch

from ndtrain.config import load_config, resolve, world_from_env
from ndtrain.mesh.collectives import Pending
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.model.families import moe
from ndtrain.model.moe.router import Routing
from ndtrain.parallel.build import initialise
from ndtrain.plan.dry import dry_run
from ndtrain.plan.step import RankRecord, record_step
from tests.lib.parity import make_batches
from tests.lib.ranks import run_ranks

SHAPE = [
    "recipe=llama_debug", "model.vocab_size=101", "model.hidden_size=64", "model.intermediate_size=88",
    "model.num_hidden_layers=5", "model.num_attention_heads=8", "model.num_key_value_heads=4", "train.seq_len=32",
    "train.loss_chunk=20", "train.global_batch=8", "train.micro_batch=1", "optim.clip=0.5",
]  # fmt: skip
EXPERTS = (
    "model.model_type=qwen2_moe model.num_experts=6 model.num_experts_per_tok=2 model.moe_intermediate_size=16 "
    "model.shared_expert_intermediate_size=24 model.mlp_only_layers=[1]"
)
LATENT = (
    "model.model_type=deepseek_v3 model.num_key_value_heads=8 model.num_experts=6 model.num_experts_per_tok=2 "
    "model.moe_intermediate_size=16 model.n_shared_experts=1 model.first_k_dense_replace=2 model.q_lora_rank=24 "
    "model.kv_lora_rank=16 model.qk_nope_head_dim=8 model.qk_rope_head_dim=4 model.v_head_dim=6"
)
CONSTANTS = 8  # bytes of constants that a process makes once, in whichever of its steps comes first
SETTLE_S = 0.02  # gloo's thread lets go of what an all-reduce has summed only some time after its end

DEFAULT = {
    2: ["mesh.fsdp=2 recompute=selective", "mesh.pp=2 schedule=zb_v"],
}
FULL = {
    1: [
        "", "recompute=full", "recompute=selective", "recompute=every recompute.every=2",
        "recompute=budget recompute.budget=300000", "precision.compute=bf16", "precision.compute=bf16 mesh.zero=1",
        "precision.params=fp64 precision.compute=fp64", "precision.compute=fp8 model.intermediate_size=96",
        "optim.state_dtype=bf16",
        "optim.ema=0.9", "optim.offload=true", "optim.offload=true precision.compute=bf16", "optim.clip=null",
        "model.tie_word_embeddings=true", "model.attn_logit_softcapping=30",
        "model.sliding_window=8 model.model_type=mistral",
        "model.alibi=true",
    ],
    2: [
        "mesh.tp=2 tp.overlap=true", "mesh.cp=2",
        "mesh.dp=2", "mesh.fsdp=2 mesh.zero=1", "mesh.fsdp=2 mesh.zero=2", "mesh.fsdp=2 mesh.zero=3",
        "mesh.fsdp=2 precision.compute=bf16 recompute=full", "mesh.fsdp=2 optim.offload=true",
        "mesh.fsdp=2 mesh.zero=1 optim.offload=true precision.compute=bf16", "mesh.fsdp=2 optim.state_dtype=bf16",
        "mesh.fsdp=2 recompute=budget recompute.budget=1500000", "mesh.tp=2", "mesh.tp=2 tp.sequence_parallel=false",
        "mesh.tp=2 recompute=full", "mesh.tp=2 precision.compute=bf16", "mesh.tp=2 layout.rules.vocab=null",
        "mesh.cp=2 cp.kind=ulysses", "mesh.cp=2 recompute=selective", "mesh.cp=2 cp.balance=striped",
        "mesh.pp=2 schedule=gpipe", "mesh.pp=2 schedule=1f1b recompute=full", "mesh.pp=2 schedule=interleaved",
        "mesh.pp=2 schedule=zb_h1", "mesh.pp=2 schedule=dualpipe_v", "mesh.pp=2 model.tie_word_embeddings=true",
        f"mesh.fsdp=2 {EXPERTS}", f"mesh.tp=2 {EXPERTS}", f"mesh.pp=2 schedule=zb_h1 {EXPERTS}",
        "optim=muon mesh.fsdp=2", "optim=muon mesh.dp=2 optim.ns=gram optim.normalize=neurons",
        f"optim=muon mesh.tp=2 {EXPERTS}",
        f"mesh.fsdp=2 {LATENT}", f"mesh.tp=2 {LATENT}", f"mesh.cp=2 cp.kind=ulysses recompute=selective {LATENT}",
    ],
    4: [
        "mesh.cp=4", "mesh.cp=4 cp.ulysses=2", "mesh.tp=4 tp.overlap=true", "mesh.tp=2 mesh.fsdp=2 recompute=selective",
        "mesh.pp=4 schedule=1f1b", "mesh.dp=2 mesh.fsdp=2",
    ],
    8: [
        "mesh.pp=2 mesh.fsdp=2 mesh.tp=2 mesh.zero=3 recompute=selective",
        "mesh.pp=2 mesh.cp=2 mesh.tp=2 precision.compute=bf16", "mesh.tp=8", "mesh.dp=2 mesh.fsdp=2 mesh.cp=2",
    ],
}  # fmt: skip


def _wait_and_settle(self: Pending, wait=Pending.wait) -> None:
    sums = self._record is not None and self._record.op == "all_reduce"
    wait(self)
    time.sleep(SETTLE_S * sums)


@mock.patch.object(Pending, "wait", _wait_and_settle)
def _real(cases: list[str]) -> list[RankRecord]:
    """On one rank: the record of each case on tensors with memory."""
    rank, _, world = world_from_env()
    records = []
    for case in cases:
        cfg = resolve(load_config([*SHAPE, *case.split()]), world)
        mesh = Mesh(MeshSpec.of(cfg.mesh), rank, torch.device("cpu"))
        fill = lambda stages, cfg=cfg: initialise(stages, cfg.run.seed)
        step = record_step(cfg, mesh, make_batches(cfg, mesh, 1, "none"), separate_host=False, fill=fill)
        records.append(step.record)
    return records


def _differences(case: str, dry: RankRecord, real: RankRecord) -> dict[str, tuple]:
    """Field -> (dry, real) where they differ."""
    a, b = asdict(dry), asdict(real)
    off = {k: (a[k], b[k]) for k in ("state", "flops", "traffic", "checkpoint") if a[k] != b[k]}
    kinds = {k: (a["at_peak"].get(k, 0), b["at_peak"].get(k, 0)) for k in {*a["at_peak"], *b["at_peak"]}}
    off |= {f"at_peak: {k}": pair for k, pair in kinds.items() if abs(pair[0] - pair[1]) > CONSTANTS}
    if abs(dry.peak_bytes - real.peak_bytes) > CONSTANTS:
        off["peak_bytes"] = dry.peak_bytes, real.peak_bytes
    return off


def _compare(ranks: int, cases: list[str], real: Callable = _real) -> None:
    by_rank = run_ranks(real, ranks, cases, timeout=300)
    for i, case in enumerate(cases):
        cfg = resolve(load_config([*SHAPE, *case.split()]), ranks)
        for rank, records in enumerate(by_rank):
            dry = dry_run(cfg, rank, "cpu")
            off = _differences(case, dry, records[i])
            assert not off, f"{case}, rank {rank} of {ranks}: (dry, real) {off}"
            assert dry.flops["matmul"] > 1e6 and dry.peak_bytes > sum(dry.state.values()) > 0


@pytest.mark.parametrize("ranks", DEFAULT)
def test_dry_run_equals_real_step(ranks):
    _compare(ranks, DEFAULT[ranks])


@pytest.mark.full
@pytest.mark.parametrize("ranks", FULL)
def test_dry_run_equals_real_step_in_every_mode(ranks):
    _compare(ranks, FULL[ranks])


def evenly(logits_NX: torch.Tensor, k: int, renormalise: bool, bias_X: torch.Tensor) -> Routing:
    """The tokens take the experts in turn, as a dry run assumes."""
    tokens, experts = logits_NX.shape
    experts_NK = (torch.arange(tokens * k, device=logits_NX.device) % experts).view(tokens, k)
    return Routing(logits_NX.softmax(-1).gather(1, experts_NK), experts_NK)


def _even(cases: list[str]) -> list[RankRecord]:
    with mock.patch.object(moe, "softmax_top_k", evenly):
        return _real(cases)


SHARED_EXPERTS = {
    2: ["mesh.fsdp=2 mesh.ep=2 recompute=full", "mesh.dp=2 mesh.ep=2"],
    4: ["mesh.fsdp=4 mesh.ep=2 mesh.zero=2", "mesh.pp=2 mesh.dp=2 mesh.ep=2 schedule=zb_h1"],
}


@pytest.mark.full
@pytest.mark.parametrize("ranks", SHARED_EXPERTS)
def test_dry_run_with_ep_equals_real_step(ranks):
    """The rows are spread evenly."""
    _compare(ranks, [f"{case} {EXPERTS} model.num_experts=8" for case in SHARED_EXPERTS[ranks]], _even)


def test_dry_run_covers_at_least_40_cases():
    assert sum(map(len, [*DEFAULT.values(), *FULL.values()])) >= 40
