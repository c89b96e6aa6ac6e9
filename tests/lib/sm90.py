"""The GPU code of compiled functions, without a GPU.

PyTorch's compiler captures a function's graphs on fake CPU tensors, since autograd aborts on fake CUDA tensors where
PyTorch was built without CUDA. Then the graphs are moved to a pretended H100, the compiler generates Triton kernels for
them, and Triton with its ptxas compiles each for sm_90. Nothing is run, so what is shown is that code exists, and how
many registers it takes.
"""

import contextlib
import importlib.util
import io
import re
from collections.abc import Callable, Iterator
from functools import partial, partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_map_only

CUDA = torch.device("cuda", 0)
# of an H100 (SXM)
DEVICE = {
    "type": "cuda", "index": 0, "multi_processor_count": 132, "cc": 90, "major": 9, "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024, "warp_size": 32,
}  # fmt: skip
GPU = SimpleNamespace(**DEVICE, minor=0, name="NVIDIA H100", gcnArchName="")


class Graph(NamedTuple):
    """A captured graph. `kind`: forward, backward, or inference (there is no backward)."""

    kind: str
    module: GraphModule


class Kernel(NamedTuple):
    """A Triton kernel, compiled for sm_90 in one configuration.

    Attributes:
        registers: of a thread.
        spilled: bytes that a thread stores to and loads from memory, since its registers do not suffice.
    """

    name: str
    config: str
    registers: int
    spilled: int


# ----------------------------------------------------------------------------------------------------- the graphs


def capture(run: Callable[[], Any]) -> list[Graph]:
    """The graphs of all functions that `run` compiles, on fake CPU tensors. Nothing is computed."""
    graphs: list[Graph] = []
    torch._dynamo.reset()
    compile_as = {"backend": _keeping(graphs)}
    with (
        mock.patch.object(torch, "compile", partial(torch.compile, **compile_as)),
        mock.patch.object(torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, **compile_as)),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        run()
    torch._dynamo.reset()
    return graphs


def _keeping(graphs: list[Graph]) -> Callable:
    """A backend that keeps graphs as the compiler's own backend would get them."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.compile_fx import select_decomp_table

    def keep(kind: str, module: GraphModule, _: Any) -> Callable:
        graphs.append(Graph(kind, module))
        return make_boxed_func(module.forward)

    return aot_autograd(
        fw_compiler=partial(keep, "forward"),
        bw_compiler=partial(keep, "backward"),
        inference_compiler=partial(keep, "inference"),
        decompositions=select_decomp_table,
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
    )


def _move(module: GraphModule) -> tuple[FakeTensorMode, list[Any]]:
    """Moves a graph to the pretended GPU. Returns the mode and the inputs of its fake tensors. Integers on the CPU stay
    there: they are handles, which the graph only passes on."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        for part in (m for m in module.modules() if isinstance(m, GraphModule)):  # functions of scores are parts
            for node in part.graph.nodes:
                if isinstance(node.kwargs.get("device"), torch.device):
                    node.kwargs = {**node.kwargs, "device": CUDA}
                if "val" in node.meta:
                    handle = partial(_is_handle, node) if part is module else lambda x: False
                    node.meta["val"] = tree_map_only(Tensor, partial(_on_gpu, handle), node.meta["val"])
            part.recompile()
    return mode, [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]


def _is_handle(node: Node, value: Tensor) -> bool:
    return node.op == "placeholder" and value.dtype == torch.int64 and value.ndim == 0


def _on_gpu(handle: Callable[[Tensor], bool], value: Tensor) -> Tensor:
    device = torch.device("cpu") if handle(value) else CUDA
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


# ------------------------------------------------------------------------------------------------------- the code


def generate(graph: Graph) -> dict[str, str]:
    """Name -> source of the Triton kernels that the compiler generates for a graph."""
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    modules: list[str] = []

    def keep_code(self: Any) -> Any:
        code, _ = self.codegen()
        modules.append(getattr(code, "value", code))
        return SimpleNamespace(call=lambda args: None, __file__="", key="")

    mode, inputs = _move(graph.module)
    with (
        pretended_gpu(),
        mock.patch.object(GraphLowering, "compile_to_module", keep_code),
        mock.patch("torch._inductor.compile_fx.fake_tensor_prop", lambda *_: mode),  # autograd aborts on some operators
        config.patch(force_disable_caches=True),
        tracing(TracingContext(mode)),
        V.set_fake_mode(mode),
    ):
        compile_fx_inner(graph.module, inputs, is_backward=graph.kind == "backward")
    return dict(re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)", modules[0], re.DOTALL))


@contextlib.contextmanager
def pretended_gpu() -> Iterator[None]:
    """The compiler takes the machine to have one H100 and its driver."""
    import torch._inductor.scheduler
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.hints import DeviceProperties
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    properties = DeviceProperties(**DEVICE)
    replaced = {
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.device_count": lambda: 1,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.get_device_capability": lambda *_: (9, 0),
        "torch.cuda.get_device_name": lambda *_: GPU.name,
        "torch.cuda.get_device_properties": lambda *_: GPU,
        "torch.cuda.get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "torch.cuda.set_rng_state": lambda *_: None,
        "torch.cuda._exchange_device": lambda _: 0,
        "torch.cuda._maybe_exchange_device": lambda _: 0,
        "torch._inductor.scheduler.has_triton": lambda *_: True,
        "torch._higher_order_ops.flex_attention._permute_strides": lambda out, _: out,  # queries are contiguous here
    }
    target = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0)
    with contextlib.ExitStack() as stack:
        for name, function in replaced.items():
            stack.enter_context(mock.patch(name, function))
        stack.enter_context(mock.patch.object(DeviceProperties, "create", lambda _: properties))
        stack.enter_context(mock.patch.object(CudaInterface, "get_device_properties", lambda *_: GPU))
        stack.enter_context(mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None))
        stack.enter_context(mock.patch.object(driver, "_active", target))
        yield


def compile_kernel(name: str, source: str, folder: Path) -> list[Kernel]:
    """The kernel for sm_90, in each configuration that the compiler would choose from on a GPU.

    Args:
        folder: where the source is written to, since Triton reads functions from files.
    """
    from torch._inductor.runtime import triton_heuristics

    path = folder / f"{name}.py"
    path.write_text(source)
    with pretended_gpu():
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kernel = getattr(module, name)
        return [_compiled(kernel, config, triton_heuristics) for config in kernel.configs]


def _compiled(kernel: Any, config: Any, heuristics: Any) -> Kernel:
    """One configuration of a kernel. ptxas tells registers and spills."""
    from triton import knobs

    log = io.StringIO()
    with knobs.nvidia.scope(), knobs.compilation.scope(), contextlib.redirect_stdout(log):
        knobs.nvidia.dump_ptxas_log, knobs.compilation.always_compile = True, True
        kernel._precompile_config(config)
    number = lambda pattern: [int(n) for n in re.findall(pattern, log.getvalue())]
    registers, spilled = number(r"Used (\d+) registers"), number(r"(\d+) bytes spill (?:stores|loads)")
    assert registers and spilled, f"ptxas said nothing of {kernel.fn.__name__}: {log.getvalue()}"
    return Kernel(kernel.fn.__name__, str(config), max(registers), sum(spilled))
