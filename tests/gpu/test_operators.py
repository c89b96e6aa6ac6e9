"""Without a GPU: the calls of operators that only GPUs have, and whether they fit the operators' schemas.

The calls are made with tensors that have a shape and no memory, on the meta device; `is_cuda` is true for all. (Fake
CUDA tensors would be nearer, but where PyTorch was built without CUDA they refuse slices, `contiguous` and `out=`. The
fused optimizer, which needs none of these, gets fake CUDA tensors.)

PyTorch checks each call against the schemas of the installed release. The schemas of another release are in its
`torchgen/packaged/ATen/native/native_functions.yaml`, which every wheel of PyTorch holds:

    NATIVE_FUNCTIONS=FOLDER/native_functions.yaml python -m pytest tests/gpu/test_operators.py
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torchgen
import yaml
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ndtrain.model.attention.kernels import GPU_KERNELS
from ndtrain.model.attention.scores import Scores
from ndtrain.model.attention.tiles import Kind, Tile
from ndtrain.model.matmul_accumulate import accumulate_product
from ndtrain.parallel.linear import fp8
from ndtrain.parallel.linear.accumulator import GradAccumulator

BF16 = torch.bfloat16
INSTALLED = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
Call = tuple[torch._ops.OpOverload, tuple, dict[str, Any]]


class Recorded(TorchDispatchMode):
    """Keeps the calls of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def on_gpu(*shape: int, dtype: torch.dtype = BF16, device: str = "meta") -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def attention(kernel: str) -> None:
    """Forward and backward with grouped heads, without and with a causal mask."""
    q, k, v = on_gpu(2, 8, 64, 64), on_gpu(2, 4, 64, 64), on_gpu(2, 4, 64, 64)
    for kind in (Kind.FULL, Kind.CAUSAL):
        tile, whole = tile_of(kind), GPU_KERNELS[kernel]
        out, lse = whole.forward(q, k, v, tile, Scores(kernel=kernel))
        assert out.shape == q.shape and lse.shape == q.shape[:-1] and lse.dtype == torch.float32
        gradients = whole.backward(out, q, k, v, out, lse, tile, Scores(kernel=kernel))
        assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape]


def tile_of(kind: Kind) -> Tile:
    return mock.create_autospec(Tile, kind=kind, instance=True)


def weight_gradients() -> None:
    total, a, b = on_gpu(32, 16, dtype=torch.float32), on_gpu(32, 64), on_gpu(64, 16)
    for fresh in (True, False):
        accumulate_product(total, a, b, fresh=fresh)


def embedding_gradient() -> None:
    table = torch.nn.Parameter(on_gpu(32, 16, dtype=torch.float32))
    table.grad = on_gpu(32, 16, dtype=torch.float32)
    GradAccumulator().add_rows(table, torch.empty(8, dtype=torch.int64, device="meta"), on_gpu(8, 16))


def fp8_matmuls() -> None:
    with mock.patch.object(fp8, "multiplies_fp8", lambda device: True):
        x, w = fp8.cast(on_gpu(32, 16), torch.float8_e4m3fn), fp8.cast(on_gpu(48, 16), torch.float8_e4m3fn)
        dy = fp8.cast(on_gpu(32, 48), torch.float8_e5m2)
        assert fp8.multiply(x, w, BF16, fast=True).shape == (32, 48)
        assert fp8.multiply(dy.t(), x.t(), torch.float32).dtype == torch.float32


def fused_adamw() -> None:
    with FakeTensorMode():
        w, w_grad, scalar = (on_gpu(*shape, dtype=torch.float32, device="cuda") for shape in ((64,), (64,), ()))
        w.grad = w_grad
        adamw = torch.optim.AdamW([w], fused=True)
        adamw.found_inf = adamw.grad_scale = scalar
        adamw.step()


CALLS = {
    "flash": (lambda: attention("flash"), "_scaled_dot_product_flash_attention", 4),
    "cudnn": (lambda: attention("cudnn"), "_scaled_dot_product_cudnn_attention", 4),
    "efficient": (lambda: attention("efficient"), "_scaled_dot_product_efficient_attention", 4),
    "weight gradients": (weight_gradients, "addmm", 2),
    "embedding's gradient": (embedding_gradient, "index_put_", 1),
    "fp8": (fp8_matmuls, "_scaled_mm", 2),
    "fused AdamW": (fused_adamw, "_fused_adamw_", 1),
}  # what calls -> the operator's name (its backward's begins with it), and how often


@pytest.fixture(scope="module")
def schemas() -> dict[str, str]:
    """Operator -> schema, of the release that NATIVE_FUNCTIONS is of, or the installed one."""
    text = Path(os.environ.get("NATIVE_FUNCTIONS", INSTALLED)).read_text()
    functions = [entry["func"] for entry in yaml.load(text, yaml.CSafeLoader)]
    return {func.split("(")[0]: func for func in functions}


def calls_of(run: Callable[[], None], operator: str) -> Iterator[Call]:
    with Recorded() as recorded, mock.patch.object(Tensor, "is_cuda", True):
        run()
    return (call for call in recorded.calls if call[0]._schema.name.startswith(f"aten::{operator}"))


def misfit(schema: torch._C.FunctionSchema, call: Call) -> str:
    """How the call does not fit the schema, or nothing."""
    func, args, kwargs = call
    own, positional = func._schema, [a.name for a in schema.arguments if not a.kwarg_only]
    named = {a.name for a in own.arguments[: len(args)]} | set(kwargs)
    if [a.name for a in own.arguments[: len(args)]] != positional[: len(args)]:
        return f"positional arguments are {positional}"
    if unknown := named - {a.name for a in schema.arguments}:
        return f"knows no {unknown}"
    if missing := [a.name for a in schema.arguments if not a.has_default_value() and a.name not in named]:
        return f"also needs {missing}"
    return "" if len(schema.returns) == len(own.returns) else f"returns {len(schema.returns)} values"


@pytest.mark.parametrize("name", list(CALLS))
def test_gpu_operator_calls_match_schemas(name, schemas):
    run, operator, times = CALLS[name]
    calls = list(calls_of(run, operator))
    assert len(calls) == times
    for call in calls:
        own = call[0]._schema
        key = own.name.removeprefix("aten::") + (f".{own.overload_name}" if own.overload_name else "")
        assert not misfit(torch._C.parse_schema(schemas[key]), call), key
