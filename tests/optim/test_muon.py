"""Muon on meshes, against one process with `torch.optim.Muon`."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from itertools import product
from math import prod
from pathlib import Path

import pytest
import torch

from ndtrain.config import load_config, resolve, world_from_env
from ndtrain.engine.train_step import TrainingStep
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.model import Transformer, params
from ndtrain.model.init import fill
from ndtrain.model.spec import Role
from ndtrain.model.transformer import names_of
from ndtrain.model.vocabulary import IGNORE
from ndtrain.optim import Muon, Update, WholeTensors, learning_rate
from ndtrain.optim.newton_schulz import flops_of, orthogonalise
from ndtrain.parallel.build import build_stages, initialise
from ndtrain.parallel.grad_stats import GradStats
from ndtrain.program import ops
from ndtrain.program.build import whole_tensors
from tests.lib.helpers import given_process_group
from tests.lib.parity import FP64, Run, assemble, distance, draw_gradients, make_batches, rank_run, rank_state
from tests.lib.ranks import run_ranks

STEPS = 5
MODEL = [
    "model.vocab_size=101", "model.hidden_size=32", "model.intermediate_size=48", "model.num_attention_heads=8",
    "model.num_key_value_heads=2", "model.initializer_range=0.3", "train.seq_len=16", "train.loss_chunk=10",
    "train.global_batch=8", f"train.steps={STEPS}", "optim.lr=1e-2", "optim.adamw_lr=3e-3", "optim.clip=0.5",
    "optim.lr_mult={*.down_proj.weight:4,*norm.weight:2}", "optim.wd_mult={*.q_proj.weight:3}",
]  # fmt: skip
MUON = ["optim=muon", *MODEL, *FP64, "optim.ns_dtype=fp64"]
AXES = ("pp", "dp", "fsdp", "cp", "tp")
KINDS = (("weight", "master"), ("momentum", "momentum_buffer"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq"))


def factorisations(ranks: int) -> list[tuple[int, ...]]:
    sizes = [n for n in (1, 2, 4, 8) if n <= ranks]
    return [f for f in product(sizes, repeat=len(AXES)) if prod(f) == ranks]


def overrides_of(mesh: tuple[int, ...]) -> list[str]:
    """A mesh, with the zero stage, ties and learning-rate rule taking turns, and as many layers as the stages need."""
    turn = sum(i * n for i, n in enumerate(mesh))
    pp, dp, fsdp, *_ = mesh
    tied = turn % 2 == 0
    return [
        *(f"mesh.{axis}={n}" for axis, n in zip(AXES, mesh, strict=True) if n > 1),
        f"mesh.zero={1 + turn % 3}", f"model.tie_word_embeddings={str(tied).lower()}",
        f"model.num_hidden_layers={max(2, pp)}", f"optim.adjust={('match_rms_adamw', 'original')[turn % 2]}",
        f"train.micro_batch={1 if pp > 1 else 8 // (dp * fsdp)}",
    ]  # fmt: skip


def muon_run(overrides: list[str], kinds=KINDS):
    return rank_run(overrides, "uneven", kinds=kinds)


@cache
def reference(overrides: tuple[str, ...]) -> dict[str, dict[str, torch.Tensor]]:
    """Weights and state after the steps of the plain model with autograd, clipping, `torch.optim.Muon` and AdamW. The
    Newton-Schulz iteration of `torch.optim.Muon` runs in fp64."""
    cfg = resolve(load_config([*MUON, *overrides, "train.micro_batch=8"]), 1)
    mesh, o = Mesh(MeshSpec.of(cfg.mesh), 0, torch.device("cpu")), cfg.optim
    model, table = Transformer(cfg.model).double(), params(cfg.model)
    named = dict(model.named_parameters())
    for name, p in named.items():
        fill(p.data.view(-1), cfg.model, cfg.run.seed, table[name], 0)
    hidden = names_of(table, Role.HIDDEN)
    lr_mult = lambda name: 2 if "norm" in name else 4 if "down_proj" in name else 1
    decay = lambda name: o.weight_decay * (0 if named[name].ndim < 2 else 3 if "q_proj" in name else 1)
    of = lambda names: [
        {"params": [named[n]], "factor": lr_mult(n), "weight_decay": decay(n)} for n in named if n in names
    ]
    muon = torch.optim.Muon(of(hidden), lr=o.lr, momentum=o.momentum, ns_steps=5, adjust_lr_fn=o.adjust)
    adamw = torch.optim.AdamW(of(named.keys() - hidden), lr=o.adamw_lr, betas=tuple(o.betas), eps=o.eps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
        for step in range(1, STEPS + 1):
            (batch,) = make_batches(cfg, mesh, step, "uneven")
            loss = model(batch.tokens, batch.labels) / (batch.labels != IGNORE).sum()
            model.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip)
            part = learning_rate(o, step, cfg.train.steps) / o.lr
            for optimizer, peak in ((muon, o.lr), (adamw, o.adamw_lr)):
                for group in optimizer.param_groups:
                    group["lr"] = group["factor"] * part * peak
                optimizer.step()
    state = {"weight": {n: p.data for n, p in named.items()}, "momentum": {}, "exp_avg": {}, "exp_avg_sq": {}}
    for name, p in named.items():
        if name in hidden:
            state["momentum"][name] = muon.state[p]["momentum_buffer"]
        else:
            state["exp_avg"][name], state["exp_avg_sq"][name] = (adamw.state[p][k] for k in ("exp_avg", "exp_avg_sq"))
    return state


def check(got, want: dict[str, dict[str, torch.Tensor]], bound: float = 1e-9) -> None:
    assert set(got.tensors) - {"gradient", "bias"} == set(want)
    for kind, tensors in want.items():
        assert got.tensors[kind].keys() == tensors.keys()
        off = {name: distance(got.tensors[kind][name], tensor) for name, tensor in tensors.items()}
        worst = max(off, key=off.get)
        assert off[worst] <= bound, f"{kind} of {worst} is off by {off[worst]:.2e}"


SAMPLED = ((2, 1, 1, 1, 2),)
MESHES = [
    pytest.param(mesh, marks=() if mesh in SAMPLED else pytest.mark.full, id="x".join(map(str, mesh)))
    for ranks in (1, 2, 4, 8)
    for mesh in factorisations(ranks)
]


@pytest.mark.parametrize("mesh", MESHES)
def test_weights_and_state_equal_torch_muon_in_one_process(mesh):
    """After five steps, on a mesh `pp x dp x fsdp x cp x tp`."""
    overrides = overrides_of(mesh)
    same = tuple(o for o in overrides if o.startswith(("model.", "optim.")))
    got = assemble(run_ranks(muon_run, prod(mesh), [*MUON, *overrides], timeout=300))
    check(got, reference(same))


EXPERTS = [
    "model.model_type=qwen2_moe", "model.num_experts=8", "model.num_experts_per_tok=2",
    "model.moe_intermediate_size=20", "model.mlp_only_layers=[1]", "model.shared_expert_intermediate_size=24",
    "model.num_hidden_layers=3", "moe.balance=none",
]  # fmt: skip
EP_MESHES = {
    "fsdp2 ep2": ["mesh.fsdp=2", "mesh.ep=2"],
    "dp2 cp2 ep4": ["mesh.dp=2", "mesh.cp=2", "mesh.ep=4"],
    "fsdp2 tp2 ep2 slices": ["mesh.fsdp=2", "mesh.tp=2", "mesh.ep=2", "layout.rules.expert_mlp=tp"],
    "dp2 fsdp4 ep2": ["mesh.dp=2", "mesh.fsdp=4", "mesh.ep=2", "mesh.zero=1"],
    "pp2 fsdp2 tp2 ep2": ["mesh.pp=2", "mesh.fsdp=2", "mesh.tp=2", "mesh.ep=2", "mesh.zero=2"],
}


@pytest.mark.parametrize(
    "mesh", [pytest.param(m, marks=[pytest.mark.full] * (m != "fsdp2 tp2 ep2 slices")) for m in EP_MESHES]
)
def test_experts_equal_torch_muon_in_one_process(mesh):
    """Each expert's matrices have one owner among the ranks that share them. Neither routers nor the gate of the shared
    expert are orthogonalised."""
    sizes = EP_MESHES[mesh]
    ranks = prod(
        int(o.partition("=")[2]) for o in sizes if o.startswith("mesh.") and "ep=" not in o and "zero" not in o
    )
    got = assemble(run_ranks(muon_run, ranks, [*MUON, *EXPERTS, *sizes, "train.micro_batch=1"], timeout=300))
    want = reference(tuple(EXPERTS))
    assert sum(".experts." in name for name in want["momentum"]) == 48 and not any(
        "gate.w" in n for n in want["momentum"]
    )
    check(got, want)


def rank_updates(overrides: list[str]):
    """On one rank: three updates, one of them skipped, from gradients that depend on step and element alone."""
    rank, _, world = world_from_env()
    cfg = resolve(load_config(["optim=muon", *MODEL, *overrides]), world)
    mesh = Mesh(MeshSpec.of(cfg.mesh), rank, torch.device("cpu"))
    stages = build_stages(cfg, mesh)
    initialise(stages, cfg.run.seed)
    step = TrainingStep(cfg, mesh, stages)
    kinds = [*KINDS, *[("average", "ema")] * (cfg.optim.ema is not None)]
    for number in (1, 2, 3):
        draw_gradients(stages, number)
        for unit in stages.units.units.values() if number == 2 else ():
            for _, runs in unit.layout.runs(*unit.layout.own):
                for r in runs:
                    unit.grad[r.local_start] = float("nan")
        before, fine = rank_state(stages, kinds), number != 2
        norm = torch.tensor(2.0 if fine else float("nan")).double()
        step.optimizer.begin(number, 1e-2, GradStats(torch.tensor(1.0), norm, torch.tensor(fine)))
        for op in whole_tensors(step.executor.holdings.rounds):
            if isinstance(op, ops.ComputeWhole):
                step.optimizer.compute(op.round)
            step.executor.run_op(op)
        step.optimizer.finish()
        same = [torch.equal(old[-1], new[-1]) for old, new in zip(before, rank_state(stages, kinds), strict=True)]
        assert not any(same) if fine else all(same), "a step that was skipped changes nothing"
    return Run(), rank_state(stages, kinds)


HEADS = ["optim.split=heads"]
UPDATES = {  # the changes apply to one process too, except those of the mesh and offload
    "fsdp2": (2, ["mesh.fsdp=2"]),
    "tp2": (2, ["mesh.tp=2", "optim.ema=0.9"]),
    "dp2 zero1 bf16": (2, ["mesh.dp=2", "mesh.zero=1", "optim.state_dtype=bf16"]),
    "dp2 fsdp2 tp2 bf16": (8, ["mesh.dp=2", "mesh.fsdp=2", "mesh.tp=2", "optim.state_dtype=bf16"]),
    "fsdp2 offload": (2, ["mesh.fsdp=2", "optim.offload=true", "optim.ema=0.9"]),
    "fsdp2 cp2 offload bf16": (4, ["mesh.fsdp=2", "mesh.cp=2", "optim.offload=true", "optim.state_dtype=bf16"]),
    "pp2 gram": (2, ["mesh.pp=2", "optim.ns=gram"]),
    "dp2 tp2 neurons": (4, ["mesh.dp=2", "mesh.tp=2", "optim.normalize=neurons"]),
    "fsdp2 neurons of heads offload": (2, ["mesh.fsdp=2", *HEADS, "optim.normalize=neurons", "optim.offload=true"]),
}


@pytest.mark.parametrize(
    "name", [n if n == "fsdp2 offload" else pytest.param(n, marks=pytest.mark.full) for n in UPDATES]
)
def test_update_is_bitwise_equal_on_any_mesh(name):
    """With bf16 in the iteration, fp32 weights, and momentum in fp32 or rounded to bf16."""
    ranks, overrides = UPDATES[name]
    same = [o for o in overrides if not o.startswith("mesh.") and "offload" not in o]
    one, got = (assemble(run_ranks(rank_updates, n, of)) for n, of in ((1, same), (ranks, overrides)))
    for kind, tensors in one.tensors.items():
        for tensor, expected in tensors.items():
            assert torch.equal(got.tensors[kind][tensor], expected), f"{kind} of {tensor}"


@pytest.mark.parametrize("more", [[], HEADS], ids=["megatron-7117", "deepspeed-8384"])
def test_update_under_tp_is_of_whole_matrices_and_whole_heads(more):
    """In Megatron-LM each tp rank orthogonalised its own part of a matrix, and the update was off by 26 % (#7117). In
    DeepSpeed the heads of a part had half of their rows, and the update was off by 29 % (#8384)."""
    one, got = (assemble(run_ranks(rank_updates, n, [f"mesh.tp={n}", *more])) for n in (1, 4))
    for name, expected in one.tensors["weight"].items():
        assert torch.equal(got.tensors["weight"][name], expected), name


@pytest.mark.parametrize("normalize", ["none", "neurons"])
def test_heads_are_orthogonalised_one_by_one(normalize):
    cfg = load_config(["optim=muon", *HEADS, f"optim.normalize={normalize}", "optim.ns_dtype=fp64"]).optim
    grads = torch.randn(2, 24, 10, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    squares = torch.rand(2, 24, dtype=torch.float64)
    zero, old = torch.zeros(()), squares.clone()
    made = WholeTensors(("a", "b"), grads.clone(), 6, {"row_squares": squares})
    got = Muon(cfg).direction(made, Update(1, zero, 1e-3, zero, None))
    for i, head in product(range(2), range(4)):
        rows = slice(6 * head, 6 * head + 6)
        want = orthogonalise(grads[i, rows][None].clone(), "classic", 5)[0]
        if normalize == "neurons":
            now = 0.95 * old[i, rows] + 0.05 * want.square().mean(1)
            assert torch.allclose(squares[i, rows], now, rtol=1e-6)
            want = want / (now.sqrt() + cfg.eps)[:, None]
            want *= 6**0.5 / want.norm()
        torch.testing.assert_close(got[i, rows], want, rtol=1e-6, atol=1e-8)


SHAPES = ((64, 128), (128, 64), (96, 96))


@pytest.mark.parametrize("shape", SHAPES)
def test_classic_iteration_has_the_bits_of_torch_muon(shape):
    from torch.optim._muon import _zeropower_via_newtonschulz

    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    theirs = _zeropower_via_newtonschulz(x.clone(), (3.4445, -4.7750, 2.0315), 5, 1e-7)
    assert torch.equal(orthogonalise(x.bfloat16()[None], "classic", 5)[0], theirs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("ns", ["classic", "polar_express", "gram"])
@pytest.mark.parametrize("shape", SHAPES)
def test_result_has_singular_vectors_of_the_matrix_and_singular_values_near_one(shape, ns, dtype):
    noise = torch.randn((3, *shape), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    u, _, v = torch.linalg.svd(noise, full_matrices=False)
    x = u * torch.linspace(0.1, 1, min(shape), dtype=torch.float64) @ v
    got = orthogonalise(x.to(dtype), ns, 5 if ns == "classic" else 8).double()
    inner = u.mT @ got @ v.mT
    values = inner.diagonal(dim1=1, dim2=2)
    low, high = (0.3, 1.25) if ns == "classic" else (0.98, 1.02)
    assert low < values.min() and values.max() < high
    off = (inner - torch.diag_embed(values)).abs().max()
    assert off < (1e-12 if dtype == torch.float64 else 0.02)


def test_gram_iteration_computes_the_same_polynomials():
    x = torch.randn((2, 24, 80), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    torch.testing.assert_close(
        orthogonalise(x.clone(), "gram", 5), orthogonalise(x.clone(), "polar_express", 5), rtol=1e-12, atol=1e-13
    )


@pytest.mark.parametrize("ns", ["classic", "polar_express", "gram"])
@pytest.mark.parametrize("shape", [(32, 64), (64, 32), (48, 48)])
@pytest.mark.parametrize("steps", [1, 2, 5, 8])
def test_flops_are_those_of_the_products(ns, shape, steps):
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        orthogonalise(torch.randn(1, *shape), ns, steps)
    assert counter.get_total_flops() == flops_of(ns, steps, shape)


# ------------------------------------------------------------------------------------------------- the whole program


def program(args: list[str]) -> tuple[int, str]:
    """The exit code of a rank, and what it has written."""
    from ndtrain.train import main

    written = io.StringIO()
    with given_process_group(), redirect_stderr(written), redirect_stdout(written):
        return main(args), written.getvalue()


def args_of(folder: Path, *overrides: str) -> list[str]:
    return [
        "recipe=llama_debug", "model.num_attention_heads=4", "model.num_key_value_heads=2", "model.vocab_size=300",
        "model.hidden_size=32", "model.intermediate_size=48", "model.num_hidden_layers=2", "train.steps=8",
        "logger=jsonl", "data.tokenizer=byte", "hardware.device=cpu", "hardware.peak_tflops=0.1", *FP64,
        "optim.warmup=0", f"run.dir={folder}", *overrides,
    ]  # fmt: skip


def ran(ranks: int, args: list[str], code: int = 0) -> str:
    """Runs the program. Returns what rank 0 has written."""
    results = run_ranks(program, ranks, args)
    assert [result for result, _ in results] == [code] * ranks, results
    return results[0][1]


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.full
def test_run_resumes_on_another_mesh(tmp_path):
    """With the state that is sharded, and with the state that the owners of matrices hold."""
    muon = ["optim=muon", "optim.normalize=neurons", "optim.ns_dtype=fp64"]
    one, cut = tmp_path / "one", tmp_path / "cut"
    ran(1, args_of(one, *muon))
    ran(4, args_of(cut, *muon, "mesh.fsdp=2", "mesh.tp=2", "train.stop_at=4"))
    ran(2, args_of(cut, *muon, "mesh.dp=2", "resume=auto"))
    assert losses(cut) == pytest.approx(losses(one), rel=1e-9)


@pytest.mark.full
def test_state_of_another_optimizer_is_refused_or_reset(tmp_path):
    """After a reset the state starts from zero, and bias correction counts from there. A checkpoint that is written
    afterwards has the new state, so a further resume keeps it."""
    first, reset, again = (tmp_path / name for name in ("first", "reset", "again"))
    ran(1, args_of(first, "train.stop_at=4"))
    (path,) = (first / "checkpoints").iterdir()
    to_muon = ["optim=muon", f"resume={path}"]
    refused = ran(1, args_of(reset, *to_muon), code=2)
    assert "has the state of optim=adamw (exp_avg.model.layers.0." in refused and "set optim.reset=true" in refused
    noted = ran(1, args_of(reset, *to_muon, "optim.reset=true", "train.stop_at=6"))
    assert "the state of optim=muon starts from zero" in noted
    ran(1, args_of(reset, "optim=muon", "resume=auto", "train.stop_at=8"))
    ran(1, args_of(again, *to_muon, "optim.reset=true"))
    assert losses(reset) == pytest.approx(losses(again), rel=1e-9)
    body = json.loads((again / "checkpoints" / "step-00000008" / "state.json").read_text())
    assert body["reset_at"] == 4
