"""Compiled code without a device: its graphs are traced and partitioned by PyTorch's compiler, and run on tensors
without memory.

The compiler fuses neighbouring elementwise operators and reductions into one kernel, and keeps their intermediate
results in registers. A result is stored in memory only if the graph returns it, or if an operator with a kernel of its
own reads it: a matmul, attention, an op of ndtrain.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import getitem
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Interpreter, Node

from ndtrain.plan.operators import multiplies


@contextmanager
def pretended_compiler() -> Iterator[None]:
    """Make `torch.compile` run such graphs within this context. Forget compiled code at its start and at its end."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    backend = aot_autograd(
        fw_compiler=_as_kernels,
        bw_compiler=_as_kernels,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    torch.compiler.reset()
    sizes_known = torch._dynamo.config.patch(automatic_dynamic_shapes=False, run_gc_after_compile=False)
    with (
        sizes_known,
        torch.compiler.set_stance("default", force_backend=lambda graph, inputs, **_: backend(graph, inputs)),
    ):
        yield
    torch.compiler.reset()


def _as_kernels(graph: GraphModule, inputs: Any) -> Callable[[list], Any]:
    """Return a function that runs the graph. It frees each input after its last use, as generated code does."""
    kernels = _Kernels(graph)

    def run(args: list) -> Any:
        try:
            return kernels.boxed_run(args)
        finally:
            kernels.env = {}  # otherwise it keeps the results alive

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


class _Kernels(Interpreter):
    """Runs a graph. It does not call operators without a kernel of their own, but allocates their results if stored."""

    def __init__(self, graph: GraphModule):
        super().__init__(graph)
        self._stored = stored_nodes(graph)

    def run_node(self, n: Node) -> Any:
        if n.op != "call_function" or _has_own_kernel(n.target):
            return super().run_node(n)
        if n not in self._stored:
            return None
        if _is_view(n):
            return super().run_node(n)
        return _made_like(n.meta["val"])


def stored_nodes(graph: GraphModule) -> set[Node]:
    """Return the nodes whose results are stored in memory, and views of such results that are read."""
    stored: set[Node] = set()
    for n in reversed(graph.graph.nodes):
        if n.op == "output" or (
            n.op == "call_function" and (_has_own_kernel(n.target) or (_is_view(n) and n in stored))
        ):
            stored.update(n.all_input_nodes)
    return stored


def _has_own_kernel(func: Any) -> bool:
    """Return True if the compiler calls the operator instead of generating code for it."""
    return isinstance(func, OpOverload) and (func.namespace not in ("aten", "prims") or multiplies(func))


def _is_view(n: Node) -> bool:
    """Return True if the result is a view of another node's result, or an item of it."""
    return n.target is getitem or getattr(n.target, "is_view", False)


def _made_like(value: Any) -> Any:
    """Return new tensors with the same shapes, strides and dtypes."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return type(value)(_made_like(v) for v in value) if isinstance(value, tuple | list) else value
