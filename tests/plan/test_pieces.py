"""The pieces along a rank's program against the dry run of the whole step, and what they say of single instructions."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate

import pytest
import torch
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.profiler import ProfilerActivity, profile

from ndtrain.config import Config, ConfigError, load_config, resolve
from ndtrain.engine.train_step import TrainingStep
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.parallel.build import build_stages, initialise
from ndtrain.plan import step
from ndtrain.plan.dry import dry_run
from ndtrain.plan.events import Collective, Kernel, Piece, Wait
from ndtrain.plan.pieces import record_pieces, update_bytes
from ndtrain.plan.step import RankRecord
from ndtrain.plan.world import pretended_world
from ndtrain.program.ops import Run
from ndtrain.program.passes import Variant, expand, line_up, variants
from tests.lib.parity import make_batches

SHAPE = [
    "recipe=llama_debug", "model.vocab_size=101", "model.hidden_size=64", "model.intermediate_size=96",
    "model.num_hidden_layers=5", "model.num_attention_heads=8", "model.num_key_value_heads=4", "train.seq_len=32",
    "train.loss_chunk=20", "train.global_batch=8", "train.micro_batch=1", "train.compile=false",
]  # fmt: skip
OUTSIDE = ("start-up", "gradient sums", "norm and update")  # what a step does before and after its instructions
OPS = {"shift": "send_recv"}
CONSTANTS = 4096  # bytes of numbers and tables that a step makes once
JOINED = 4  # parts of the residual stream, that a rank which joins its layers frees earlier

EXPERTS = (
    "model.model_type=qwen3_moe model.num_experts=8 model.num_experts_per_tok=2 model.moe_intermediate_size=48 "
    "precision.compute=bf16"
)
LATENT = (
    "model.model_type=deepseek_v3 model.num_key_value_heads=8 model.kv_lora_rank=16 model.q_lora_rank=null "
    "model.qk_nope_head_dim=8 model.qk_rope_head_dim=4 model.v_head_dim=8 model.first_k_dense_replace=1 "
    "model.num_experts=8 model.num_experts_per_tok=2 model.moe_intermediate_size=48 model.n_shared_experts=1 "
    "model.n_group=1 model.topk_group=1"
)
DEFAULT = ["mesh.tp=2 recompute=selective", f"{EXPERTS} mesh.fsdp=4 mesh.ep=2"]
FULL = [
    "mesh.cp=2 mesh.fsdp=2",
    "mesh.pp=2 schedule=zb_v precision.compute=bf16", "mesh.fsdp=2 train.compile=true precision.compute=bf16",
    "mesh.tp=2 mesh.fsdp=2 train.compile=true recompute=full",
    "", "recompute=full", "recompute=selective", "recompute=every recompute.every=2",
    "recompute=every recompute.every=4", "model.tie_word_embeddings=true", "precision.compute=fp8",
    "model.sliding_window=8 model.model_type=mistral", "data.pack=true", "mesh.tp=2 tp.sequence_parallel=false",
    "mesh.tp=4 tp.overlap=true precision.compute=bf16", "mesh.tp=4 recompute=full",
    "mesh.tp=8 mesh.fsdp=2 mesh.zero=1",
    "mesh.tp=2 layout.rules.vocab=null",
    "mesh.cp=4 mesh.fsdp=2 cp.ulysses=2 recompute=full", "mesh.cp=2 mesh.fsdp=2 cp.kind=ulysses recompute=selective",
    "mesh.cp=4 mesh.fsdp=2 cp.balance=none", "mesh.pp=2 schedule=zb_v mesh.tp=2", "mesh.pp=2 schedule=zb_h1",
    "mesh.pp=2 model.tie_word_embeddings=true mesh.fsdp=2 mesh.zero=2",
    EXPERTS, f"{EXPERTS} recompute=full", f"{EXPERTS} model.decoder_sparse_step=2 mesh.pp=2 schedule=zb_h1",
    f"{EXPERTS} mesh.fsdp=4 mesh.cp=2 mesh.ep=4 recompute=full", f"{EXPERTS} model.mlp_only_layers=[1] mesh.tp=2",
    f"{LATENT} mesh.fsdp=4 mesh.ep=2", f"{LATENT} mesh.tp=2 recompute=full",
    f"{EXPERTS} mesh.fsdp=4 mesh.ep=2 moe.overlap=true recompute=full",
    f"{EXPERTS} mesh.fsdp=4 mesh.ep=2 moe.overlap=true moe.capacity=1.5",
    f"{EXPERTS} mesh.fsdp=4 mesh.tp=2 mesh.ep=2 layout.rules.expert_mlp=tp",
    "mesh.pp=2 schedule=dualpipe_v mesh.tp=2 recompute=full", "mesh.pp=2 schedule=interleaved mesh.cp=2 mesh.fsdp=2",
]  # fmt: skip


def config(case: str) -> Config:
    given = [arg.split("=") for arg in case.split() if arg.startswith("mesh.")]
    world = torch.tensor([int(size) for axis, size in given if axis not in ("mesh.zero", "mesh.ep")]).prod().item()
    return resolve(load_config([*SHAPE, *case.split()]), int(world))


def program_of(cfg: Config, rank: int, device: str) -> tuple[list[Run], list[str]]:
    """The passes of a rank, and the kinds of its layers."""
    with pretended_world(rank, MeshSpec.of(cfg.mesh).world_size, device):
        mesh = Mesh(MeshSpec.of(cfg.mesh), rank, torch.device("meta"))
        stages = build_stages(cfg, mesh)
    layers = line_up(stages.segments, stages.placement.last)
    row = stages.placement.schedule.table[mesh.coords["pp"]]
    program = [ins.run for action in expand(row, layers, stages.recompute.groups, 1) for ins in action]
    return program, [layer.kind for layer in layers]


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
        pieces = [recorded.recorded[v] for v in variants(*program_of(cfg, rank, device))]
        of_step, (flops, traffic), (kept, peak) = dry(cfg, rank, device, monkeypatch), totals(pieces), peak_of(pieces)
        at_axis = {(t.axis, OPS.get(t.op, t.op)): t.bytes for t in of_step.traffic if t.axis in ("tp", "cp", "ep")}
        where = f"{case}, {device}, stage {pp}"
        assert flops == of_step.flops and flops["matmul"] > 1e6, where
        assert traffic == at_axis and bool(traffic) == (cfg.mesh.tp * cfg.mesh.cp * cfg.mesh.ep > 1), where
        assert kept == 0, where
        if cfg.mesh.pp * cfg.mesh.fsdp == 1:
            alive = sum(of_step.at_peak.get(kind, 0) for kind in ("activations", "gradients of activations"))
            more = alive - peak - recorded.context_bytes * cfg.microbatches
            assert -JOINED * recorded.boundary_bytes <= more <= CONSTANTS, where


@pytest.mark.parametrize("case", DEFAULT)
def test_pieces_add_up_to_dry_run(case, monkeypatch):
    compare(case, "cuda", monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("case", DEFAULT + FULL)
def test_pieces_add_up_to_dry_run_in_every_mode(case, device, monkeypatch):
    compare(case, device, monkeypatch)


# --------------------------------------------------------------------------------------------- memory of a real step

LARGER = [
    "recipe=llama_debug", "model.vocab_size=101", "model.hidden_size=256", "model.intermediate_size=384",
    "model.num_hidden_layers=4", "model.num_attention_heads=8", "model.num_key_value_heads=4", "train.seq_len=256",
    "train.loss_chunk=64", "train.global_batch=2", "train.micro_batch=1",
]  # fmt: skip


def allocated_by_a_step(cfg: Config) -> int:
    """The most that the CPU's allocator holds during a step beyond what it held before, compiled code included."""
    mesh = Mesh(MeshSpec.of(cfg.mesh), 0, torch.device("cpu"))
    stages = build_stages(cfg, mesh)
    initialise(stages, cfg.run.seed)
    train, batches = TrainingStep(cfg, mesh, stages), make_batches(cfg, mesh, 1, "none")
    for number in (1, 2):
        train.run(number, batches).result.wait("a step")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        train.run(3, batches).result.wait("a step")
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


@contextmanager
def donated_buffers(donated: bool) -> Iterator[None]:
    """Inside, compiled backwards may or may not write over what their forward kept. What was compiled before is not
    used: the keys of the compiler's caches leave the choice out."""
    torch.compiler.reset()
    try:
        with functorch_config.patch(donated_buffer=donated), inductor_config.patch(force_disable_caches=True):
            yield
    finally:
        torch.compiler.reset()


@pytest.mark.full
@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_memory_of_pieces_equals_real_step(recompute, compiled):
    cfg = resolve(load_config([*LARGER, f"train.compile={compiled}", f"recompute={recompute}"]), 1)
    recorded = record_pieces(cfg, "cpu")
    _, peak = peak_of([recorded.recorded[v] for v in variants(*program_of(cfg, 0, "cpu"))])
    with donated_buffers(False):
        allocated = allocated_by_a_step(cfg)
    assert 0 <= allocated - peak <= 64  # a few numbers
    if compiled == "true":
        with donated_buffers(True):
            assert 0 <= allocated - allocated_by_a_step(cfg) <= recorded.boundary_bytes


# ------------------------------------------------------------------------------------------------- single instructions

BF16 = "precision.compute=bf16 train.seq_len=64 train.micro_batch=2"  # 128 tokens
N, E, F = 128, 64, 96


def piece(case: str, kind: str = "F", device: str = "cuda", **variant) -> Piece:
    return record_pieces(config(case), device).recorded[Variant(kind, "block", **variant)]


def kernels(p: Piece, kind: str) -> list[Kernel]:
    return [e for e in p.events if isinstance(e, Kernel) and e.kind == kind]


def test_matmuls_have_their_shapes_and_bytes():
    down = kernels(piece(BF16), "matmul")[-1]
    assert down == Kernel("matmul", 2 * N * E * F, 2 * (N * F + F * E + N * E), "bf16", (1, N, E, F), "mm")
    dx, dw = kernels(piece(BF16, "B"), "matmul")[:2]
    assert (dx.shape, dw.shape) == ((1, N, F, E), (1, E, F, N))
    assert dw.bytes == 2 * (N * E + N * F) + 2 * 4 * E * F  # it adds to the gradient in fp32
    fresh = kernels(piece(f"{BF16} mesh.fsdp=2 mesh.zero=3", "B"), "matmul")[1]
    assert fresh.bytes == dw.bytes - 4 * E * F  # or overwrites it


def test_whole_experts_accumulate_into_their_gradients():
    """With ep=2 over fsdp=2 the ranks reduce and then overwrite the gradients of all else."""
    f, rows = 48, 64  # of each of the four experts of a rank
    for zero in (1, 3):
        case = f"{EXPERTS} train.seq_len=64 train.micro_batch=2 mesh.fsdp=2 mesh.ep=2 mesh.zero={zero}"
        made = kernels(record_pieces(config(case), "cuda").recorded[Variant("B", "sparse")], "matmul")
        of_downs = [k.bytes for k in made if k.shape == (1, E, f, rows)]
        assert of_downs == [2 * rows * (E + f) + 2 * 4 * E * f] * 4


def test_attention_is_one_kernel_with_visible_pairs():
    forward, backward = (kernels(piece(BF16, kind), "attention") for kind in "FB")
    pairs = 2 * 8 * 64 * 65 // 2
    assert [(k.shape, k.flops) for k in forward] == [((2, 8, 64, 64, 8), 4 * 8 * pairs)]
    assert [k.flops for k in backward] == [10 * 8 * pairs]


def test_packed_attention_counts_visible_pairs():
    """On a GPU one kernel computes all documents; on a CPU each is a tile."""
    case = f"{BF16} data.pack=true"
    on_gpu, on_cpu = (kernels(piece(case, device=device), "attention") for device in ("cuda", "cpu"))
    assert len(on_gpu) == 1 and len(on_cpu) == 4
    assert on_gpu[0].flops == sum(k.flops for k in on_cpu)


def test_sliding_window_reduces_attention_flops():
    window = kernels(piece(f"{BF16} model.sliding_window=16 model.model_type=mistral"), "attention")
    assert [k.flops for k in window] == [4 * 8 * 2 * 8 * (16 * 17 // 2 + 48 * 16)]


def test_overlapped_collectives_span_matmuls():
    events = piece("mesh.tp=4 tp.overlap=true").events
    launched = {e.work: i for i, e in enumerate(events) if isinstance(e, Collective)}
    waited = {e.work: i for i, e in enumerate(events) if isinstance(e, Wait)}
    assert len(launched) == 4 * 3 and launched.keys() == waited.keys()
    between = [events[launched[work] : waited[work]] for work in launched]
    assert all(any(isinstance(e, Kernel) and e.kind == "matmul" for e in meanwhile) for meanwhile in between)


def test_recompute_piece_skips_saved_ops():
    saved = frozenset({"core", "gate_up_proj"})
    case = f"{BF16} recompute=selective recompute.keep=[core,gate_up_proj]"
    shape_only = frozenset({"down_proj"})
    first = piece(case, save=saved, shape_only=shape_only)
    again = piece(case, save=saved, shape_only=shape_only, recompute=True)
    assert len(kernels(first, "matmul")) == 5 and len(kernels(again, "matmul")) == 3  # q and k are one, gate and up too
    assert kernels(first, "attention") and not kernels(again, "attention")


def test_split_backward_pieces_do_same_work():
    whole, *halves = (piece("mesh.pp=2 schedule=zb_v", kind) for kind in "BIW")
    assert totals([whole])[0] == totals(halves)[0]
    assert halves[0].kept_bytes > whole.kept_bytes == sum(p.kept_bytes for p in halves)


def test_compiled_piece_fuses_and_recomputes_cheap_results():
    eager, compiled = (piece(f"{BF16} mesh.tp=2 train.compile={on}") for on in ("false", "true"))
    assert [e for e in compiled.events if not isinstance(e, Kernel) or e.kind != "memory"] == [
        e for e in eager.events if not isinstance(e, Kernel) or e.kind != "memory"
    ]
    assert len(kernels(compiled, "memory")) < len(kernels(eager, "memory")) / 2
    assert sum(k.bytes for k in kernels(compiled, "memory")) < sum(k.bytes for k in kernels(eager, "memory")) / 2
    assert eager.kept_bytes - compiled.kept_bytes == 2 * N * F // 2  # silu(gate)


def test_pieces_are_shared_across_ranks_and_layers(monkeypatch):
    cases = [
        "mesh.tp=2", "mesh.tp=2 model.num_hidden_layers=9", "mesh.tp=2 mesh.dp=4", "mesh.tp=2 train.global_batch=16",
        "mesh.tp=2 mesh.pp=2 mesh.fsdp=2", "mesh.tp=2 optim.lr=1",
    ]  # fmt: skip
    pieces = [record_pieces(config(case), "cpu") for case in cases]
    assert all(p is pieces[0] for p in pieces)
    for case in ("mesh.tp=2 train.seq_len=64", "mesh.tp=2 recompute=full", "mesh.tp=2 mesh.fsdp=2"):
        assert record_pieces(config(case), "cpu") is not pieces[0]


def test_record_pieces_refuses_unsupported_settings():
    with pytest.raises(ConfigError, match=r"^recompute=budget: "):
        record_pieces(config("recompute=budget recompute.budget=1GB"), "cpu")
    with pytest.raises(ConfigError, match=r"hardware.attention=math"):
        record_pieces(config("model.alibi=true"), "cuda")
    assert record_pieces(config("model.alibi=true"), "cpu").recorded[Variant("F", "block")].events


def test_update_bytes_equal_hand_count():
    assert update_bytes(config("")) == 4 + 3 * 8
    assert update_bytes(config("optim.state_dtype=bf16 optim.ema=0.9")) == 4 + 8 + 2 * 4 + 8
