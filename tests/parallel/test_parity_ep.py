"""Experts spread over ranks: any ep on any mesh, schedule and recompute mode trains as one process does."""

from functools import partial
from unittest import mock

import pytest

from ndtrain.config import load_config, resolve
from ndtrain.mesh.mesh import Mesh
from ndtrain.model import flops
from ndtrain.parallel.recompute import RecomputeOps, plan_recompute
from ndtrain.plan.dry import dry_run
from tests.lib.helpers import config_refusal
from tests.lib.parity import assemble, compare, rank_run, train
from tests.lib.ranks import run_ranks
from tests.parallel.test_parity_moe import FULL, MODEL, MODELS, SCHEDULES, check, meshes, ranks_of, reference

EIGHT = "model.num_experts=8"
DATA = ("dp", "fsdp", "cp")
DENSE_FIRST = "model.mlp_only_layers=[0]"  # the first of two stages then has no experts


def micro_batch(mesh: dict[str, int]) -> int:
    """One or two microbatches, with pp more."""
    return max(1, 8 // (mesh.get("dp", 1) * mesh.get("fsdp", 1)) // (4 if "pp" in mesh else 2))


def sweep():
    """Every mesh of 2, 4 and 8 ranks with every ep that it has ranks for, the families in turn."""
    plain = [m for n in (2, 4, 8) for m in meshes(n) if m.get("pp", 1) < 4]
    folded = [m | {"ep": ep} for m in plain for ep in (2, 4, 8) if ranks_of({a: m.get(a, 1) for a in DATA}) % ep == 0]
    for i, mesh in enumerate(folded):
        name = list(MODELS)[i % len(MODELS)]
        label = " ".join(f"{axis}{size}" for axis, size in mesh.items())
        yield pytest.param(name, mesh, marks=FULL, id=f"{name} {label}")


@pytest.mark.parametrize(("name", "mesh"), list(sweep()))
def test_ep_on_mesh_equals_one_process(name, mesh):
    check(name, mesh, EIGHT, micro_batch=micro_batch(mesh))


def rank_in_order(overrides: list[str]) -> tuple:
    """On one rank. Its process groups are those of a backend that runs the operations of a group in order."""
    with mock.patch("tests.lib.parity.Mesh", partial(Mesh, in_order=True)):
        return rank_run(overrides, "uneven")


@pytest.mark.parametrize("zero", [3, *(pytest.param(z, marks=FULL) for z in (1, 2))])
def test_stage_without_experts_equals_one_process(zero):
    """The other stage has experts, spread over its ranks. The groups are the same as on NCCL.
    The backward of weights is a separate action."""
    model = [*MODEL, *MODELS["qwen2-moe"], EIGHT, DENSE_FIRST]
    mesh = ["mesh.pp=2", "mesh.fsdp=2", "mesh.ep=2", f"mesh.zero={zero}", "schedule=zb_h1", "train.micro_batch=1"]
    run = assemble(run_ranks(rank_in_order, 4, [*model, *mesh]))
    compare(run, reference("qwen2-moe", "uneven", EIGHT, DENSE_FIRST), loss=1e-10, state=1e-9)


@FULL
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("recompute", ["none", "full", "selective", "every", "budget"])
def test_ep_with_recompute_and_zero_equals_one_process(recompute, zero):
    more = {"every": ["recompute.every=2"], "budget": ["recompute.budget=1MB"]}.get(recompute, [])
    mesh = {"dp": 2, "fsdp": 2, "cp": 2, "ep": 4}
    check("qwen2-moe", mesh, EIGHT, f"recompute={recompute}", f"mesh.zero={zero}", *more, micro_batch=1)


@FULL
@pytest.mark.parametrize("mesh", [{"fsdp": 2, "tp": 2, "ep": 2}, {"dp": 2, "tp": 2, "ep": 2}], ids=str)
def test_ep_without_sequence_parallelism_equals_one_process(mesh):
    check("olmoe", mesh, EIGHT, "tp.sequence_parallel=false")


@FULL
@pytest.mark.parametrize("order", ["[tp,cp,fsdp,dp,pp]", "[dp,pp,tp,cp,fsdp]"])
def test_ep_with_other_axis_order_equals_one_process(order):
    """Ranks along ep are not neighbours then."""
    check("qwen3-moe", {"pp": 2, "dp": 2, "fsdp": 2, "ep": 4}, EIGHT, f"mesh.order={order}", micro_batch=1)


@FULL
@pytest.mark.parametrize("change", ["optim.offload=true", "data.pack=true", "train.compile=true"])
def test_ep_with_offload_packing_or_compile_equals_one_process(change):
    of_data = [change] if change.startswith("data.") else []
    overrides = [*MODEL, *MODELS["qwen2-moe"], EIGHT, "mesh.dp=2", "mesh.fsdp=2", "mesh.ep=2", "train.micro_batch=2"]
    run = train(4, [*overrides, change], "uneven")
    compare(run, reference("qwen2-moe", "uneven", EIGHT, *of_data), loss=1e-10, state=1e-9)


@FULL
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ep_with_schedules_equals_one_process(schedule):
    """The backward of weights, where it is an action of its own, covers what came from other ranks."""
    layers = f"model.num_hidden_layers={SCHEDULES[schedule]}"
    overrides = [*MODEL, *MODELS["qwen2-moe"], EIGHT, layers, f"schedule={schedule}", "train.micro_batch=1"]
    run = train(4, [*overrides, "mesh.pp=2", "mesh.fsdp=2", "mesh.ep=2"], "uneven")
    compare(run, reference("qwen2-moe", "uneven", EIGHT, layers), loss=1e-10, state=1e-9)


@pytest.mark.parametrize("recompute", ["full", *(pytest.param(r, marks=FULL) for r in ("none", "selective", "every"))])
def test_recompute_sends_no_expert_rows_again(recompute):
    """A sparse layer's forward sends counts, rows and outputs, its backward two gradients, in each microbatch."""
    overrides = [*MODEL, *MODELS["mixtral"], EIGHT, "mesh.dp=2", "mesh.ep=2", "train.micro_batch=1"]
    record = dry_run(resolve(load_config([*overrides, f"recompute={recompute}"]), 2), 1, "cpu")
    (sent,) = [t for t in record.traffic if t.op == "all_to_all"]
    layers, microbatches, rows, row = 3, 4, 16 * 2, 32 * 8
    assert sent.count == layers * microbatches * 5
    assert sent.bytes == layers * microbatches * (8 * 8 + 4 * rows * row)


@FULL
@pytest.mark.parametrize("model", ["qwen2-moe", "deepseek-v3"])
@pytest.mark.parametrize("recompute", ["full", "selective", "every"])
def test_recompute_sends_no_tp_sum_again(recompute, model):
    """This includes the sum of a shared expert. The backward sends the same bytes as without a recompute."""
    overrides = [*MODEL, *MODELS[model], EIGHT, "mesh.tp=2", "train.micro_batch=1", "recompute.every=2"]

    def sums(name: str) -> list[tuple[int, int]]:
        record = dry_run(resolve(load_config([*overrides, f"recompute={name}"]), 2), 1, "cpu")
        return [(t.count, t.bytes) for t in record.traffic if t.op == "reduce_scatter"]

    assert sums(recompute) == sums("none") != []


SHARED = "shared_expert", "shared_expert_down"
REPEATED = {  # (ep, what is kept) -> the ops of a sparse layer that a recompute runs again
    (1, "core"): {"qkv_proj", "o_proj", "router", *SHARED, "experts", "experts_down"},
    (1, "router,experts"): {"qkv_proj", "core", "o_proj", *SHARED, "experts_down"},
    (1, "qkv_proj,core,o_proj,combine"): {"router", *SHARED, "experts"},
    (1, "core,shared_expert"): {"qkv_proj", "o_proj", "router", "shared_expert_down", "experts", "experts_down"},
    (2, "core"): {"qkv_proj", "o_proj", "router", *SHARED, "experts"},
    (2, "core,experts"): {"qkv_proj", "o_proj", "router", *SHARED},
    (2, "core,experts,shared_expert_down"): {"qkv_proj", "o_proj", "router", "shared_expert"},
}


@pytest.mark.parametrize(
    ("ep", "keep"), [pytest.param(*case, marks=[FULL] * (case != (2, "core,experts"))) for case in REPEATED]
)
def test_recompute_computes_only_unsaved_ops(ep, keep):
    """The counted hardware FLOPs equal the FLOPs that run."""
    model = [*MODEL, *MODELS["qwen2-moe"], EIGHT, "model.mlp_only_layers=[]", "mesh.dp=2", f"mesh.ep={ep}"]
    make = lambda *more: resolve(load_config([*model, "train.micro_batch=1", *more]), 2)
    cfg = make("recompute=selective", f"recompute.keep=[{keep}]")
    again = dry_run(cfg, 0, "cpu").flops["matmul"] - dry_run(make(), 0, "cpu").flops["matmul"]
    (group, *_) = plan_recompute(range(3), cfg.recompute, RecomputeOps.of(cfg.model, cfg.mesh))
    of_token = flops.op_flops(cfg.model, cfg.train.seq_len)
    skipped = group.save | group.shape_only(0)
    assert {op for op in of_token if op not in skipped} - {"core"} == REPEATED[ep, keep] - {"core"}
    tokens, layers, microbatches = 16, 3, 4
    assert again == tokens * layers * microbatches * sum(of_token[op] for op in REPEATED[ep, keep] - {"core"})


# ------------------------------------------------------------------------------------------------------------ refusals

REFUSED = {
    "a dense model": (["recipe=llama_debug", "mesh.dp=2", "mesh.ep=2"], 2, ["mesh.ep=2", "llama", "no experts"]),
    "ranks that it does not divide": (
        ["recipe=moe_debug", "mesh.dp=3", "mesh.ep=2", "train.global_batch=6"], 3,
        ["mesh.ep=2 must divide mesh.dp x mesh.fsdp x mesh.cp = 3 x 1 x 1 = 3"],
    ),
    "ranks of other axes": (
        ["recipe=moe_debug", "mesh.tp=2", "mesh.ep=2"], 2,
        ["mesh.ep=2 must divide mesh.dp x mesh.fsdp x mesh.cp = 1 x 1 x 1 = 1"],
    ),
    "experts that it does not divide": (
        ["recipe=moe_debug", "model.num_experts=6", "mesh.dp=4", "mesh.ep=4"], 4,
        ["mesh.ep=4 must divide model.num_experts=6"],
    ),
    "no number": (["recipe=moe_debug", "mesh.ep=0"], 1, ["mesh.ep=0", "at least 1"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_ep_is_refused(name):
    overrides, world, said = REFUSED[name]
    line = config_refusal(overrides, world)
    assert all(words in line for words in said), line
