"""Experts whose inner size tp shards: any mesh, balance, schedule and recompute mode trains as one process does."""

import pytest

from ndtrain.config import load_config, resolve
from ndtrain.parallel.distribution import Distribution
from ndtrain.plan.dry import dry_run
from tests.lib.helpers import config_refusal
from tests.lib.parity import assemble, compare, train
from tests.lib.ranks import run_ranks
from tests.parallel import test_parity_balance
from tests.parallel.test_parity_balance import BALANCES
from tests.parallel.test_parity_ep import DENSE_FIRST, EIGHT, rank_in_order
from tests.parallel.test_parity_moe import FULL, MODEL, MODELS, SCHEDULES, check, reference

SLICES, WHOLE_STREAM = "layout.rules.expert_mlp=tp", "tp.sequence_parallel=false"
MESHES = [
    {"tp": 2}, {"tp": 4}, {"fsdp": 2, "tp": 2}, {"dp": 2, "tp": 2}, {"cp": 2, "tp": 2}, {"pp": 2, "tp": 2},
    {"fsdp": 2, "tp": 2, "ep": 2}, {"dp": 2, "cp": 2, "tp": 2, "ep": 4}, {"pp": 2, "fsdp": 2, "tp": 2, "ep": 2},
]  # fmt: skip


def label(mesh: dict[str, int]) -> str:
    return " ".join(f"{axis}{size}" for axis, size in mesh.items())


def sweep():
    for mesh in MESHES:
        for name in MODELS:
            for more in ([], [WHOLE_STREAM]):
                yield pytest.param(name, mesh, more, marks=FULL, id=f"{name} {label(mesh)} {''.join(more)}".strip())


@pytest.mark.parametrize(("name", "mesh", "more"), list(sweep()))
def test_expert_slices_on_mesh_equal_one_process(name, mesh, more):
    check(name, mesh, SLICES, EIGHT, *more, micro_batch=1 if "pp" in mesh else 2)


def balances():
    sample = {("hf", WHOLE_STREAM)}
    for balance in BALANCES:
        for more in ("", WHOLE_STREAM):
            marks = [] if (balance, more) in sample else FULL
            yield pytest.param(balance, {"tp": 2}, more, marks=marks, id=f"{balance} tp2 {more}".strip())
        yield pytest.param(balance, {"fsdp": 2, "tp": 2, "ep": 2}, "", marks=FULL, id=f"{balance} fsdp2 tp2 ep2")


@pytest.mark.parametrize(("balance", "mesh", "more"), list(balances()))
def test_balance_of_expert_slices_counts_tokens_once(balance, mesh, more):
    """The loads, balance losses and z-loss count it once, although every rank has a slice of its experts."""
    ranks = 2 * mesh.get("fsdp", 1)
    sizes = [f"mesh.{axis}={size}" for axis, size in mesh.items()]
    overrides = [*MODEL, *MODELS["qwen2-moe"], *BALANCES[balance], *sizes, SLICES, *filter(None, [more])]
    run = train(ranks, [*overrides, "train.micro_batch=1"], "uneven")
    compare(run, test_parity_balance.reference(balance), loss=1e-10, state=1e-9)


@FULL
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("recompute", ["none", "full", "selective", "every", "budget"])
@pytest.mark.parametrize("more", [[], [WHOLE_STREAM]], ids=["", WHOLE_STREAM])
def test_expert_slices_with_recompute_and_zero_equal_one_process(recompute, zero, more):
    more = [*more, *{"every": ["recompute.every=2"], "budget": ["recompute.budget=1MB"]}.get(recompute, [])]
    mesh = {"fsdp": 2, "tp": 2, "ep": 2}
    check("qwen2-moe", mesh, EIGHT, SLICES, f"recompute={recompute}", f"mesh.zero={zero}", *more)


@FULL
@pytest.mark.parametrize("keep", [["router"], ["dispatch"], ["experts"], ["combine"]], ids=str)
def test_expert_slices_with_kept_ops_equal_one_process(keep):
    check("qwen2-moe", {"tp": 2}, SLICES, "recompute=selective", f"recompute.keep=[{','.join(keep)}]")


@FULL
@pytest.mark.parametrize("more", ["", WHOLE_STREAM])
@pytest.mark.parametrize("change", ["tp.overlap=true", "train.compile=true"])
def test_expert_slices_with_overlap_or_compile_equal_one_process(change, more):
    check("deepseek-v3", {"fsdp": 2, "tp": 2}, SLICES, change, *filter(None, [more]))


@FULL
@pytest.mark.parametrize("more", ["", WHOLE_STREAM])
@pytest.mark.parametrize("exchange", ["moe.overlap=true", "moe.capacity=1", "moe.overlap=true moe.capacity=1.5"])
def test_expert_slices_with_every_exchange_equal_one_process(exchange, more):
    """The exchanged rows include all gathered tokens."""
    check("qwen2-moe", {"dp": 2, "tp": 2, "ep": 2}, SLICES, EIGHT, *exchange.split(), *filter(None, [more]))


@FULL
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_expert_slices_with_schedules_equal_one_process(schedule):
    """The backward of weights, where it is an action of its own, covers slices."""
    layers = f"model.num_hidden_layers={SCHEDULES[schedule]}"
    overrides = [*MODEL, *MODELS["qwen2-moe"], layers, f"schedule={schedule}", SLICES, "train.micro_batch=1"]
    run = train(4, [*overrides, "mesh.pp=2", "mesh.tp=2"], "uneven")
    compare(run, reference("qwen2-moe", "uneven", layers), loss=1e-10, state=1e-9)


@FULL
@pytest.mark.parametrize("zero", [1, 3])
def test_stage_without_expert_slices_equals_one_process(zero):
    """The process groups run their operations in order, as on NCCL."""
    model = [*MODEL, *MODELS["qwen2-moe"], EIGHT, DENSE_FIRST, SLICES]
    mesh = ["mesh.pp=2", "mesh.fsdp=2", "mesh.tp=2", "mesh.ep=2", f"mesh.zero={zero}", "schedule=zb_h1"]
    run = assemble(run_ranks(rank_in_order, 8, [*model, *mesh, "train.micro_batch=1"]))
    compare(run, reference("qwen2-moe", "uneven", EIGHT, DENSE_FIRST), loss=1e-10, state=1e-9)


# -------------------------------------------------------------------------------------------------- what a rank holds


def resolved_on(ranks: int, *overrides: str):
    return resolve(load_config([*MODEL, *MODELS["mixtral"], EIGHT, *overrides]), ranks)


@pytest.mark.parametrize(("more", "inner"), [([SLICES], 26), ([], 52)], ids=["slices", "whole"])
def test_a_rank_has_a_slice_of_every_expert(more, inner):
    cfg = resolved_on(4, "mesh.tp=2", "mesh.fsdp=2", "mesh.ep=2", *more)
    for rank in range(4):
        layouts = Distribution.of(cfg).layouts(rank)
        expert = "model.layers.0.block_sparse_moe.experts.0"
        assert layouts[f"{expert}.w1.weight"].local_shape == layouts[f"{expert}.w3.weight"].local_shape == (inner, 32)
        assert layouts[f"{expert}.w2.weight"].local_shape == (32, inner)
        assert layouts[f"{expert}.w2.weight"].tp_replicas == (1 if more else 2)


def test_expert_products_are_divided_over_tp():
    """With sequence parallelism a rank has half of each expert for twice the tokens; otherwise half for the same."""
    one = ["mesh.tp=2", "train.micro_batch=2", "train.global_batch=2", "model.num_hidden_layers=1"]
    flops = lambda *more: dry_run(resolved_on(2, *one, *more), 1, "cpu").flops["matmul"]
    assert flops(SLICES) == flops()
    rows, steps = 2 * 2 * 16, 3  # two experts a token; forward and both gradients, of one layer and one microbatch
    assert flops(WHOLE_STREAM) - flops(SLICES, WHOLE_STREAM) == rows * steps * 2 * 3 * 32 * 52 // 2


@pytest.mark.parametrize("recompute", ["full", pytest.param("none", marks=FULL)])
def test_recompute_sums_no_expert_output_again(recompute):
    """A layer's forward reduces attention's output and the experts', its backward the gradients of attention's input,
    of the experts' tokens and of their weights. The embedding's rows and the loss's gradient are reduced too."""
    cfg = resolved_on(2, "mesh.tp=2", "train.micro_batch=2", f"recompute={recompute}", "train.loss_chunk=64", SLICES)
    (reduced,) = [t for t in dry_run(cfg, 1, "cpu").traffic if t.op == "reduce_scatter" and t.axis == "tp"]
    layers, microbatches = 3, 4
    assert reduced.count == microbatches * (layers * (2 + 3) + 2)


# ------------------------------------------------------------------------------------------------------------ refusals

MOE = ["recipe=moe_debug"]
REFUSED = {
    "an expert that tp does not divide": (
        [*MOE, "model.moe_intermediate_size=33"], "mesh.tp=2 must divide model.moe_intermediate_size=33",
    ),
    "one whose size has another name": (
        [*MODEL, *MODELS["mixtral"], "model.intermediate_size=51"], "mesh.tp=2 must divide model.intermediate_size=51",
    ),
    "a dense model": (["recipe=llama_debug"], "layout.rules.expert_mlp=tp: model.model_type=llama has no experts"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_expert_slices_are_refused(name):
    overrides, said = REFUSED[name]
    resolve(load_config([*overrides, "mesh.tp=2"]), 2)  # without slices it is a run
    line = config_refusal([*overrides, "mesh.tp=2", SLICES], 2)
    assert line.startswith(said) and "layout.rules.expert_mlp=tp" in line
