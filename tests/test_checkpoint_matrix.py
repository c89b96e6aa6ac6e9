"""A checkpoint of any mesh on any other: the same bytes when it is saved again, the same training from there on."""

import math
import random
from pathlib import Path

import pytest
import torch

from ndtrain import checkpoint
from ndtrain.config import load_config, resolve, world_from_env
from ndtrain.mesh import Mesh, MeshSpec
from ndtrain.parallel.apply import build_stages, initialise
from ndtrain.step import TrainingStep
from tests.helpers import tensor_bytes
from tests.parity import FP64, Run, assemble, compare, make_batches, rank_state, train
from tests.ranks import run_ranks
from tests.test_parity_tp_cp import MODEL, TIED

AXES = ("mesh.pp=", "mesh.dp=", "mesh.fsdp=", "mesh.cp=", "mesh.tp=")
RUN = [
    *MODEL,
    *FP64,
    TIED,
    "model.num_hidden_layers=6",
    "train.micro_batch=2",
    "train.steps=4",
    "optim.schedule=constant",
]
MESHES = {
    "one": [], "fsdp2": ["mesh.fsdp=2", "mesh.zero=1"], "tp2": ["mesh.tp=2"], "tp4": ["mesh.tp=4"],
    "cp2": ["mesh.cp=2"], "cp2-tp2": ["mesh.cp=2", "mesh.tp=2", "mesh.zero=2"], "dp2-tp2": ["mesh.dp=2", "mesh.tp=2"],
    "fsdp2-tp2-whole-vocabulary": ["mesh.fsdp=2", "mesh.tp=2", "layout.rules.vocab=null"],
    "fsdp2-cp2-tp2": ["mesh.fsdp=2", "mesh.cp=2", "mesh.tp=2"], "tp8": ["mesh.tp=8"],
    "dp2-fsdp2-cp2": ["mesh.dp=2", "mesh.fsdp=2", "mesh.cp=2", "mesh.zero=1"],
    "pp2": ["mesh.pp=2"], "pp3-zb_v": ["mesh.pp=3", "schedule=zb_v", "mesh.zero=3"],
    "pp2-tp2-interleaved": ["mesh.pp=2", "mesh.tp=2", "schedule=interleaved"],
    "pp2-dp2-cp2": ["mesh.pp=2", "mesh.dp=2", "mesh.cp=2", "schedule=zb_h1"],
    "inner-fsdp": ["mesh.order=[pp,tp,cp,dp,fsdp]", "mesh.fsdp=2", "mesh.tp=2"],
}  # fmt: skip


def ranks_of(overrides: list[str]) -> int:
    return math.prod(int(o.partition("=")[2]) for o in overrides if o.startswith(AXES))


def steps(mesh: list[str], load: str, first: int, last: int, folder: str) -> tuple[Run, list[tuple]]:
    """On one rank: from `load` (or the seed), saved at once into `folder` if that is given, then steps first to last,
    saved into `load` where that does not exist yet."""
    rank, _, world = world_from_env()
    cfg = resolve(load_config([*RUN, *mesh]), world)
    mesh_ = Mesh(MeshSpec.of(cfg.mesh), rank, torch.device("cpu"))
    stages = build_stages(cfg, mesh_)
    saved = Path(load) / "step-00000002"
    state = checkpoint.State(first - 1, 0, {})
    if first > 1:
        checkpoint.load(saved, stages, mesh_)
        checkpoint.save(Path(folder), stages, mesh_, cfg, state)
    else:
        initialise(stages, cfg)
    step, run = TrainingStep(cfg, mesh_, stages), Run()
    for number in range(first, last + 1):
        report = step.run(number, make_batches(cfg, mesh_, number, "uneven"))()
        run.losses.append(report.loss)
        run.norms.append(report.grad_norm)
    if first == 1:
        checkpoint.save(Path(load), stages, mesh_, cfg, checkpoint.State(last, 0, {}))
    return run, rank_state(stages)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder that a mesh wrote its first two steps into, made once."""
    made = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            run_ranks(steps, ranks_of(MESHES[name]), MESHES[name], str(made[name]), 1, 2, "")
        return made[name]

    return get


@pytest.fixture(scope="module")
def straight() -> Run:
    return train(1, [*RUN, "train.micro_batch=16"], "uneven")


def pairs():
    """Each mesh to the next and to another, drawn at random."""
    names = list(MESHES)
    random.Random(0).shuffle(names)
    drawn = [(a, names[(i + step) % len(names)]) for step in (1, 5) for i, a in enumerate(names)]
    for i, pair in enumerate(drawn):
        marks = [] if i % 9 == 0 and max(ranks_of(MESHES[m]) for m in pair) <= 4 else [pytest.mark.full]
        yield pytest.param(*pair, marks=marks, id="-to-".join(pair))


@pytest.mark.parametrize(("first", "second"), list(pairs()))
def test_any_mesh_to_any_other(first, second, written, straight, tmp_path):
    folder = written(first)
    parts = run_ranks(steps, ranks_of(MESHES[second]), MESHES[second], str(folder), 3, 4, str(tmp_path))
    assert tensor_bytes(tmp_path / "step-00000002") == tensor_bytes(folder / "step-00000002")
    run = assemble(parts)
    later = Run(straight.losses[2:], straight.norms[2:], straight.tensors)
    compare(run, later, loss=1e-10, state=1e-9)
