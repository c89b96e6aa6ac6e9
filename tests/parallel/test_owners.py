"""The plan of the owners of whole tensors: who owns what, the balance, and the memory."""

from collections import Counter
from math import prod

import pytest
import torch

from ndtrain.config import load_config, resolve, world_from_env
from ndtrain.config.registry import get
from ndtrain.engine.train_step import TrainingStep
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.mesh.sharding import Tensors
from ndtrain.model.flops import hidden_parameters, parameter_count
from ndtrain.parallel import owners
from ndtrain.parallel.build import build_stages, initialise, owner_rounds
from ndtrain.parallel.distribution import Distribution
from ndtrain.parallel.owners import BATCH
from ndtrain.program import ops
from tests.lib.parity import make_batches
from tests.lib.ranks import run_ranks

EXPERTS = [
    "model.model_type=qwen2_moe", "model.num_experts=8", "model.num_experts_per_tok=2", "model.vocab_size=300",
    "model.hidden_size=64", "model.moe_intermediate_size=24", "model.shared_expert_intermediate_size=24",
    "model.intermediate_size=96", "model.num_hidden_layers=4", "train.global_batch=16", "train.micro_batch=1",
]  # fmt: skip
LLAMA = ["model=llama3_8b", "train.global_batch=64", "train.micro_batch=1", "train.seq_len=64"]
MESHES = {
    "ep": (16, [*EXPERTS, "mesh.pp=2", "mesh.dp=2", "mesh.fsdp=2", "mesh.tp=2", "mesh.ep=4"]),
    "ep of some": (8, [*EXPERTS, "mesh.dp=2", "mesh.fsdp=4", "mesh.ep=2"]),
    "cp tp": (8, ["model=llama_debug", "mesh.cp=2", "mesh.tp=4", "train.global_batch=2", "train.micro_batch=1"]),
}


def plans(ranks: int, overrides: list[str]):
    """The configuration, and by rank the layouts of its units and its rounds."""
    cfg = resolve(load_config(["optim=muon", *overrides]), ranks)
    spec, distribution = MeshSpec.of(cfg.mesh), Distribution.of(cfg)
    flat = [distribution.layouts(rank).flat() for rank in range(ranks)]
    rounds = [owner_rounds(cfg.optim, spec, rank, flat[rank], torch.bfloat16) for rank in range(ranks)]
    return cfg, spec, flat, rounds


@pytest.mark.parametrize("name", MESHES)
def test_each_hidden_matrix_has_one_owner_that_all_its_holders_agree_on(name):
    ranks, overrides = MESHES[name]
    _cfg, spec, flat, rounds = plans(ranks, overrides)
    owned: dict[str, set[int]] = {}
    for rank in range(ranks):
        known: Counter[str] = Counter()
        for each in rounds[rank]:
            members = spec.members(rank, *each.axes)
            for position, batch in each.batches.items():
                assert 0 <= position < len(members)
                for tensor in batch.names:
                    known[tensor] += 1
                    owned.setdefault(tensor, set()).add(members[position])
        held = [t for layout in flat[rank].values() for t in layout.tensors]
        assert known == Counter(t.name for t in held if t.hidden), "each once, and no other tensor"
    assert all(len(of) == 1 for of in owned.values())
    assert len({len(of) for of in rounds}) <= spec.size("pp"), "all ranks of a stage have the same rounds"


def shares(spec: MeshSpec, rounds) -> list[float]:
    """The cost of each rank of a stage over the mean."""
    costs: Counter[int] = Counter()
    for rank, of_rank in enumerate(rounds):
        for each in of_rank:
            if batch := each.batches.get(spec.members(rank, *each.axes).index(rank)):
                costs[rank] += batch.cost
    mean = sum(costs.values()) / len(rounds)
    return [costs[rank] / mean for rank in range(len(rounds))]


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (2, ["mesh.fsdp=2"]), (4, ["mesh.dp=2", "mesh.tp=2"]), (8, ["mesh.fsdp=8"]), (32, ["mesh.fsdp=4", "mesh.tp=8"]),
    ],
)  # fmt: skip
def test_busiest_owner_of_an_8b_model_is_near_the_mean(ranks, overrides):
    _, spec, _, rounds = plans(ranks, [*LLAMA, *overrides])
    assert max(shares(spec, rounds)) < 1.15


def test_owners_of_experts_get_fewer_of_the_other_matrices():
    """Four ranks share one expert, whose three matrices are as expensive as all other matrices of its layer."""
    few = ["model.num_experts=2", "model.num_experts_per_tok=1", "model.moe_intermediate_size=96"]
    layers = ["model.num_hidden_layers=1", "model.shared_expert_intermediate_size=32"]
    ranks, overrides = MESHES["ep of some"]
    _, spec, _, rounds = plans(ranks, [*overrides, *few, *layers])
    by_kind: dict[bool, list[int]] = {True: [0] * ranks, False: [0] * ranks}
    for rank, of_rank in enumerate(rounds):
        for each in of_rank:
            if batch := each.batches.get(spec.members(rank, *each.axes).index(rank)):
                by_kind[".experts." in batch.names[0]][rank] += len(batch.names)
    assert sorted(by_kind[True]) == [0, 0, 1, 1, 1, 1, 1, 1]
    free = {rank for rank, number in enumerate(by_kind[True]) if not number}
    others = by_kind[False]
    assert min(others[rank] for rank in free) > max(others[rank] for rank in set(range(ranks)) - free)


def run_update(overrides: list[str], batch: int) -> list[tuple[str, int]]:
    """On one rank: a step. After each op of the update, the elements of whole matrices on this rank."""
    owners.BATCH = batch
    rank, _, world = world_from_env()
    cfg = resolve(load_config(["optim=muon", "optim.ns_dtype=fp32", *overrides]), world)
    mesh = Mesh(MeshSpec.of(cfg.mesh), rank, torch.device("cpu"))
    stages = build_stages(cfg, mesh)
    initialise(stages, cfg.run.seed)
    step, alive = TrainingStep(cfg, mesh, stages), []
    run_op, rounds = step.executor.run_op, stages.units.owners._rounds

    def watched(op: ops.Op) -> None:
        run_op(op)
        alive.append((type(op).__name__, sum(r._grads.numel() + r._directions.numel() for r in rounds)))

    step.executor.run_op = watched
    step.run(1, make_batches(cfg, mesh, 1, "none")).wait()
    return alive


def test_at_most_three_rounds_of_whole_matrices_are_in_memory():
    """With one matrix a round."""
    small = ["model=llama_debug", "train.seq_len=16", "train.micro_batch=1", "model.num_hidden_layers=6"]
    (alive,) = run_ranks(run_update, 1, small, 1)
    cfg = resolve(load_config(small), 1)
    largest = cfg.model.hidden_size * cfg.model.intermediate_size
    most = max(numel for _, numel in alive)
    assert largest < most <= 3 * largest
    assert alive[-1][1] == 0, "nothing is left after the step"


def test_batches_have_a_bounded_number_of_elements():
    _, _, _, rounds = plans(8, [*LLAMA, "mesh.fsdp=8"])
    for batch in (batch for each in rounds[0] for batch in each.batches.values()):
        assert len(batch.names) == 1 or len(batch.names) * prod(batch.shape) <= BATCH


def state_of(overrides: list[str]) -> int:
    rank, _, world = world_from_env()
    cfg = resolve(load_config(["optim=muon", *overrides]), world)
    stages = build_stages(cfg, Mesh(MeshSpec.of(cfg.mesh), rank, torch.device("cpu")))
    return sum(x.nbytes for u in stages.units.units.values() for x in u.state.values())


@pytest.mark.parametrize("mesh", [["mesh.fsdp=4"], pytest.param(["mesh.fsdp=2", "mesh.cp=2"], marks=pytest.mark.full)])
def test_state_is_one_momentum_for_hidden_matrices_and_two_moments_for_the_rest(mesh):
    overrides = ["model=llama_debug", "train.global_batch=4", "train.micro_batch=1", *mesh]
    m = resolve(load_config(overrides), 4).model
    hidden, numel = hidden_parameters(m), parameter_count(m)
    exact = 4 * (hidden + 2 * (numel - hidden))
    assert exact <= sum(run_ranks(state_of, 4, overrides)) <= 1.03 * exact, "padding alone is more"


def test_kinds_of_muon_are_hidden_matrices_and_others():
    _, _, flat, _ = plans(1, [*EXPERTS, "mesh.dp=1"])
    kind = get("optimizer", "muon").kind_of
    of = {t.name: kind(t) for layout in flat[0].values() for t in layout.tensors}
    others = {name.split(".")[-2] for name, k in of.items() if k is Tensors.OTHER}
    assert others == {
        "embed_tokens", "norm", "lm_head", "input_layernorm", "post_attention_layernorm", "gate", "shared_expert_gate",
        "q_proj", "k_proj", "v_proj",
    }  # fmt: skip
    assert all(name.endswith("bias") for name, k in of.items() if "_proj" in name and k is Tensors.OTHER)
