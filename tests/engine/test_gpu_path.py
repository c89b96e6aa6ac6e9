"""A step on a GPU never makes the host wait for the device, and uses the fastest attention kernel for the
run's shape."""

from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ndtrain.config import Config, ConfigError, LocalShapes, load_config, resolve, world_from_env
from ndtrain.engine.train_step import TrainingStep
from ndtrain.mesh.host_device import upload
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.model.attention.core import attend
from ndtrain.model.attention.kernels import GPU_KERNELS
from ndtrain.model.attention.scores import Scores
from ndtrain.model.attention.tiles import SequenceSlice, tiles
from ndtrain.parallel.build import build_stages, initialise
from ndtrain.parallel.kernel_choice import Measure, Shape, choose_kernel, sample_documents, seconds
from tests.lib.parity import make_batches
from tests.lib.ranks import run_ranks
from tests.parallel.test_parity_tp_cp import MODEL

# the host reads a value, or a shape depends on one
WAITS = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "bincount", "item")
INDEXED = ("index", "index_put_", "_index_put_impl_", "index_put")


class NoHostWait(TorchDispatchMode):
    """Raises at an op that on a GPU would make the host wait, whatever device it runs on here."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.partition(".")[0]
        by_mask = name in INDEXED and any(x is not None and x.dtype == torch.bool for x in args[1])
        if name in WAITS or by_mask:
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **kwargs or {})


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
        initialise(stages, cfg.run.seed)
        step = TrainingStep(cfg, mesh, stages)
        for number in (1, 2):
            step.run(number, [b.to(mesh.device) for b in make_batches(cfg, mesh, number, "uneven")]).wait()
        batches = [b.to(mesh.device) for b in make_batches(cfg, mesh, 3, "uneven")]
        with NoHostWait() if device == "cpu" else no_sync_on_gpu():
            report = step.run(3, batches)
        losses.append(report.wait().loss)
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
    "one process": (1, ONE_PROCESS[:2]),
    "one process, other modes": (1, ONE_PROCESS[2:]),
    "tp": (2, [["mesh.tp=2", *PACKED]]),
    "tp, other ways": (2, [["mesh.tp=2", "tp.overlap=true"], ["mesh.tp=2", "tp.sequence_parallel=false"]]),
    "cp": (2, [["mesh.cp=2", "recompute=full", *PACKED], ["mesh.cp=2", "cp.kind=ulysses", *PACKED]]),
    "fsdp": (2, [["mesh.fsdp=2"], ["mesh.fsdp=2", "mesh.zero=1", *PACKED], ["mesh.dp=2", "recompute=full"]]),
    "pp": (2, [["mesh.pp=2", *PACKED], ["mesh.pp=2", "schedule=zb_h1", "model.tie_word_embeddings=true"]]),
}


SAMPLED = ("tp",)


@pytest.mark.parametrize("name", [n if n in SAMPLED else pytest.param(n, marks=pytest.mark.full) for n in MESHES])
def test_steady_steps_never_wait_for_device(name):
    ranks, several = MESHES[name]
    first, *others = run_ranks(steady_steps, ranks, several)
    assert all(0 < loss < 20 for loss in first)
    assert all(other == first for other in others)


def test_no_host_wait_detects_waits():
    """The tests above rely on this."""
    x = torch.arange(4.0)
    for wait in (x.sum().item, lambda: x[x > 1], lambda: bool((x > 1).any()), lambda: x.nonzero()):
        with pytest.raises(AssertionError, match="waits for the device"), NoHostWait():
            wait()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("overrides", [*ONE_PROCESS, ["train.compile=true", "precision.compute=bf16"]])
def test_steady_steps_never_wait_on_gpu(overrides):
    steady_steps([overrides], "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_upload_does_not_wait():
    with no_sync_on_gpu():
        uploaded = upload([1.0, 2.5], torch.device("cuda"))
    assert uploaded.tolist() == [1.0, 2.5]


# ----------------------------------------------------------------------------------------------------------- attention

BF16 = [*MODEL, "train.micro_batch=4", "precision.compute=bf16"]
# on one rank flash is fastest, on the other efficient, and together cudnn; there is no more memory for math on one
TIMES = (
    {"flash": 1.0, "cudnn": 1.5, "efficient": 6.0, "flex": 0.7, "math": 0.5},
    {"flash": 4.0, "cudnn": 1.4, "efficient": 1.0, "flex": 0.9, "math": float("inf")},
)


def shape_of(cfg: Config) -> Shape:
    return Shape.of(cfg.model, LocalShapes.of(cfg), cfg.data.pack, torch.bfloat16)


def chosen(cfg: Config, mesh: Mesh, measure: Measure) -> tuple[str, str]:
    return choose_kernel(cfg.hardware.attention, shape_of(cfg), mesh, measure)


def choice(overrides: list[str]) -> tuple[str, str]:
    rank, _, world = world_from_env()
    cfg = resolve(load_config([*BF16, *overrides]), world)
    mesh = Mesh(MeshSpec.of(cfg.mesh), rank, torch.device("cpu"))
    return choose_kernel(
        cfg.hardware.attention, shape_of(cfg), mesh, lambda name, shape, device: TIMES[rank][name] / 1e3
    )


def test_ranks_choose_fastest_kernel_together():
    (best, words), other = run_ranks(choice, 2, ["mesh.fsdp=2"])
    assert other == (best, words)
    assert best == "cudnn"
    assert words.endswith("flash 2.50, cudnn 1.45, efficient 3.50, math does not run")


@pytest.mark.parametrize(
    ("overrides", "best"),
    [([], "math"), (["hardware.attention=efficient"], "efficient"), (["model.alibi=true"], "math")],
)
def test_requested_kernel_is_chosen(overrides, best):
    assert choice(overrides)[0] == best


TRIED = {
    "plain": ([], ["flash", "cudnn", "efficient", "math"]),
    "packed": (["data.pack=true"], ["flash", "efficient", "math"]),
    "window": (["model.model_type=mistral", "model.sliding_window=5"], ["flash", "cudnn", "efficient", "math"]),
    "capped, packed": (["model.attn_logit_softcapping=5", "data.pack=true"], ["flex", "math"]),
}


@pytest.mark.parametrize("name", TRIED)
def test_kernels_are_timed_on_shapes_of_run(name):
    """cuDNN would build a graph for each document length. Only two kernels know changed scores."""
    overrides, names = TRIED[name]
    tried = {}
    cfg = resolve(load_config([*BF16, *overrides]), 1)
    mesh = Mesh(MeshSpec.of(cfg.mesh), 0, torch.device("cpu"))
    choose_kernel(
        cfg.hardware.attention, shape_of(cfg), mesh, lambda name, shape, device: tried.setdefault(name, shape) and 1.0
    )
    assert list(tried) == names
    for shape in tried.values():
        m, scores = cfg.model, shape.scores
        assert (scores.window, scores.softcap) == (m.sliding_window, m.attn_logit_softcapping)
        assert (scores.documents is not None) == cfg.data.pack
        assert not cfg.data.pack or all(len(row) > 3 and row[-1] < shape.T for row in scores.documents)


def test_requested_kernel_that_fails_is_an_error():
    cfg = resolve(load_config([*BF16, "hardware.attention=flash"]), 1)
    mesh = Mesh(MeshSpec.of(cfg.mesh), 0, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"hardware\.attention=flash does not run on this GPU"):
        chosen(cfg, mesh, lambda *_: float("inf"))


def test_timed_shape_is_shape_of_one_rank():
    overrides = ["mesh.cp=4", "cp.ulysses=2", "mesh.tp=2", "train.seq_len=32", "data.pack=true"]
    shape = shape_of(resolve(load_config([*BF16, *overrides]), 8))
    scores = Scores(documents=sample_documents(4, 16))
    assert shape == Shape(B=4, T=16, N=2, K=1, D=4, dtype=torch.bfloat16, in_tiles=True, scores=scores)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["hardware.attention=fast"], "hardware.attention=fast: no such choice"),
        (["hardware.attention=flash"], "does not support precision.compute=fp32: choose precision.compute=bf16"),
        (["hardware.attention=efficient", "model.alibi=true"], "does not support model.alibi"),
        (["hardware.attention=cudnn", "data.pack=true"], "a graph for each document length"),
        (
            ["hardware.attention=flex", "precision.compute=fp64", "precision.params=fp64"],
            "does not support precision.compute=fp64",
        ),
    ],
)
def test_unsupported_kernel_choice_is_refused(overrides, words):
    with pytest.raises(ConfigError, match=words):
        resolve(load_config([*MODEL, *overrides]), 1)


@pytest.mark.parametrize("name", list(GPU_KERNELS))
@pytest.mark.parametrize("heads", [2, 4])
def test_kernels_fit_pytorchs_signatures(name, heads):
    """The meta device computes only shapes: the ops accept our arguments and return the results we read."""
    whole = (SequenceSlice(0, 48, 0, 1),)
    (causal,) = tiles(whole, whole, 48)
    q, k, v = (
        torch.empty(2, 48, n, 16, dtype=torch.bfloat16, device="meta").transpose(1, 2) for n in (4, heads, heads)
    )
    out, lse = GPU_KERNELS[name].forward(q, k, v, causal, Scores())
    assert out.shape == q.shape and lse.shape == q.shape[:-1] and lse.dtype == torch.float32
    gradients = GPU_KERNELS[name].backward(torch.empty_like(out), q, k, v, out, lse, causal, Scores())
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("name", ["flash", "cudnn"])
def test_grouped_heads_are_not_repeated(name):
    """Keys and values reach the op with their own heads, and no other op makes tensors of their size."""
    whole = (SequenceSlice(0, 48, 0, 1),)
    (causal,) = tiles(whole, whole, 48)
    q, k, v = (torch.empty(2, 48, n, 16, dtype=torch.bfloat16, device="meta").transpose(1, 2) for n in (8, 2, 2))
    with Ops() as ops:
        out, lse = GPU_KERNELS[name].forward(q, k, v, causal, Scores())
        GPU_KERNELS[name].backward(torch.empty_like(out), q, k, v, out, lse, causal, Scores())
    kernels = [args for op, args in ops.seen if "attention" in op]
    assert len(kernels) == 2 and all(any(x is y for y in args) for args in kernels for x in (k, v))
    assert not [op for op, _ in ops.seen if any(word in op for word in ("repeat", "expand", "clone", "copy", "sum"))]


class Ops(TorchDispatchMode):
    """The ops that ran, with their arguments."""

    def __init__(self):
        super().__init__()
        self.seen: list[tuple[str, tuple]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append((func.__name__, args))
        return func(*args, **kwargs or {})


def test_attend_with_named_kernel_equals_default():
    q, k = torch.randn(2, 8, 4, 8), torch.randn(2, 8, 2, 8)
    torch.testing.assert_close(attend(q, k, k, Scores(kernel="math")), attend(q, k, k, Scores()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("in_tiles", [False, True])
@pytest.mark.parametrize("name", list(GPU_KERNELS))
def test_kernels_agree_with_fp32_on_gpu(name, in_tiles):
    torch.manual_seed(0)
    shape = Shape(2, 256, 8, 2, 64, torch.bfloat16, in_tiles, Scores())
    assert 0 < seconds(name, shape, torch.device("cuda")) < 1
    q, k, v = (torch.randn(2, 256, n, 64, device="cuda", requires_grad=True) for n in (8, 2, 2))
    recall = (lambda make: make()) if in_tiles else None
    half = [x.bfloat16() for x in (q, k, v)]
    grad = torch.randn_like(q)
    want = torch.autograd.grad(attend(q, k, v, Scores(kernel="math")), (q, k, v), grad)
    got = torch.autograd.grad(attend(*half, Scores(kernel=name), recall), (q, k, v), grad.bfloat16())
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() < 2e-2 * b.norm()
