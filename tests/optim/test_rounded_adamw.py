"""AdamW with bf16 moments: compiled to one kernel, and operation by operation, it has the bits that NumPy computes."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from ndtrain.config import load_config, resolve
from ndtrain.engine.train_step import TrainingStep
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.mesh.row_map import RowMap
from ndtrain.optim import TensorSlice, rounded_adamw
from ndtrain.optim.rounded_adamw import RoundedAdamW
from ndtrain.optim.rounding import keys
from ndtrain.parallel.build import build_stages, initialise
from ndtrain.parallel.grad_stats import GradStats
from tests.parallel.test_parity_tp_cp import MODEL

LR, BETAS, EPS, DECAY = 3e-3, (0.9, 0.95), 1e-8, 0.1
CONTIGUOUS, ROWS = RowMap(12345, 1 << 20, 1 << 20), RowMap(7, 24, 96)  # a whole tensor; columns of one over tp
BEYOND = RowMap((1 << 32) - 50, 1 << 40, 1 << 40)  # indices beyond 32 bits wrap
ODD = torch.tensor([0.0, -0.0, 1e-42, -3e-39, 1e-20, 1e19, -3e38, 1.0])  # a square that underflows, or overflows


def slices_of(cuts: list[int], maps: list[RowMap]) -> list[TensorSlice]:
    """Tensors between the cuts; each slice begins at the tensor's element 13."""
    layouts = [SimpleNamespace(name=f"tensor.{i}", row_map=m) for i, m in enumerate(maps)]
    return [TensorSlice(slice(a, b), t, 13) for (a, b), t in zip(pairwise(cuts), layouts, strict=True)]


def state_of(n: int, seed: int) -> dict[str, Tensor]:
    draw = lambda: torch.randn(n, generator=generator)
    generator = torch.Generator().manual_seed(seed)
    m, v = (draw() * 1e-3).bfloat16(), (draw() * 1e-3).square().bfloat16()
    v[::7] = torch.tensor(1e-40).bfloat16()  # no normal number
    return {"weight": draw(), "exp_avg": m, "exp_avg_sq": v}


def grad_of(n: int, seed: int, special: Tensor) -> Tensor:
    grad = torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 1e-3
    at = torch.arange(0, n, 11)
    grad[at] = special[at // 11 % len(special)]
    return grad


def train(slices: list[TensorSlice], special: Tensor, device: str = "cpu", scaled: bool = True) -> dict[str, Tensor]:
    """Three updates, of which the second is skipped."""
    n = slices[-1].at.stop
    state = {name: x.to(device) for name, x in state_of(n, n).items()}
    weight = state.pop("weight")
    adamw = RoundedAdamW([{"params": [weight], "weight_decay": DECAY}], {weight: slices}, LR, BETAS, EPS)
    adamw.state[weight] = {"step": torch.zeros((), device=device), **state}
    if scaled:
        adamw.grad_scale = torch.tensor(1.7, dtype=torch.float64, device=device)
    for group in adamw.param_groups:
        for step in (1, 2, 3):
            group["number"], weight.grad = step, grad_of(n, step, special).to(device)
            adamw.found_inf = torch.tensor(float(step == 2), device=device)
            adamw.step()
            adamw.state[weight]["step"] += step != 2
    return {"weight": weight, **state}


def expected(slices: list[TensorSlice], special: Tensor, scaled: bool = True) -> dict[str, Tensor]:
    """The same by NumPy, whose every fp32 operation rounds once."""
    n, f = slices[-1].at.stop, np.float32
    w, m, v = (x.float().numpy() for x in state_of(n, n).values())
    at = slice(slices[0].at.start, n)
    for made, step in ((1, 1), (2, 3)):
        g = grad_of(n, step, special).numpy()[at]
        g = g / f(1.7) if scaled else g
        width = (1 - BETAS[1] ** made) ** 0.5
        rate, eps = f(LR * width / (1 - BETAS[0] ** made)), f(EPS * width)
        new_m = m[at] * f(BETAS[0]) + g * f(1 - BETAS[0])
        new_v = v[at] * f(BETAS[1]) + g * g * f(1 - BETAS[1])
        w[at] = w[at] * f(1 - LR * DECAY) - new_m * rate / (np.sqrt(new_v) + eps)
        bits = np.concatenate([random_bits(piece, step) for piece in slices])
        m[at], v[at] = rounded(new_m, bits >> 16), rounded(new_v, bits & 0xFFFF)
    moments = (torch.from_numpy(x).bfloat16() for x in (m, v))
    return dict(zip(("weight", "exp_avg", "exp_avg_sq"), (torch.from_numpy(w), *moments), strict=True))


def random_bits(piece: TensorSlice, step: int) -> np.ndarray:
    """uint32 for each element, from its offset in the whole tensor."""
    first, length, stride = piece.tensor.row_map
    row, column = np.divmod(piece.start + np.arange(piece.at.stop - piece.at.start), length)
    key = [np.uint32(k % (1 << 32)) for k in keys(piece.tensor.name, step)]
    x = ((first + row * stride + column) % (1 << 32)).astype(np.uint32) ^ key[0]
    x = (x ^ x >> 16) * np.uint32(0x21F0AAAD) ^ key[1]
    x = (x ^ x >> 15) * np.uint32(0x735A2D97)
    return x ^ x >> 15


def rounded(x: np.ndarray, bits: np.ndarray) -> np.ndarray:
    return (x.view(np.uint32) + bits & np.uint32(0xFFFF0000)).view(np.float32)


def same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Bit for bit; what is no number is one in neither."""
    for name, x in want.items():
        mine = got[name].cpu()
        number = ~x.isnan()
        assert torch.equal(mine.isnan(), x.isnan()), name
        as_int = torch.int32 if x.dtype == torch.float32 else torch.int16
        assert torch.equal(mine.view(as_int)[number], x.view(as_int)[number]), name


@pytest.fixture
def compiled(monkeypatch):
    """However few elements there are."""
    torch._dynamo.reset()
    rounded_adamw.compiled_update.cache_clear()
    monkeypatch.setattr(rounded_adamw, "_WORTH_COMPILING", 0)


SIZES = [([3, 50, 1009, 1024], [CONTIGUOUS, ROWS, BEYOND]), ([0, 900, 1800, 33_333], [ROWS, CONTIGUOUS, ROWS])]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy warns where a square overflows
@pytest.mark.parametrize("at", range(len(SIZES)))
def test_eager_update_equals_numpy_bitwise(at, monkeypatch):
    monkeypatch.setitem(rounded_adamw._CHUNK, "cpu", 500)  # chunks within a row, and at their bounds
    slices = slices_of(*SIZES[at])
    same(train(slices, ODD), expected(slices, ODD))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_compiled_update_equals_numpy_bitwise_without_recompile(device, compiled):
    """One kernel for all tensors; other sizes compile nothing new."""
    counted = torch._dynamo.utils.counters["stats"]
    before = counted["unique_graphs"]
    for i, size in enumerate(SIZES):
        slices = slices_of(*size)
        same(train(slices, ODD, device), expected(slices, ODD))
        torch._dynamo.config.error_on_recompile = i == 0
    torch._dynamo.config.error_on_recompile = False
    assert counted["unique_graphs"] == before + 1


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("maps", [[CONTIGUOUS], [ROWS], [BEYOND, CONTIGUOUS], [ROWS] * 3 + [CONTIGUOUS] * 16])
def test_compiled_update_of_any_shape_equals_numpy(maps, scaled, compiled):
    """Vector lengths and their neighbours, one element, and what is infinite or no number."""
    special = torch.cat([ODD, torch.tensor([torch.inf, -torch.inf, torch.nan])])
    for n in (1, 2, 15, 16, 17, 31, 32, 33, 255, 4096, 10_007):
        cuts = [n * i for i in range(len(maps) + 1)]
        slices = slices_of(cuts, maps)
        want = expected(slices, special, scaled)
        same(train(slices, special, scaled=scaled), want)


@pytest.mark.full
def test_compiled_update_is_one_kernel(compiled):
    """The compiler generates one kernel for everything that the update reads and writes."""
    from torch._inductor import config, metrics

    slices = slices_of([0, 5000, 9000, 20_000], [CONTIGUOUS, CONTIGUOUS, CONTIGUOUS])
    with config.patch(force_disable_caches=True):
        metrics.reset()
        train(slices, ODD)
    assert metrics.generated_kernel_count == 1


def test_update_calls_are_at_most_two_per_unit(compiled, monkeypatch):
    """The compiled function is called once for the matrices of a unit, and once for its vectors."""
    cfg = resolve(load_config([*MODEL, "optim.state_dtype=bf16", "train.micro_batch=1"]), 1)
    mesh = Mesh(MeshSpec.of(cfg.mesh), 0, torch.device("cpu"))
    stages = build_stages(cfg, mesh)
    initialise(stages, cfg.run.seed)
    calls = []
    monkeypatch.setattr(rounded_adamw, "compiled_update", lambda: lambda *args: calls.append(args[0].numel()))
    optimizer = TrainingStep(cfg, mesh, stages).optimizer
    optimizer.begin(1, 1e-2, GradStats(torch.tensor(1.0), torch.tensor(2.0).double(), torch.tensor(True)))
    optimizer.finish()
    units = stages.units.units.values()
    assert sum(calls) == sum(t.local_numel for u in units for t in u.layout.tensors)
    assert len(calls) <= 2 * len(units)
