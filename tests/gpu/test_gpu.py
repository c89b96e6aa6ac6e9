"""On a GPU: training is the same as on a CPU with every kernel, and the host never waits for the device.

Every test here needs a CUDA device; elsewhere they are skipped with that reason.
"""

import json
import subprocess
import sys

import pytest
import torch

from lab.gpu import case as gpu_case
from lab.gpu.goals import deviation
from lab.gpu.suite import SUITES
from ndtrain.bench.__main__ import main as bench
from ndtrain.config import load_config, resolve
from ndtrain.engine.train_step import StepReport, TrainingStep
from ndtrain.measure.training import batches_of
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.parallel.build import build_stages, initialise
from tests.lib.helpers import arguments, checkpoint_of, rows, run, write_corpus

pytestmark = pytest.mark.gpu
FULL = pytest.mark.full  # what makes more than four minutes of `pytest -m gpu`

SMALL = [
    "model.hidden_size=256", "model.intermediate_size=512", "model.num_hidden_layers=3", "model.vocab_size=1024",
    "model.num_attention_heads=4", "model.num_key_value_heads=2", "model.head_dim=64", "train.seq_len=256",
    "train.micro_batch=2", "train.global_batch=4", "train.loss_chunk=256", "optim.schedule=constant", "optim.lr=1e-3",
    "train.compile=false",
]  # fmt: skip
BF16 = "precision.compute=bf16"
BACKENDS = ("auto", "flash", "cudnn", "efficient")
WAYS = {
    "plain": [],
    "recompute": ["recompute=full"],
    "selective": ["recompute=selective"],
    "packed": ["data.pack=true"],
    "window": ["model.model_type=mistral", "model.sliding_window=100"],
    "tied": ["model.tie_word_embeddings=true"],
    "zero 1": ["mesh.zero=1"],
    "bf16 moments": ["optim.state_dtype=bf16"],
    "average": ["optim.ema=0.99"],
}


class Training:
    """A small model on one device, from the weights that `run.seed` names."""

    def __init__(self, device: str, *overrides: str):
        self.cfg = resolve(load_config([*SMALL, *overrides]), 1)
        self.mesh = Mesh(MeshSpec.of(self.cfg.mesh), 0, torch.device(device, 0 if device == "cuda" else None))
        self.stages = build_stages(self.cfg, self.mesh)
        initialise(self.stages, self.cfg.run.seed)
        self.step = TrainingStep(self.cfg, self.mesh, self.stages)
        self.number = 0

    def batches(self):
        return batches_of(self.cfg, self.mesh, self.number)

    def launch(self, batches):
        self.number += 1
        return self.step.run(self.number, batches)

    def steps(self, n: int) -> list[StepReport]:
        return [self.launch(self.batches()).wait() for _ in range(n)]

    def weights(self) -> torch.Tensor:
        """All master weights, fp32 on the CPU."""
        return torch.cat([unit.master.detach().float().cpu() for unit in self.stages.units.units.values()])


@pytest.fixture(autouse=True)
def exact_matmuls():
    """Turns TF32 off, whatever another test or the environment chose."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)
    torch.cuda.empty_cache()


def compare(actual: Training, expected: Training, steps: int, loss: float, norm: float, weights: float) -> None:
    """Compares losses and gradient norms (relative), and weights relative to their change in training."""
    start = expected.weights()
    for got, want in zip(actual.steps(steps), expected.steps(steps), strict=True):
        assert not got.skipped
        assert got.loss == pytest.approx(want.loss, rel=loss)
        assert got.grad_norm == pytest.approx(want.grad_norm, rel=norm)
    moved = (expected.weights() - start).norm()
    assert (actual.weights() - expected.weights()).norm() <= weights * moved
    assert moved > 0


# --------------------------------------------------------------------------------------------------- the same training


@pytest.mark.parametrize("way", WAYS)
def test_fp32_training_equals_cpu(way):
    """AdamW's first updates hardly depend on a gradient's size, so that weights with tiny gradients differ most."""
    compare(Training("cuda", *WAYS[way]), Training("cpu", *WAYS[way]), steps=3, loss=1e-5, norm=1e-4, weights=2e-2)


@pytest.mark.parametrize("way", WAYS)
def test_bf16_training_is_near_cpu(way):
    both = [Training(device, BF16, *WAYS[way]) for device in ("cuda", "cpu")]
    compare(*both, steps=3, loss=5e-3, norm=5e-2, weights=0.4)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("way", ["plain", *(pytest.param(w, marks=FULL) for w in ("recompute", "packed", "zero 1"))])
def test_compiled_training_equals_eager(way, precision):
    more = [*WAYS[way], f"precision.compute={precision}"]
    loss, norm, weights = (1e-5, 1e-4, 2e-2) if precision == "fp32" else (5e-3, 5e-2, 0.4)
    torch._dynamo.reset()
    compare(Training("cuda", "train.compile=true", *more), Training("cuda", *more), 3, loss, norm, weights)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", ["plain", "recompute"])
def test_attention_backends_agree(backend, way):
    both = [Training("cuda", BF16, *WAYS[way], f"hardware.attention={name}") for name in (backend, "math")]
    compare(*both, steps=2, loss=5e-3, norm=3e-2, weights=0.4)


@pytest.mark.parametrize(("compute", "weights"), [("fp32", 2e-2), ("bf16", 0.1)])
def test_offload_trains_as_without(compute, weights):
    """Another kernel makes the update on the host, from the same numbers. Where its last bit differs, a weight may
    become another bf16 number."""
    more = [f"precision.compute={compute}"]
    compare(Training("cuda", "optim.offload=true", *more), Training("cuda", *more), 3, 1e-3, 1e-2, weights)


def test_offload_keeps_state_in_host_memory():
    here, there = Training("cuda", BF16), Training("cuda", BF16, "optim.offload=true")
    master = lambda t: next(iter(t.stages.units.units.values())).master.device.type
    assert (master(here), master(there)) == ("cuda", "cpu")


@pytest.mark.parametrize("compiled", [False, True])
def test_fp8_losses_are_near_bf16_but_not_equal(compiled):
    torch._dynamo.reset()
    losses = lambda *more: [r.loss for r in Training("cuda", *more).steps(60)]
    fp8, bf16 = losses("precision.compute=fp8", f"train.compile={str(compiled).lower()}"), losses(BF16)
    assert bf16[-1] < 0.8 * bf16[0]
    assert fp8 != bf16 and deviation(fp8, bf16) < 0.02


# -------------------------------------------------------------------------------------------------- a host that is free


STEADY = {**WAYS, "clip off": ["optim.clip=null"], "fp8": ["precision.compute=fp8"]}
QUICK = ("plain", "packed", "fp8")  # of those that are compiled first
WAITING = [
    pytest.param(way, compiled, marks=FULL if compiled and way not in QUICK else [])
    for way in STEADY
    for compiled in (False, True)
]


@pytest.mark.parametrize(("way", "compiled"), WAITING)
def test_a_steady_step_does_not_wait(way, compiled):
    """PyTorch raises at any call of its own that waits for the device."""
    training = Training("cuda", BF16, *STEADY[way], f"train.compile={str(compiled).lower()}")
    training.steps(3)
    batches = [training.batches() for _ in range(2)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        reports = [training.launch(b) for b in batches]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(report.wait().loss > 0 for report in reports)


def test_sync_debug_mode_detects_wait():
    x = torch.ones(3, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            x.sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("compiled", [False, True])
def test_the_profiler_sees_no_wait_in_steady_steps(compiled):
    """The profiler also sees waits inside libraries, which PyTorch's own check misses."""
    case = next(c for c in SUITES["smoke"].cases if c.kind == "syncs")
    cfg = resolve(load_config([*SMALL, BF16, f"train.compile={str(compiled).lower()}"]), 1)
    mesh = Mesh(MeshSpec.of(cfg.mesh), 0, torch.device("cuda", 0))
    assert gpu_case.KINDS["syncs"](case, cfg, SUITES["h200"], mesh)["waits"] == {}


def test_memory_of_repeated_steps_is_constant():
    training = Training("cuda", BF16)
    training.steps(3)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    training.steps(1)
    peak = torch.cuda.max_memory_allocated()
    training.steps(5)
    assert torch.cuda.memory_allocated() == before and torch.cuda.max_memory_allocated() == peak


# ------------------------------------------------------------------------------------------------------- as a user runs


ON_GPU = ["hardware.device=cuda", "hardware.peak_tflops=null", BF16, "model.hidden_size=128", "model.head_dim=64"]
ON_GPU += ["model.num_attention_heads=2", "model.num_key_value_heads=2", "train.steps=8"]


RESUMED = [[], ["optim.offload=true"]]
RESUMED += [pytest.param([more], marks=FULL) for more in ("checkpoint.async_save=true", "train.compile=true")]


@pytest.mark.parametrize("more", RESUMED)
def test_stopped_training_resumes_with_same_losses(more, tmp_path):
    corpus = write_corpus(tmp_path / "corpus.txt")
    once = run(arguments(tmp_path / "once", corpus, *ON_GPU, *more), tmp_path, timeout=300)
    assert once.returncode == 0, once.stderr
    for overrides in (["train.stop_at=5"], ["resume=auto"]):
        part = run(arguments(tmp_path / "parts", corpus, *ON_GPU, *more, *overrides), tmp_path, timeout=300)
        assert part.returncode == 0, part.stderr
    expected, resumed = rows(tmp_path / "once"), rows(tmp_path / "parts")
    assert [row["step"] for row in resumed] == list(range(1, 9))
    assert [r["loss"] for r in resumed] == pytest.approx([r["loss"] for r in expected], rel=5e-3)
    assert all(0 < row["mfu"] < 1 and row["peak_memory_bytes"] > 0 for row in resumed)
    assert (checkpoint_of(tmp_path / "parts", 8) / "model.safetensors").exists()


MESHES = ["mesh.fsdp=2", "mesh.fsdp=2 mesh.zero=1", "mesh.dp=2", "mesh.tp=2", "mesh.cp=2", "mesh.pp=2"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("mesh", MESHES)
def test_two_gpus_train_as_one(mesh, tmp_path):
    corpus = write_corpus(tmp_path / "corpus.txt")
    for name, ranks, more in (("one", 1, []), ("two", 2, mesh.split())):
        done = run(arguments(tmp_path / name, corpus, *ON_GPU, *more), tmp_path, ranks=ranks, timeout=300)
        assert done.returncode == 0, done.stderr
    one, two = ([row["loss"] for row in rows(tmp_path / name)] for name in ("one", "two"))
    assert two == pytest.approx(one, rel=5e-3)


def test_preflight_passes_on_gpu(tmp_path):
    args = [sys.executable, "-m", "ndtrain.preflight", "recipe=llama_debug", "hardware.device=cuda"]
    done = subprocess.run([*args, f"run.dir={tmp_path}/run"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@FULL
def test_smoke_suite_runs_on_gpu(tmp_path):
    """Runs every kind of case, and the peers, with tiny shapes."""
    assert bench(["gpu", "suite=smoke", "device=cuda", f"folder={tmp_path}"]) == 0
    cases = json.loads((tmp_path / "gpu-smoke.json").read_text())["cases"]
    assert {name: row.get("why", "") for name, row in cases.items() if row["status"] != "measured"} == {}
    assert cases["tiny host waits"]["waits"] == {}
