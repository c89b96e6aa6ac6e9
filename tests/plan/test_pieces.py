"""The pieces along a rank's program against the dry run of the whole step, and what they say of single instructions."""

from collections import Counter

import pytest
import torch

from ndtrain.config import Config, load_config, resolve
from ndtrain.distributed.mesh import Mesh, MeshSpec
from ndtrain.engine.instructions import Instruction, expand, line_up
from ndtrain.parallel.build import build_stages
from ndtrain.plan import step
from ndtrain.plan.dry import dry_run
from ndtrain.plan.events import Collective, Kernel, Piece
from ndtrain.plan.pieces import kind_of_unit, record_pieces
from ndtrain.plan.step import RankRecord
from ndtrain.plan.world import pretended_world

SHAPE = [
    "recipe=llama_debug", "model.vocab_size=101", "model.hidden_size=64", "model.intermediate_size=96",
    "model.num_hidden_layers=5", "model.num_attention_heads=8", "model.num_key_value_heads=4", "train.seq_len=32",
    "train.loss_chunk=20", "train.global_batch=8", "train.micro_batch=1", "train.compile=false",
]  # fmt: skip
OUTSIDE = ("start-up", "gradient sums", "norm and update")  # what a step does before and after its instructions
OPS = {"shift": "send_recv"}
CONSTANTS = 4096  # bytes of numbers and tables that a step makes once
JOINED = 4  # parts of the residual stream, that a rank which joins its layers frees earlier

DEFAULT = ["mesh.tp=2 recompute=selective", "mesh.cp=2 mesh.fsdp=2", "mesh.pp=2 schedule=zb_v precision.compute=bf16"]
FULL = [
    "", "recompute=full", "recompute=selective", "recompute=every recompute.every=2",
    "recompute=every recompute.every=4", "model.tie_word_embeddings=true", "precision.compute=fp8",
    "model.sliding_window=8 model.model_type=mistral", "data.pack=true", "mesh.tp=2 tp.sequence_parallel=false",
    "mesh.tp=4 tp.overlap=true precision.compute=bf16", "mesh.tp=4 recompute=full", "mesh.tp=8 mesh.fsdp=2 mesh.zero=1", "mesh.tp=2 layout.rules.vocab=null",
    "mesh.cp=4 mesh.fsdp=2 cp.ulysses=2 recompute=full", "mesh.cp=2 mesh.fsdp=2 cp.kind=ulysses recompute=selective",
    "mesh.cp=4 mesh.fsdp=2 cp.balance=none", "mesh.pp=2 schedule=zb_v mesh.tp=2", "mesh.pp=2 schedule=zb_h1",
    "mesh.pp=2 model.tie_word_embeddings=true mesh.fsdp=2 mesh.zero=2",
    "mesh.pp=2 schedule=dualpipe_v mesh.tp=2 recompute=full", "mesh.pp=2 schedule=interleaved mesh.cp=2 mesh.fsdp=2",
]  # fmt: skip


def config(case: str) -> Config:
    given = [arg.split("=") for arg in case.split() if arg.startswith("mesh.")]
    world = torch.tensor([int(size) for axis, size in given if axis != "mesh.zero"]).prod().item()
    return resolve(load_config([*SHAPE, *case.split()]), int(world))


def program_of(cfg: Config, rank: int, device: str) -> tuple[list[Instruction], list[str]]:
    """The instructions of a rank, and the kinds of its layers."""
    with pretended_world(rank, MeshSpec.of(cfg.mesh).world_size, device):
        mesh = Mesh(MeshSpec.of(cfg.mesh), rank, torch.device("meta"))
        stages = build_stages(cfg, mesh)
    layers = line_up(stages.segments, stages.placement.last)
    row = stages.placement.schedule.table[mesh.coords["pp"]]
    program = [ins for action in expand(row, layers, stages.recompute.groups, 1) for ins in action]
    return program, [kind_of_unit(layer.units[0], layer.loss) for layer in layers]


def totals(pieces: list[Piece]) -> tuple[dict[str, int], dict[tuple[str, str], int]]:
    """FLOPs by kind, and bytes by axis and operation."""
    flops, traffic = Counter(), Counter()
    for event in (e for p in pieces for e in p.events):
        if isinstance(event, Kernel) and event.kind != "memory":
            flops[event.kind] += event.flops
        if isinstance(event, Collective):
            traffic[event.axis, event.op] += event.bytes
    return dict(flops), dict(traffic)


def peak_of(pieces: list[Piece]) -> tuple[int, int]:
    """(what is kept at the end, the most that is alive)"""
    now = peak = 0
    for p in pieces:
        peak = max(peak, now + p.peak_bytes)
        now += p.kept_bytes
    return now, peak


def dry(cfg: Config, rank: int, device: str, monkeypatch) -> RankRecord:
    """The dry run, whose traffic is that of its instructions alone."""
    whole = step.traffic_of
    with monkeypatch.context() as patch:
        patch.setattr(step, "traffic_of", lambda records: whole([r for r in records if r.action not in OUTSIDE]))
        return dry_run(cfg, rank, device)


def compare(case: str, device: str, monkeypatch) -> None:
    cfg = config(case)
    spec, recorded = MeshSpec.of(cfg.mesh), record_pieces(cfg, device)
    for pp in range(cfg.mesh.pp):
        rank = spec.rank({"pp": pp, "dp": 0, "fsdp": 0, "cp": cfg.mesh.cp - 1, "tp": 0})
        pieces = list(recorded.along(*program_of(cfg, rank, device)))
        of_step, (flops, traffic), (kept, peak) = dry(cfg, rank, device, monkeypatch), totals(pieces), peak_of(pieces)
        at_axis = {(t.axis, OPS.get(t.op, t.op)): t.bytes for t in of_step.traffic if t.axis in ("tp", "cp")}
        where = f"{case}, {device}, stage {pp}"
        assert flops == of_step.flops and flops["matmul"] > 1e6, where
        assert traffic == at_axis and bool(traffic) == (cfg.mesh.tp * cfg.mesh.cp > 1), where
        assert kept == 0, where
        if cfg.mesh.pp * cfg.mesh.fsdp == 1:
            alive = sum(of_step.at_peak.get(kind, 0) for kind in ("activations", "gradients of activations"))
            more = alive - peak - recorded.context_bytes * cfg.microbatches
            assert -JOINED * recorded.boundary_bytes <= more <= CONSTANTS, where


@pytest.mark.parametrize("case", DEFAULT)
def test_pieces_add_up_to_the_step(case, monkeypatch):
    compare(case, "cuda", monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("case", DEFAULT + FULL)
def test_pieces_add_up_to_the_step_in_every_mode(case, device, monkeypatch):
    compare(case, device, monkeypatch)
