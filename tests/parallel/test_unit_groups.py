"""Units that name other groups than their neighbours: the training, the norm and the checkpoints are the same."""

import math
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from ndtrain import checkpoint
from ndtrain.checkpoint import State
from ndtrain.config import load_config, resolve, world_from_env
from ndtrain.engine.train_step import TrainingStep
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.mesh.sharding import SHARD_AXES, Layouts, UnitGroups
from ndtrain.parallel.build import build_stages, initialise
from tests.lib.parity import FP64, SHAPE, assemble, compare, make_batches, rank_run, rank_state, train
from tests.lib.ranks import run_ranks

MODEL = [*SHAPE, *FP64, "train.global_batch=8", "train.micro_batch=2"]
AXES = ("mesh.pp=", "mesh.dp=", "mesh.fsdp=", "mesh.cp=", "mesh.tp=")
MESHES = {
    "fsdp2 cp2": ["mesh.fsdp=2", "mesh.cp=2"],
    "dp2 fsdp2 zero 2": ["mesh.dp=2", "mesh.fsdp=2", "mesh.zero=2"],
    "fsdp2 cp2 tp2": ["mesh.fsdp=2", "mesh.cp=2", "mesh.tp=2", "model.num_key_value_heads=2"],
    "pp2 fsdp2 cp2": ["mesh.pp=2", "mesh.fsdp=2", "mesh.cp=2", "model.tie_word_embeddings=true", "mesh.zero=1"],
    "dp2 fsdp2 offloaded": ["mesh.dp=2", "mesh.fsdp=2", "optim.offload=true"],
}
# unit -> the axes that split it: the last layer's none at all; other units as the mesh says
SPLIT = {"model.layers.0": ("fsdp",), "model.layers.1": ("cp",), "model.layers.2": (), "model.norm": ("fsdp",)}


def mixed_groups(self: Layouts, name: str) -> UnitGroups:
    """Each unit split over axes of its own, and replicated along the others."""
    data_axes = [a for a in self.mesh.order if a in self[name].partial - {"pp", "tp"}]
    split = SPLIT.get(self.units[name], SHARD_AXES)
    apart = [a for a in data_axes if a in split]
    return UnitGroups.of(self.mesh, self.rank, apart, [a for a in data_axes if a not in apart])


def mixed(fn, *args):
    """On one rank."""
    with patch.object(Layouts, "groups", mixed_groups):
        return fn(*args)


@pytest.mark.parametrize(
    "mesh", [name if name == "fsdp2 cp2" else pytest.param(name, marks=pytest.mark.full) for name in MESHES]
)
def test_units_with_different_groups_equal_one_process(mesh):
    overrides = MESHES[mesh]
    n = math.prod(int(o.partition("=")[2]) for o in overrides if o.startswith(AXES))
    changes = [o for o in overrides if o.startswith("model.")]
    reference = train(1, [*MODEL, *changes], "uneven")
    run = assemble(run_ranks(mixed, n, rank_run, [*MODEL, *overrides], "uneven"))
    compare(run, reference, loss=1e-10, state=1e-9)


def save_and_load(overrides: list[str], folder: str) -> None:
    """On one rank: three steps and a checkpoint; loaded over other values, it gives the same state."""
    rank, _, world = world_from_env()
    cfg = resolve(load_config(overrides), world)
    mesh = Mesh(MeshSpec.of(cfg.mesh), rank, torch.device("cpu"))
    stages = build_stages(cfg, mesh)
    initialise(stages, cfg.run.seed)
    step = TrainingStep(cfg, mesh, stages)
    for number in range(1, 4):
        step.run(number, make_batches(cfg, mesh, number, "none")).wait()
    checkpoint.save(Path(folder), stages, mesh, cfg, State(3, 0, {}))
    before = rank_state(stages)
    for unit in stages.units.units.values():
        for x in (unit.master, *unit.state.values()):
            x.fill_(1)
    checkpoint.load(checkpoint.list_checkpoints(Path(folder))[-1], stages, mesh)
    for (*_, saved), (kind, name, *_, loaded) in zip(before, rank_state(stages), strict=True):
        assert torch.equal(saved, loaded), f"{kind} of {name}"


@pytest.mark.full
def test_units_with_different_groups_save_and_load_checkpoint(tmp_path):
    """Elements are written once, read by every rank that holds them, and equal the checkpoint of one process."""
    one, many = tmp_path / "one", tmp_path / "many"
    run_ranks(save_and_load, 1, MODEL, str(one))
    run_ranks(mixed, 8, save_and_load, [*MODEL, "mesh.dp=2", "mesh.fsdp=2", "mesh.cp=2"], str(many))
    for stem in ("model", "optimizer"):
        expected, written = (load_file(f / "step-00000003" / f"{stem}.safetensors") for f in (one, many))
        assert written.keys() == expected.keys()
        for name, x in expected.items():
            torch.testing.assert_close(written[name], x, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
