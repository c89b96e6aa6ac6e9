"""precision.compute=fp8: the cast of a number, the three matmuls, and training against bf16."""

from collections.abc import Sequence
from dataclasses import dataclass
from unittest import mock

import numpy as np
import pytest
import torch

from ndtrain.config import Config, ConfigError, load_config, resolve
from ndtrain.data import microbatches
from ndtrain.engine.train_step import TrainingStep
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.mesh.sequence_sharding import SequenceSharding
from ndtrain.parallel.build import build_stages, initialise
from ndtrain.parallel.linear import fp8
from ndtrain.parallel.linear.accumulator import GradAccumulator, register
from ndtrain.parallel.linear.comm import Gathered
from ndtrain.parallel.linear.fp8 import Fp8Matmul, cast, multiplies_fp8, multiply, prepare_compile
from ndtrain.parallel.linear.matmul import MatmulImpl
from tests.lib.parity import make_batches, train
from tests.lib.ranks import run_ranks

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
STEP = {E4M3: 2**-4, E5M2: 2**-3}  # the largest relative rounding error
MODEL = [
    "model.vocab_size=64", "model.hidden_size=64", "model.intermediate_size=128", "model.num_hidden_layers=2",
    "model.num_attention_heads=4", "model.num_key_value_heads=2", "train.seq_len=32", "train.micro_batch=4",
    "train.global_batch=8", "train.loss_chunk=64", "optim.lr=1e-2",
]  # fmt: skip


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


# -------------------------------------------------------------------------------------------------------------- casts


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("largest", [1.0, 0.875, 0.8790, 448.0, 57344.0, 3e38, 1e-32])
def test_cast_uses_full_range_without_overflow(dtype, largest):
    x = (drawn(64, 64).float().clamp(-1, 1) * largest).bfloat16()
    x[0, 0] = largest
    got = cast(x, dtype)
    top = got.values.float().abs().max().item()
    assert torch.finfo(dtype).max / 2.3 < top <= torch.finfo(dtype).max
    value = got.values.double() * got.unit.double()
    near = x.abs() > x.abs().max() * 2.0**-13
    assert ((value - x.double()).abs() <= STEP[dtype] * x.double().abs())[near].all()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_cast_of_part_equals_part_of_cast(dtype):
    """A rank that holds a part of a tensor casts it as a rank that holds all of it."""
    x = drawn(64, 64)
    x[0, 0] = 300.0  # without it the rest would get another scale
    whole, part = cast(x, dtype), cast(x[1:], dtype)
    assert whole.unit != part.unit
    near = x[1:].abs() > 300 * 2.0**-13
    here, there = part.values.float() * part.unit, whole.values[1:].float() * whole.unit
    assert near.float().mean() > 0.9 and torch.equal(here[near], there[near])


def test_multiply_gives_zero_for_zeros_and_nan_for_non_finite():
    assert not multiply(cast(torch.zeros(16, 16), E4M3), cast(drawn(16, 16), E4M3), torch.float32).any()
    for bad in (float("inf"), -float("inf"), float("nan")):
        x = drawn(16, 16)
        x[3, 4] = bad
        assert multiply(cast(x, E5M2), cast(drawn(16, 16), E4M3), torch.float32)[3].isnan().all(), bad


# ------------------------------------------------------------------------------------------------------ the products


def products_of(matmul: MatmulImpl, device: str = "cpu") -> list[torch.Tensor]:
    """Output, input gradient of two weights, and weight gradient (accumulated twice)."""
    x, dy, other = (drawn(48, n, seed=i).to(device) for i, n in enumerate((32, 64, 16)))
    w, v = (torch.nn.Parameter(drawn(n, 32, seed=n).to(device)) for n in (64, 16))
    with torch.no_grad():
        y = matmul.output(matmul.input(Gathered(x)).all(), matmul.weight(w, backward=False))
        x_NI, dys = matmul.input(Gathered(x)), [matmul.gradient(Gathered(g)).all() for g in (dy * 1e-4, other)]
        dx = matmul.input_gradient(dys, [matmul.weight(p, backward=True) for p in (w, v)])
        w.grad_dtype = torch.float32
        w.grad, accumulator = torch.full((64, 32), float("nan"), device=device), GradAccumulator()
        accumulator.open([w])
        for _ in range(2):
            assert matmul.weight_gradient(accumulator, w, dys[0], x_NI.all()) is None
    return [y, dx, w.grad]


def close(actual: list[torch.Tensor], expected: list[torch.Tensor], bound: float) -> None:
    for got, want in zip(actual, expected, strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        assert (got.double() - want.double()).norm() <= bound * want.double().norm()


def test_fp8_products_are_near_bf16():
    close(products_of(Fp8Matmul()), products_of(MatmulImpl()), 0.08)


def test_native_cpu_fp8_equals_emulation():
    """PyTorch's own fp8 matmul on CPU: too slow to train with, but called as the GPU's is."""
    with mock.patch.object(fp8, "multiplies_fp8", lambda device: True):
        try:
            native = products_of(Fp8Matmul())
        except RuntimeError as error:
            pytest.skip(f"this PyTorch has none: {error}")
    close(native, products_of(Fp8Matmul()), 1e-5)


@pytest.mark.full
def test_compiled_fp8_products_are_bitwise_equal():
    """This holds if the compiler rounds fused ops like separate ones."""
    x, w, v = drawn(48, 32), drawn(64, 32, seed=1), drawn(16, 32, seed=2)
    dys = [drawn(48, n, seed=n) * scale for n, scale in ((64, 1e-4), (16, 1.0))]

    def run(linear, *tensors):
        """An op before x and one after the outputs, which the compiler may fuse."""
        x_NI, *weights = (torch.nn.Parameter(t.clone()) for t in tensors)
        register(weights, GradAccumulator())
        with torch._inductor.config.patch(emulate_precision_casts=True):
            y, z = torch.compile(lambda a, b: linear(2 * a, b, [None, None]), fullgraph=True)(x_NI, weights)
            for weight in weights:
                weight.grad_dtype, weight.grad = torch.float32, torch.zeros(weight.shape)
            return [y, z, *torch.autograd.grad([y, z], [x_NI], dys), *(weight.grad for weight in weights)]

    prepare_compile()
    matmul, factors = Fp8Matmul(), [cast(t, E4M3) for t in (w, v)]
    casts, x_NI = [cast(dy, E5M2) for dy in dys], cast(2 * x, E4M3)
    outside = [matmul.output(x_NI, f) for f in factors]
    outside += [2 * matmul.input_gradient(casts, [f.t() for f in factors])]
    outside += [multiply(dy.t(), x_NI.t(), torch.float32) for dy in casts]
    for got, want in zip(run(matmul.in_graph, x, w, v), outside, strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)


@pytest.mark.gpu
def test_gpu_fp8_is_near_emulation():
    if not multiplies_fp8("cuda"):
        pytest.skip("a GPU without fp8 matmuls")
    on_gpu = [x.cpu() for x in products_of(Fp8Matmul(), "cuda")]
    close(on_gpu, products_of(Fp8Matmul()), 2e-3)


# ---------------------------------------------------------------------------------------------------------- training


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0).item()


@pytest.mark.full
def test_fp8_gradients_point_like_bf16():
    run = [*MODEL, "train.steps=1"]
    narrow, wide = (train(1, [*run, f"precision.compute={p}"]) for p in ("fp8", "bf16"))
    for name, want in wide.tensors["gradient"].items():
        assert 0.99 < cosine(narrow.tensors["gradient"][name], want) < 1, name
    assert narrow.losses[0] == pytest.approx(wide.losses[0], rel=1e-3)


@pytest.mark.full
def test_compiled_fp8_blocks_have_same_gradients(one_process):
    trained = train(1, [*MODEL, "train.steps=1", "precision.compute=fp8", "train.compile=true"])
    for name, want in one_process.tensors["gradient"].items():
        assert cosine(trained.tensors["gradient"][name], want) > 0.99, name


MESHES = {
    "dp2": (["mesh.dp=2"], 1e-6),  # other tokens, so other scales
    "zb_h1": (["mesh.pp=2", "schedule=zb_h1"], 1e-6),
    "recompute": (["mesh.fsdp=2", "recompute=full"], 1e-6),
    "tp2": (["mesh.tp=2"], 0.15),
    "tp2-overlap": (["mesh.tp=2", "tp.overlap=true"], 0.15),
    "cp2": (["mesh.cp=2"], 0.15),
}


@pytest.fixture(scope="module")
def one_process():
    return train(1, [*MODEL, "train.steps=1", "precision.compute=fp8"])


@pytest.mark.parametrize("mesh", [m if m == "dp2" else pytest.param(m, marks=pytest.mark.full) for m in MESHES])
def test_fp8_gradients_on_mesh_are_near_one_process(mesh, one_process):
    """If the bf16 sums are equal, the fp8 matmuls are too. Otherwise they differ by the rounding of fp8."""
    overrides, bound = MESHES[mesh]
    trained = train(2, [*MODEL, "train.steps=1", "precision.compute=fp8", *overrides])
    for name, want in one_process.tensors["gradient"].items():
        off = (trained.tensors["gradient"][name] - want).norm() / want.norm()
        assert off <= bound, f"{name} is off by {off:.3f}"


@dataclass
class Chain:
    """Replaces a corpus. The first token of a sequence determines which token follows which. Embedding and head alone,
    without the blocks, learn little of it."""

    cfg: Config

    def tokens(self, step: int, rows: Sequence[int]) -> np.ndarray:
        draw, vocabulary = np.random.default_rng(step), self.cfg.model.vocab_size
        tokens = np.empty((len(rows), self.cfg.train.seq_len + 1), dtype=np.int64)
        tokens[:, 0] = draw.integers(0, 4, len(rows))
        tokens[:, 1] = draw.integers(0, vocabulary, len(rows))
        for i in range(2, tokens.shape[1]):
            tokens[:, i] = (5 * tokens[:, i - 1] + 1 + vocabulary // 4 * tokens[:, 0]) % vocabulary
        return tokens

    def columns(self, step: int, rows: Sequence[int]) -> dict[str, np.ndarray]:
        """Every token counts."""
        return {}


LEARNING = ["train.seq_len=16", "train.global_batch=16", "train.micro_batch=16", "optim.lr=5e-3", "optim.warmup=5"]


def losses(precision: str, steps: int) -> np.ndarray:
    """The loss of each step of a training in one process."""
    cfg = resolve(load_config([*MODEL, *LEARNING, f"train.steps={steps}", f"precision.compute={precision}"]), 1)
    mesh = Mesh(MeshSpec.of(cfg.mesh), 0, torch.device("cpu"))
    stages = build_stages(cfg, mesh)
    initialise(stages, cfg.run.seed)
    step, rows = TrainingStep(cfg, mesh, stages), range(cfg.train.global_batch)
    batches = lambda i: microbatches(Chain(cfg), i, rows, cfg.train.micro_batch, SequenceSharding.of(cfg), 0, None)
    return np.array([step.run(i, batches(i)).wait().loss for i in range(1, steps + 1)])


@pytest.mark.full
def test_fp8_loss_falls_as_in_bf16():
    narrow, wide = losses("fp8", 60), losses("bf16", 60)
    # with AVX2 alone bf16 is computed otherwise, and means of ten steps differ by 2.1 %
    together = 20 if torch.backends.cpu.get_cpu_capability() == "AVX2" else 10
    means = [x.reshape(-1, together).mean(axis=1) for x in (narrow, wide)]
    print(f"means of {together} steps, fp8 and bf16:", *means)
    assert wide[-10:].mean() < 1.2, "without the blocks it comes to 1.6"
    assert (abs(means[0] / means[1] - 1) < 0.02).all()


# ------------------------------------------------------------------------------------------------------------ experts

EXPERTS = [
    *MODEL, "precision.compute=fp8", "model.model_type=qwen2_moe", "model.num_experts=4", "model.num_experts_per_tok=2",
    "model.moe_intermediate_size=20", "model.shared_expert_intermediate_size=32",
]  # fmt: skip


def weights_in_fp8(overrides: list[str]) -> set[tuple[int, ...]]:
    """The shapes of the weights that a step multiplies in fp8."""
    cfg = resolve(load_config([*EXPERTS, "train.steps=1", *overrides]), 1)
    mesh, shapes, cast_weight = Mesh(MeshSpec.of(cfg.mesh), 0, torch.device("cpu")), set(), Fp8Matmul.weight
    Fp8Matmul.weight = lambda self, w, backward: shapes.add(tuple(w.shape)) or cast_weight(self, w, backward)
    stages = build_stages(cfg, mesh)
    initialise(stages, cfg.run.seed)
    TrainingStep(cfg, mesh, stages).run(1, make_batches(cfg, mesh, 1, "none")).wait()
    return shapes


def test_fp8_covers_shared_expert_but_not_gate_or_routed():
    assert run_ranks(weights_in_fp8, 1, []) == [{(96, 64), (32, 64), (64, 64), (64, 32)}]


def test_fp8_refuses_shared_expert_of_indivisible_size():
    cfg = resolve(load_config([*EXPERTS, "model.shared_expert_intermediate_size=40"]), 1)
    with pytest.raises(
        ConfigError, match=r"mlp\.shared_expert\.gate_proj\.weight is \[40, 64\] on a rank, and fp8 needs"
    ):
        build_stages(cfg, Mesh(MeshSpec.of(cfg.mesh), 0, torch.device("cpu")))


def test_fp8_ignores_dense_size_without_dense_layers():
    resolve(load_config([*EXPERTS, "model.intermediate_size=72"]), 1)


# ------------------------------------------------------------------------------------------------------------- checks


@pytest.mark.parametrize(
    ("ranks", "overrides", "words"),
    [
        (1, ["model.hidden_size=72"], "model.hidden_size = 72 must be a multiple of 16"),
        (2, ["mesh.tp=2", "model.intermediate_size=144"], "model.intermediate_size / mesh.tp = 72 must be"),
        (4, ["mesh.tp=4", "model.num_key_value_heads=4", "model.head_dim=8"], "num_attention_heads x head_dim"),
        (2, ["mesh.cp=2", "train.seq_len=12"], "train.micro_batch x train.seq_len / mesh.cp = 24 must be"),
        (1, ["precision.params=fp64"], "precision.params=fp64 needs precision.compute=fp64 or fp32"),
    ],
)
def test_fp8_refuses_unsupported_settings(ranks, overrides, words):
    with pytest.raises(ConfigError) as error:
        resolve(load_config([*MODEL, "precision.compute=fp8", *overrides]), ranks)
    assert words in str(error.value) and "\n" not in str(error.value)
