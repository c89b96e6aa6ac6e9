"""Moments in bf16, and state in host memory. Rounding is unbiased and the same on every mesh; checkpoints restore
it."""

from pathlib import Path

import pytest
import torch

from ndtrain import checkpoint
from ndtrain.checkpoint import Saver, State
from ndtrain.config import ConfigError, load_config, resolve, world_from_env
from ndtrain.engine.train_step import TrainingStep
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.optim import TensorSlice
from ndtrain.optim.rounding import Place, draw, element_index, halves, keys, round_to_bf16
from ndtrain.parallel.build import build_stages, initialise
from ndtrain.parallel.distribution import Distribution
from ndtrain.parallel.grad_stats import GradStats
from tests.lib.helpers import tensor_bytes
from tests.lib.parity import SHAPE, Run, assemble, distance, draw_gradients, make_batches, rank_state, train
from tests.lib.ranks import run_ranks
from tests.parallel.test_parity_tp_cp import MODEL

BF16, OFFLOAD = "optim.state_dtype=bf16", "optim.offload=true"

# --------------------------------------------------------------------------------------------------------- rounding


def bits_of(name: str, step: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return halves(draw(torch.arange(n, dtype=torch.int32), *keys(name, step)))


def test_round_to_bf16_is_unbiased_between_neighbours():
    n = 1 << 16
    bits = bits_of("w", 1, n)
    for value in (1.0009765625, -3.14159, 2e-20, 1.99999, 1.0):
        x = torch.full((n,), value)
        for half in bits:
            got = round_to_bf16(x, half)
            assert torch.equal(got, got.bfloat16().float()), "no number of bf16"
            below, above = sorted({*got.double().tolist()})[0], sorted({*got.double().tolist()})[-1]
            exact = x[0].double().item()
            assert len(set(got.tolist())) <= 2 and below <= exact <= above
            assert above - below <= 2**-7 * abs(exact), "not its neighbours"
            spread = max(above - below, 1e-300) / 2
            assert abs(got.double().mean().item() - exact) <= 5 * spread / n**0.5, value


def test_random_bits_are_uniform_and_uncorrelated():
    """The random bits of two steps, two tensors, two moments and neighbouring elements are uncorrelated."""
    n = 1 << 16
    upper, lower = bits_of("a", 1, n)
    others = [lower, bits_of("a", 2, n)[0], bits_of("b", 1, n)[0], upper.roll(1)]
    for other in others:
        together = torch.corrcoef(torch.stack([upper, other]).double())[0, 1].item()
        assert abs(together) < 5 / n**0.5
    counts = torch.bincount(upper >> 8, minlength=256).double()
    assert ((counts - n / 256) ** 2 / (n / 256)).sum() < 255 + 5 * (2 * 255) ** 0.5, "not uniform"


@pytest.mark.parametrize("tp", [1, 2])
def test_element_index_gives_position_in_whole_tensor(tp):
    cfg = resolve(load_config([*MODEL, f"mesh.tp={tp}"]), tp)
    for rank in range(tp):
        layouts = Distribution.of(cfg).layouts(rank)
        for name in layouts.names():
            start, stop = layouts[name].local_numel // 3, layouts[name].local_numel - 1
            t = layouts[name]
            whole = torch.arange(t.numel).view(t.shape)
            expected = whole[tuple(slice(first, first + n) for first, n in t.shard)].flatten()[start:stop]
            place = Place.of(TensorSlice(slice(7, 7 + stop - start), t, start), 5)  # the third element of an update
            begin, shift, *rows = torch.tensor(place, dtype=torch.int32)
            position = torch.arange(2, 2 + stop - start, dtype=torch.int32)
            for known in [rows, *([[]] if place.jump == 0 else [])]:
                assert torch.equal(element_index(position, shift, known).long(), expected), name
            assert begin == 2


# ----------------------------------------------------------------------------------------------- the same on any mesh


def rank_updates(overrides: list[str]) -> tuple[Run, list[tuple]]:
    """On one rank: three updates, one of them skipped, from gradients that depend on step and element alone."""
    rank, _, world = world_from_env()
    batch = ["train.global_batch=8", "train.micro_batch=2"]
    cfg = resolve(load_config([*MODEL, *batch, BF16, "optim.lr_mult={*.down_proj.weight:4}", *overrides]), world)
    mesh = Mesh(MeshSpec.of(cfg.mesh), rank, torch.device("cpu"))
    stages = build_stages(cfg, mesh)
    initialise(stages, cfg.run.seed)
    optimizer = TrainingStep(cfg, mesh, stages).optimizer
    for step in (1, 2, 3):
        draw_gradients(stages, step)
        before, fine = rank_state(stages), step != 2
        optimizer.begin(step, 1e-2, GradStats(torch.tensor(1.0), torch.tensor(2.0).double(), torch.tensor(fine)))
        optimizer.finish()
        same = [torch.equal(old[-1], new[-1]) for old, new in zip(before, rank_state(stages), strict=True)]
        assert not any(same) if fine else all(same), "a step that was skipped changes nothing"
    return Run(), rank_state(stages)


MESHES = {
    "fsdp2": ["mesh.fsdp=2"], "tp2-pp1": ["mesh.tp=2"], "dp2": ["mesh.dp=2"], "zero1": ["mesh.fsdp=2", "mesh.zero=1"],
    "zero2-cp": ["mesh.cp=2", "mesh.zero=2"], "pp2": ["mesh.pp=2"], "offload": ["mesh.fsdp=2", OFFLOAD],
}  # fmt: skip


@pytest.fixture(scope="module")
def one_process() -> Run:
    return assemble(run_ranks(rank_updates, 1, []))


@pytest.mark.parametrize("mesh", [n if n == "tp2-pp1" else pytest.param(n, marks=pytest.mark.full) for n in MESHES])
def test_bf16_moments_are_bitwise_equal_on_any_mesh(mesh, one_process):
    sharded = assemble(run_ranks(rank_updates, 2, MESHES[mesh]))
    for kind in ("weight", "exp_avg", "exp_avg_sq"):
        dtype = torch.float32 if kind == "weight" else torch.bfloat16
        for name, expected in one_process.tensors[kind].items():
            got = sharded.tensors[kind][name]
            assert got.dtype == dtype and torch.equal(got, expected), f"{kind} of {name}"


# ----------------------------------------------------------------------------------------------------------- training


OFFLOADED = (
    ["mesh.fsdp=2"],
    ["mesh.fsdp=2", "mesh.zero=1", BF16],
    ["mesh.fsdp=2", "precision.compute=bf16", "optim.clip=null"],
    ["mesh.pp=2", "mesh.zero=2"],
    ["mesh.tp=2", "precision.compute=bf16"],
)


def losses(*overrides: str, steps: int = 50) -> tuple[list[float], TrainingStep]:
    """Of a small model in one process that sees the same three batches again and again."""
    run = [*SHAPE, "train.steps=60", "train.global_batch=4", "train.micro_batch=4", "optim.betas=[0.9,0.999]"]
    cfg = resolve(load_config([*run, *overrides]), 1)
    mesh = Mesh(MeshSpec.of(cfg.mesh), 0, torch.device("cpu"))
    stages = build_stages(cfg, mesh)
    initialise(stages, cfg.run.seed)
    step = TrainingStep(cfg, mesh, stages)
    return [step.run(i, make_batches(cfg, mesh, 1 + i % 3, "none")).wait().loss for i in range(1, steps + 1)], step


@pytest.mark.full
def test_bf16_moments_train_near_fp32():
    wide, reference = losses()
    narrow, step = losses(BF16)
    assert wide[-1] < 0.2 * wide[0], "nothing was learnt"
    assert max(abs(a - b) for a, b in zip(narrow, wide, strict=True)) < 0.02 * wide[0]
    units = zip(step.stages.units.units.values(), reference.stages.units.units.values(), strict=True)
    for got, want in units:
        assert distance(got.state["exp_avg_sq"], want.state["exp_avg_sq"]) < 0.1, got.name
        assert distance(got.master, want.master) < 0.05, got.name


@pytest.mark.parametrize("overrides", [OFFLOADED[0], *(pytest.param(o, marks=pytest.mark.full) for o in OFFLOADED[1:])])
def test_offload_is_bitwise_equal(overrides):
    common = [*MODEL, "train.global_batch=8", "train.micro_batch=2", *overrides]
    offloaded, expected = train(2, [*common, OFFLOAD]), train(2, common)
    assert offloaded.losses == expected.losses and offloaded.norms == expected.norms
    for kind, tensors in expected.tensors.items():
        for name, want in tensors.items():
            assert torch.equal(offloaded.tensors[kind][name], want), f"{kind} of {name}"


# -------------------------------------------------------------------------------------------------------- checkpoints


def save_or_resume(overrides: list[str], source: Path | None, folder: Path) -> None:
    """On one rank: two steps and a checkpoint; or a checkpoint that is loaded and saved again unchanged."""
    rank, _, world = world_from_env()
    run = [*MODEL, "train.global_batch=8", "train.micro_batch=2", "optim.ema=0.9"]
    cfg = resolve(load_config([*run, *overrides]), world)
    mesh = Mesh(MeshSpec.of(cfg.mesh), rank, torch.device("cpu"))
    stages = build_stages(cfg, mesh)
    if source is None:
        initialise(stages, cfg.run.seed)
        step = TrainingStep(cfg, mesh, stages)
        for i in (1, 2):
            step.run(i, make_batches(cfg, mesh, i, "none")).wait()
    else:
        checkpoint.load(source, stages, mesh)
    saver = Saver(folder, stages, mesh, cfg)
    assert [s.error for s in (*saver.save(State(2, 0, {})), *saver.wait())] == [None]


@pytest.mark.full
def test_bf16_moments_resume_on_another_mesh(tmp_path):
    first, again, wide, back = (tmp_path / name / "step-00000002" for name in ("first", "again", "wide", "back"))
    run_ranks(save_or_resume, 2, ["mesh.fsdp=2", BF16], None, first.parent)
    run_ranks(save_or_resume, 2, ["mesh.tp=2", OFFLOAD, BF16, "checkpoint.async_save=true"], first, again.parent)
    assert tensor_bytes(again) == tensor_bytes(first)
    run_ranks(save_or_resume, 1, [], first, wide.parent)
    run_ranks(save_or_resume, 1, [BF16], wide, back.parent)
    assert tensor_bytes(back) == tensor_bytes(first), "what was bf16 is so after fp32 as well"
    size = lambda folder: (folder / "optimizer.safetensors").stat().st_size
    assert size(first) < 0.7 * size(wide)


# ------------------------------------------------------------------------------------------------------------- checks


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["optim.state_dtype=fp16"], "optim.state_dtype=fp16: no such choice"),
        ([BF16, "precision.params=fp64"], "optim.state_dtype=bf16 needs precision.params=fp32"),
    ],
)
def test_unsupported_state_dtype_or_offload_is_refused(overrides, words):
    with pytest.raises(ConfigError, match=words) as error:
        resolve(load_config(overrides), 1)
    assert "\n" not in str(error.value)
