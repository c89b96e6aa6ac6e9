"""What a GPU needs of a step: that it never makes the host wait for the device."""

import traceback
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ndtrain
from ndtrain.config import load_config, resolve, world_from_env
from ndtrain.mesh import Mesh, MeshSpec
from ndtrain.parallel.apply import build_stages, initialise
from ndtrain.step import TrainingStep
from ndtrain.transfer import upload
from tests.parity import make_batches
from tests.ranks import run_ranks
from tests.test_parity_tp_cp import MODEL

ROOT = Path(ndtrain.__file__).parent
# the host reads a value, or a shape depends on one
WAITS = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "bincount", "item")
INDEXED = ("index", "index_put_", "_index_put_impl_", "index_put")


class NoHostWait(TorchDispatchMode):
    """Raises at an op that on a GPU would make the host wait, whatever device it runs on here."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.partition(".")[0]
        by_mask = name in INDEXED and any(x is not None and x.dtype == torch.bool for x in args[1])
        if (name in WAITS or by_mask) and not only_on_a_cpu():
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **kwargs or {})


def only_on_a_cpu() -> bool:
    """Whether it is in a `torch._foreach_` op with a scalar tensor, which a CPU's kernel reads and a GPU's does not."""
    ours = [frame for frame in traceback.extract_stack() if frame.filename.startswith(str(ROOT))]
    return bool(ours) and ours[-1].line.startswith("torch._foreach_")


@contextmanager
def no_sync_on_gpu():
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def steady_steps(several: list[list[str]], device: str = "cpu") -> list[float]:
    """The loss of the third step of each run; in that step nothing waits until the report is asked for."""
    rank, _, world = world_from_env()
    losses = []
    for overrides in several:
        cfg = resolve(load_config([*MODEL, "train.micro_batch=4", *overrides]), world)
        mesh = Mesh(MeshSpec.of(cfg.mesh), rank, torch.device(device))
        stages = build_stages(cfg, mesh)
        initialise(stages, cfg)
        step = TrainingStep(cfg, mesh, stages)
        for number in (1, 2):
            step.run(number, [b.to(mesh.device) for b in make_batches(cfg, mesh, number, "uneven")])()
        batches = [b.to(mesh.device) for b in make_batches(cfg, mesh, 3, "uneven")]
        with NoHostWait() if device == "cpu" else no_sync_on_gpu():
            report = step.run(3, batches)
        losses.append(report().loss)
    return losses


PACKED = ["data.pack=true", "optim.clip=0.1", "optim.ema=0.9"]
ONE_PROCESS = [
    [],
    [*PACKED, "recompute=full"],
    ["recompute=every", "recompute.every=2", "precision.compute=bf16"],
    ["recompute=selective", "model.alibi=true", "optim.clip=null"],
    [*PACKED, "recompute=budget", "recompute.budget=400KB", "model.model_type=mistral", "model.sliding_window=5"],
    ["model.attn_logit_softcapping=0.5", "model.tie_word_embeddings=true"],
]
MESHES = {
    "tp": (2, [["mesh.tp=2"], ["mesh.tp=2", "tp.overlap=true", *PACKED], ["mesh.tp=2", "tp.sequence_parallel=false"]]),
    "cp": (2, [["mesh.cp=2", "recompute=full", *PACKED], ["mesh.cp=2", "cp.kind=ulysses", *PACKED]]),
    "fsdp": (2, [["mesh.fsdp=2"], ["mesh.fsdp=2", "mesh.zero=1", *PACKED], ["mesh.dp=2", "recompute=full"]]),
    "pp": (2, [["mesh.pp=2", *PACKED], ["mesh.pp=2", "schedule=zb_h1", "model.tie_word_embeddings=true"]]),
}


def test_no_step_of_one_process_waits():
    losses = run_ranks(steady_steps, 1, ONE_PROCESS)[0]
    assert all(0 < loss < 20 for loss in losses)


@pytest.mark.parametrize("name", [n if n == "tp" else pytest.param(n, marks=pytest.mark.full) for n in MESHES])
def test_no_step_of_a_mesh_waits(name):
    ranks, several = MESHES[name]
    first, *others = run_ranks(steady_steps, ranks, several)
    assert all(other == first for other in others)


def test_the_watch_for_waits_sees_them():
    """What the tests above rely on."""
    x = torch.arange(4.0)
    for wait in (x.sum().item, lambda: x[x > 1], lambda: bool((x > 1).any()), lambda: x.nonzero()):
        with pytest.raises(AssertionError, match="waits for the device"), NoHostWait():
            wait()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("overrides", [*ONE_PROCESS, ["train.compile=true", "precision.compute=bf16"]])
def test_no_step_waits_on_a_gpu(overrides):
    steady_steps([overrides], "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_numbers_are_uploaded_without_a_wait():
    with no_sync_on_gpu():
        found = upload([1.0, 2.5], torch.device("cuda"))
    assert found.tolist() == [1.0, 2.5]
