"""train.compile: the same training, blocks without graph breaks, nothing compiled again after the second step."""

import pytest
import torch
from torch._dynamo.utils import counters

from ndtrain.config import load_config, resolve, world_from_env
from ndtrain.mesh import Mesh, MeshSpec
from ndtrain.parallel.apply import build_stages, initialise
from ndtrain.step import TrainingStep
from tests.parity import FP64, SHAPE, compare, make_batches, train
from tests.ranks import run_ranks
from tests.test_parity_tp_cp import MODEL

BASE = [*SHAPE, "train.global_batch=8", "train.micro_batch=2", "model.num_hidden_layers=2"]


def count_compilations() -> tuple[int, int, int]:
    """(graph breaks, frames compiled after two steps, and after five)"""
    torch._dynamo.reset()
    cfg = resolve(load_config([*BASE, "train.compile=true", "train.steps=5"]), world_from_env()[2])
    mesh = Mesh(MeshSpec.of(cfg.mesh), 0, torch.device("cpu"))
    stages = build_stages(cfg, mesh)
    initialise(stages, cfg)
    step = TrainingStep(cfg, mesh, stages)
    frames = []
    for number in range(1, 6):
        step.run(number, make_batches(cfg, mesh, number, "none"))()
        frames.append(counters["stats"]["unique_graphs"])
    return sum(counters["graph_break"].values()), frames[1], frames[4]


@pytest.mark.full
def test_no_graph_breaks_and_no_recompilation():
    breaks, after_two, after_five = run_ranks(count_compilations, 1, timeout=300)[0]
    assert breaks == 0
    assert after_two == after_five > 0


@pytest.mark.full
@pytest.mark.parametrize("mesh", [(), ("mesh.fsdp=2",), ("mesh.fsdp=2", "mesh.zero=1", "recompute=full")])
def test_compiled_equals_eager(mesh):
    n = 2 if mesh else 1
    base = [*BASE, *FP64]
    compare(train(n, [*base, *mesh, "train.compile=true"], "uneven"), train(1, base, "uneven"), loss=1e-10, state=1e-9)


@pytest.mark.full
def test_compiled_over_tp_and_cp_equals_eager():
    """What moves activations stays outside the graphs."""
    base = [*MODEL, *FP64, "train.micro_batch=8", "data.pack=true"]
    run = train(4, [*base, "mesh.tp=2", "mesh.cp=2", "train.compile=true"], "uneven")
    compare(run, train(1, base, "uneven"), loss=1e-10, state=1e-9)
