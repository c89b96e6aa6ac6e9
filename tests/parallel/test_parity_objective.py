"""Objectives other than plain cross-entropy: losses, other sums, gradients and weights are the same on every mesh."""

from functools import cache

import pytest
from torch.nn.functional import cross_entropy

from ndtrain.engine.train_step import TrainingStep
from ndtrain.model.vocabulary import IGNORE
from ndtrain.parallel.build import initialise
from tests.lib.parity import Run, assemble, compare, make_batches, rank_run
from tests.lib.plugins import importable
from tests.lib.ranks import run_ranks
from tests.lib.stages import RankStages

OBJECTIVES = {
    "weighted": ["objective=weighted"],
    "z_loss": ["objective.z_loss=0.01"],
    "weighted, z_loss": ["objective=weighted", "objective.z_loss=0.01"],
    "distillation": ["plugins=[example_package.distillation]", "objective=distillation", "objective.alpha=0.3"],
}
MESHES = {
    "dp2_tp2": ["mesh.dp=2", "mesh.tp=2"],
    "tp2, whole head": ["mesh.tp=2", "layout.rules.vocab=null", "tp.sequence_parallel=false"],
    "cp2_tp2": ["mesh.cp=2", "mesh.tp=2", "train.loss_chunk=16"],
    "pp2_fsdp2": ["mesh.pp=2", "mesh.fsdp=2", "train.micro_batch=1"],
    "fsdp2_tp2, packed": ["mesh.fsdp=2", "mesh.tp=2", "data.pack=true"],
}
DEFAULT = {("distillation", "cp2_tp2"), ("weighted", "pp2_fsdp2")}


def overrides(objective: str, *more: str) -> list[str]:
    size = ["recipe=llama_debug", "precision.params=fp64", "precision.compute=fp64", "train.steps=3"]
    return [*size, *OBJECTIVES[objective], *more]


def run_of(overrides: list[str]) -> tuple[Run, list[tuple]]:
    with importable():
        return rank_run(overrides, "uneven")


@cache
def reference(objective: str, packed: bool):
    return assemble(run_ranks(run_of, 1, overrides(objective, f"data.pack={str(packed).lower()}")))


@pytest.mark.parametrize(
    ("objective", "mesh"),
    [
        pytest.param(o, m, marks=[] if (o, m) in DEFAULT else pytest.mark.full, id=f"{o}-{m}")
        for o in OBJECTIVES
        for m in MESHES
    ],
)
def test_objective_on_mesh_equals_one_process(objective, mesh):
    ranks = 2 if mesh.startswith("tp2") else 4
    run = assemble(run_ranks(run_of, ranks, overrides(objective, *MESHES[mesh])))
    want = reference(objective, "packed" in mesh)
    assert all(row for row in want.balance) == (objective != "weighted"), "the objective's other sums are reported"
    compare(run, want, loss=1e-12, state=1e-9)


def weighted_mean_of_logits(several: list[str]) -> tuple[float, float]:
    """On one rank: the loss of the first step, and the same from the logits of the whole model."""
    run = RankStages.build(several)
    initialise(run.stages, run.cfg.run.seed)
    batches = make_batches(run.cfg, run.mesh, 1, "uneven")
    (model,) = run.stages.models.values()
    for unit in run.stages.units.units:
        run.stages.units.unshard(unit)
    total, weight = 0.0, 0.0
    for batch in batches:
        logits = model.logits(batch.tokens).flatten(0, 1)
        weights = (batch.columns["weights"] * (batch.labels != IGNORE)).flatten().double()
        losses = cross_entropy(logits, batch.labels.flatten(), reduction="none", ignore_index=IGNORE)
        total, weight = total + (losses * weights).sum().item(), weight + weights.sum().item()
    report = TrainingStep(run.cfg, run.mesh, run.stages).run(1, batches).wait()
    return report.loss, total / weight


def test_the_weighted_loss_divides_by_the_sum_of_the_weights():
    ((got, want),) = run_ranks(weighted_mean_of_logits, 1, overrides("weighted"))
    assert got == pytest.approx(want, rel=1e-12)
