"""Without a GPU: the compiler generates GPU code for every compiled piece at 1B's and 8B's shapes, and Triton's ptxas
compiles it for sm_90. No register is spilled, but for what PyTorch's own template of FlexAttention spills.

    pip install --target FOLDER triton
    PYTHONPATH=FOLDER python -m pytest --full tests/gpu/test_sm90.py -s      # prints kernels, registers and spills

A piece is a function without arguments that calls what is compiled, the kinds of its graphs, and the options of the
compiler; more belong in `PIECES`.
"""

import importlib.util
import time
from functools import partial
from unittest import mock

import pytest
import torch
from torch._inductor import config
from torch.nn.attention import flex_attention as pytorch_flex

from ndtrain.config import load_config, resolve, resolved
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.model import flops, objective
from ndtrain.model.attention import flex
from ndtrain.model.attention.scores import AttentionMod, Scores, alibi_slopes
from ndtrain.model.attention.tiles import SequenceSlice
from ndtrain.optim import rounded_adamw
from ndtrain.parallel.build import build_stages
from ndtrain.parallel.linear import fp8
from tests.lib.sm90 import DEVICE, capture, compile_kernel, generate

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton: pip install triton"),
]
BF16 = torch.bfloat16
ONE_BLOCK = [
    "model.num_hidden_layers=1", "mesh.fsdp=1", "mesh.zero=1", "train.compile=true", "train.global_batch=1",
    "data.pack=true", "recompute=none",
]  # fmt: skip


def block_and_loss(recipe: str, precision: str) -> None:
    """Forward and backward of a block, and the loss, on one microbatch of the recipe. Attention is a call of its own in
    the graph, as it is with packed documents."""
    cfg = resolve(load_config([f"recipe={recipe}", f"precision.compute={precision}", *ONE_BLOCK]), 1)
    stages = build_stages(cfg, Mesh(MeshSpec.of(cfg.mesh), 0, torch.device("cpu")))
    (block,), head = [s for _, s in stages.in_order if s.is_block], stages.in_order[-1][1]
    ids = torch.zeros(1, cfg.train.seq_len, dtype=torch.int64)
    context = stages.context(ids, ids, BF16, documents=((0,),))
    x = torch.empty(cfg.train.seq_len, cfg.model.hidden_size, dtype=BF16, requires_grad=True)
    y = block.run(x, context)
    stages.units.open(block.units[0])
    stages.units.attach(block.units[0])
    y.backward(torch.empty_like(y))
    stages.units.open(head.units[0])
    stages.units.attach(head.units[0])
    head.run(x, context)


def bf16_moments(recipe: str) -> None:
    """The update of a block's matrices, as many elements as a rank of eight has of them. (On a GPU the number is not
    compiled in.)"""
    cfg = resolve(load_config([f"recipe={recipe}", "optim.state_dtype=bf16"]), 8)
    elements, tensors = flops.block_parameters(cfg.model) // 8, 7
    buffers = [torch.empty(elements, dtype=dtype) for dtype in (torch.float32, torch.float32, BF16, BF16)]
    places = torch.zeros(tensors, len(rounded_adamw.Place._fields), dtype=torch.int32)
    keys = torch.zeros(tensors, 2, dtype=torch.int32)
    scalars = rounded_adamw.Scalars(*(torch.zeros(()) for _ in rounded_adamw.Scalars._fields))
    with torch.no_grad():
        torch.compile(rounded_adamw.update, dynamic=False)(*buffers, places, keys, scalars, True, 0)


def flex_attention(recipe: str) -> None:
    """FlexAttention of packed documents in a window, with capped scores and ALiBi, forward and backward."""
    cfg = resolve(load_config([f"recipe={recipe}"]), 8)
    m, T = cfg.model, cfg.train.seq_len
    heads = [m.num_attention_heads, m.num_key_value_heads, m.num_key_value_heads]
    q, k, v = (torch.empty(1, n, T, resolved(m.head_dim), dtype=BF16, requires_grad=True) for n in heads)
    whole = (SequenceSlice(0, T, 0, 1),)
    slopes = alibi_slopes(m.num_attention_heads)
    scores = Scores(window=1024, softcap=30.0, slopes=slopes, documents=((0, 1000, 5000),), kernel="flex")
    call = flex.flex_call(scores, whole, whole, T, q)
    operations = flex.Operations(scores.window, scores.softcap, AttentionMod(), 0)
    inputs = call._inputs(q, scores)
    kernel = torch.compile(partial(flex.attention, operations), dynamic=False, fullgraph=True)
    with mock.patch.object(pytorch_flex, "_validate_device", lambda q, k, v: None):  # it refuses a backward on CPU
        out, lse = kernel(q, k, v, inputs)
        torch.autograd.backward((out, lse), (torch.empty_like(out), torch.empty_like(lse)))


RECIPES = ("llama3_2_1b", "llama3_8b")
GRAPHS = ["forward", "backward", "inference", "inference"]  # the block's, and the loss's two pieces
PIECES = (
    {
        f"{recipe} {precision}": (partial(block_and_loss, recipe, precision), GRAPHS, {})
        for recipe in RECIPES
        for precision in ("bf16", "fp8")
    }
    | {
        f"{recipe} bf16 moments": (partial(bf16_moments, recipe), ["inference"], rounded_adamw.exact_options())
        for recipe in RECIPES
    }
    | {f"{recipe} FlexAttention": (partial(flex_attention, recipe), ["forward", "backward"], {}) for recipe in RECIPES}
)


@pytest.fixture(autouse=True)
def a_gpu_with_fp8():
    """Matmuls of fp8 are those of a GPU. What an earlier test has compiled is made anew, by the capturing compiler."""
    objective.COMPILED.clear()
    with mock.patch.object(fp8, "multiplies_fp8", lambda device: True):
        yield
    objective.COMPILED.clear()


@pytest.mark.parametrize("name", list(PIECES))
def test_generated_sm90_kernels_compile_without_spills(name, tmp_path):
    began, (run, kinds, options) = time.monotonic(), PIECES[name]
    graphs = capture(run)
    assert [graph.kind for graph in graphs] == kinds
    kernels = []
    for graph in graphs:
        with config.patch(options):
            sources = generate(graph)
        assert sources, f"no kernel for {graph.kind}"
        for kernel, source in sources.items():
            kernels.append(compile_kernel(kernel, source, tmp_path))
    of_all = [k for configurations in kernels for k in configurations]
    least = lambda what: [min(getattr(k, what) for k in configurations) for configurations in kernels]
    print(
        f"{name}: {len(kernels)} kernels in {len(of_all)} configurations for sm_90, at most {max(least('registers'))} "
        f"registers, {sum(k.spilled for k in of_all)} bytes spilled, {time.monotonic() - began:.0f} s"
    )
    generated = [configurations for configurations in kernels if not configurations[0].name.startswith("triton_tem_")]
    assert not any(min(k.spilled for k in configurations) for configurations in generated)  # a template is PyTorch's


def test_compile_kernel_reports_spills(tmp_path):
    """A kernel that keeps more values at once than a thread has registers."""
    source = f"""
import triton, triton.language as tl
from torch._inductor.runtime import triton_heuristics
from torch._inductor.runtime.hints import DeviceProperties
@triton_heuristics.pointwise(
    size_hints={{'x': 4096}}, filename=__file__,
    triton_meta={{'signature': {{'at': '*fp32', 'xnumel': 'i32', 'XBLOCK': 'constexpr'}}, 'constants': {{}},
                 'device': DeviceProperties(**{DEVICE!r}), 'configs': [{{(0,): [['tt.divisibility', 16]]}}]}},
    inductor_meta={{'grid_type': 'Grid1D', 'kernel_name': 'wide', 'mutated_arg_names': [], 'min_elem_per_thread': 0}},
    min_elem_per_thread=0)
@triton.jit
def wide(at, xnumel, XBLOCK: tl.constexpr):
    rows = tl.arange(0, 256)[:, None]
    x = tl.load(at + rows * 256 + tl.arange(0, 256)[None, :])
    tl.store(at + rows * 256 + tl.arange(0, 256)[None, :], x / tl.sum(x, 0)[None, :] * tl.max(x, 1)[:, None])
"""
    assert max(k.spilled for k in compile_kernel("wide", source, tmp_path)) > 0
