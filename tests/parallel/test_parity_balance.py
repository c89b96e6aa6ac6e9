"""The balance of experts: biases, balance losses and what is logged of them are the same on every mesh."""

from functools import cache

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy

from ndtrain.engine.train_step import Evaluation, TrainingStep
from ndtrain.model import params
from ndtrain.model.families.hf_config import to_hf
from ndtrain.model.init import fill
from ndtrain.model.vocabulary import IGNORE
from ndtrain.parallel.build import initialise
from tests.engine.test_skipped import spoil
from tests.lib.parity import Run, compare, distance, make_batches, train
from tests.lib.ranks import run_ranks
from tests.lib.stacked_experts import as_in_files
from tests.lib.stages import RankStages
from tests.model.test_transformers import lift
from tests.parallel.test_parity_moe import MODEL, MODELS, SCHEDULES, meshes

FULL = pytest.mark.full
# large enough to matter beside the loss
BALANCES = {
    "bias": ["moe.balance=bias", "moe.bias_rate=0.05", "moe.z_loss=0.1"],
    "bias and sequence": ["moe.balance=bias", "moe.bias_rate=0.05", "moe.aux_coef=0.3"],
    "hf": ["moe.balance=hf", "model.router_aux_loss_coef=0.3", "moe.z_loss=0.1"],
    "sequence": ["moe.balance=sequence", "moe.aux_coef=0.3"],
}
SAMPLE = {("sequence", "cp2 tp2"), ("hf", "pp2")}  # the rest takes --full


@cache
def reference(balance: str, *changes: str) -> Run:
    """The one-process, one-microbatch run."""
    return train(1, [*MODEL, *MODELS["qwen2-moe"], *BALANCES[balance], "train.micro_batch=8", *changes], "uneven")


def check(balance: str, mesh: dict[str, int], *changes: str, like: tuple[str, ...] = ()) -> Run:
    """Compares a run of microbatches as small as they can be with the reference.

    Args:
        changes: of both runs, where `like` names them, else of the run on the mesh alone.
    """
    ranks = torch.tensor([1, *mesh.values()]).prod().item()
    sizes = [f"mesh.{axis}={size}" for axis, size in mesh.items()]
    small = [*MODEL, *MODELS["qwen2-moe"], *BALANCES[balance], *sizes, "train.micro_batch=1", *changes]
    run = train(ranks, small, "uneven")
    compare(run, reference(balance, *like), loss=1e-10, state=1e-9)
    return run


def sweep():
    for mesh in (m for n in (1, 2, 4) for m in meshes(n) if m.get("pp", 1) < 4):
        label = " ".join(f"{axis}{size}" for axis, size in mesh.items()) or "one"
        for balance in BALANCES:
            marks = [] if (balance, label) in SAMPLE else FULL
            yield pytest.param(balance, mesh, marks=marks, id=f"{balance} {label}")


@pytest.mark.parametrize(("balance", "mesh"), list(sweep()))
def test_balance_on_mesh_equals_one_process(balance, mesh):
    run = check(balance, mesh)
    biased = [b.any().item() for b in run.tensors["bias"].values()]
    assert biased == [balance.startswith("bias")] * 2
    rows = run.balance[-1]
    assert ("aux_loss" in rows) == (balance != "bias") and ("z_loss" in rows) == (balance in ("bias", "hf"))


@FULL
@pytest.mark.parametrize("balance", BALANCES)
def test_balance_without_sequence_parallelism_equals_one_process(balance):
    check(balance, {"tp": 2, "cp": 2}, "tp.sequence_parallel=false")


@FULL
@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_balance_with_schedules_equals_one_process(schedule, balance):
    layers = f"model.num_hidden_layers={SCHEDULES[schedule]}"
    check(balance, {"pp": 2}, f"schedule={schedule}", layers, like=(layers,))


@FULL
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("recompute", ["full", "selective", "every", "budget"])
@pytest.mark.parametrize("balance", BALANCES)
def test_balance_with_recompute_and_zero_equals_one_process(balance, recompute, zero):
    more = {"every": ["recompute.every=2"], "budget": ["recompute.budget=1MB"]}.get(recompute, [])
    check(balance, {"fsdp": 2, "cp": 2}, f"recompute={recompute}", f"mesh.zero={zero}", *more)


# -------------------------------------------------------------------------------------------------------- the tokens


def counted(overrides: list[str], evaluates: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """On one rank: (the loads of the second of two steps, the biases after them).

    Args:
        evaluates: whether other tokens are evaluated before and after each step.
    """
    run = RankStages.build(overrides)
    initialise(run.stages, run.cfg.run.seed)
    step, evaluation = TrainingStep(run.cfg, run.mesh, run.stages), Evaluation(run.cfg, run.mesh, run.stages)
    batches = lambda number: make_batches(run.cfg, run.mesh, number, "none")
    for number in (1, 2):
        if evaluates:
            evaluation.run([batches(7)])
        step.run(number, batches(number)).wait()
        if evaluates:
            evaluation.run([batches(8)])
    return run.stages.balance.loads_LX.clone(), run.stages.balance.bias_LX.clone()


COUNTED = [*MODEL, *MODELS["qwen2-moe"], *BALANCES["bias"], "train.micro_batch=2"]


@pytest.mark.parametrize("recompute", ["full", pytest.param("none", marks=FULL), pytest.param("every", marks=FULL)])
def test_loads_count_every_token_once(recompute):
    """Recompute and evaluations do not count tokens again."""
    ((loads_LX, bias_LX),) = run_ranks(counted, 1, [*COUNTED, f"recompute={recompute}"], True)
    assert loads_LX.sum(1).tolist() == [8 * 16 * 2] * 2  # two layers with experts, two choices of each token
    ((_, alone_LX),) = run_ranks(counted, 1, COUNTED, False)
    assert torch.equal(bias_LX, alone_LX) and bias_LX.any()


def skipped(overrides: list[str]) -> list[torch.Tensor]:
    """On one rank: the biases after each of three steps, the second of which has an infinite loss."""
    run = RankStages.build(overrides)
    initialise(run.stages, run.cfg.run.seed)
    step, now, after = TrainingStep(run.cfg, run.mesh, run.stages), [0], []
    spoil(step, "loss", now, (2,))
    for now[0] in (1, 2, 3):
        report = step.run(now[0], make_batches(run.cfg, run.mesh, now[0], "none")).wait()
        assert report.skipped == (now[0] == 2)
        after.append(run.stages.balance.bias_LX.clone())
    return after


@pytest.mark.parametrize("mesh", ["mesh.fsdp=2", pytest.param("mesh.pp=2", marks=FULL)])
def test_a_skipped_step_moves_no_bias(mesh):
    for first, second, third in run_ranks(skipped, 2, [*COUNTED, mesh]):
        assert first.any() and torch.equal(first, second) and not torch.equal(second, third)


# ----------------------------------------------------------------------------------------------------- transformers

HF = [*MODEL, *BALANCES["hf"][:2], "train.steps=1"]


def theirs(name: str) -> tuple[float, float, dict[str, torch.Tensor]]:
    """(cross entropy, balance loss, gradients of both) of the whole global batch by `transformers`."""
    run = RankStages.build([*HF, *MODELS[name], "train.micro_batch=8"])
    m = run.cfg.model
    hf = transformers.AutoConfig.for_model(**to_hf(m))
    make = transformers.AutoModelForCausalLM.from_config
    model = make(hf, attn_implementation="sdpa", experts_implementation="eager").double()
    model.model.embed_tokens.padding_idx = None  # OLMoE's has no gradient
    with torch.no_grad():
        for parameter_name, p in as_in_files(dict(model.named_parameters()), m).items():
            whole = torch.empty(p.shape, dtype=p.dtype)
            fill(whole.view(-1), m, run.cfg.run.seed, params(m)[parameter_name], 0)
            p.copy_(whole)
    lift(model, m)
    (batch,) = make_batches(run.cfg, run.mesh, 1, "uneven")
    out = model(input_ids=batch.tokens, use_cache=False, output_router_logits=True)
    loss = cross_entropy(out.logits.flatten(0, 1), batch.labels.flatten(), reduction="sum", ignore_index=IGNORE)
    loss = loss / (batch.labels != IGNORE).sum()
    (loss + m.router_aux_loss_coef * out.aux_loss).backward()
    gradients = as_in_files({n: p.grad for n, p in model.named_parameters()}, m)
    return loss.item(), out.aux_loss.item(), gradients


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("qwen2-moe", ["mesh.fsdp=2"]),
        *(
            pytest.param(n, m, marks=FULL)
            for n in ("mixtral", "qwen2-moe", "qwen3-moe", "olmoe")  # DeepSeek's has none in transformers
            for m in (["mesh.tp=2"], ["mesh.pp=2", "mesh.cp=2"])
        ),
    ],
)
def test_balance_loss_equals_transformers(name, mesh):
    """Loss, balance loss and gradients in several microbatches equal `transformers` with the whole batch."""
    ranks = 2 ** len(mesh)
    run = train(ranks, [*HF, *MODELS[name], *mesh, "train.micro_batch=2"], "uneven")
    loss, balance_loss, gradients = theirs(name)
    assert abs(run.losses[0] - loss) < 1e-9 and abs(run.balance[0]["aux_loss"] - balance_loss) < 1e-6 * balance_loss
    ours = run.tensors["gradient"]
    assert ours.keys() == gradients.keys()
    off = {n: distance(ours[n], gradients[n]) for n in ours}
    worst = max(off, key=off.get)
    assert off[worst] < 1e-6, f"gradient of {worst} is off by {off[worst]:.1e}"
