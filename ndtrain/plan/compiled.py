"""Compiled code without a device: its graphs, cut and partitioned as PyTorch's compiler does it, and run operator by
operator on tensors without memory.

What the generated kernels keep in registers is not counted. A kernel of the compiler computes neighbouring elementwise
operators and reductions, so it stores only what the graph returns and what an operator that is no such kernel reads: a
matmul, attention, an op of ndtrain.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from operator import getitem
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Interpreter, Node

from ndtrain.parallel.allocations import fused
from ndtrain.plan.flops import multiplies


@contextmanager
def pretended_compiler() -> Iterator[None]:
    """Inside, what is compiled becomes such a graph. Compiled code of before is forgotten."""
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
    with torch.compiler.set_stance("default", force_backend=lambda graph, inputs, **_: backend(graph, inputs)):
        yield
    torch.compiler.reset()


def _as_kernels(graph: GraphModule, inputs: Any) -> Callable[[list], Any]:
    """What runs the graph. It frees each input after its last use, as the compiler's code does."""
    kernels = _Kernels(graph)

    def run(args: list) -> Any:
        return kernels.boxed_run(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


class _Kernels(Interpreter):
    """Runs a graph; what is not stored is no memory."""

    def __init__(self, graph: GraphModule):
        super().__init__(graph)
        self._stored = stored_nodes(graph)

    def run_node(self, n: Node) -> Any:
        with nullcontext() if n in self._stored else fused():
            return super().run_node(n)


def stored_nodes(graph: GraphModule) -> set[Node]:
    """The nodes whose results lie in memory."""
    own_kernel = {n for n in graph.graph.nodes if n.op == "call_function" and _has_own_kernel(n.target)}
    read = [source for n in graph.graph.nodes if n in own_kernel or n.op == "output" for source in n.all_input_nodes]
    return own_kernel | {_base(source) for source in read} | {n for n in graph.graph.nodes if n.op != "call_function"}


def _has_own_kernel(func: Any) -> bool:
    """Whether the compiler calls the operator instead of generating code for it."""
    return isinstance(func, OpOverload) and (func.namespace not in ("aten", "prims") or multiplies(func))


def _base(node: Node) -> Node:
    """The node that makes the memory that a view or an item of this one is in."""
    while node.op == "call_function" and (node.target is getitem or getattr(node.target, "is_view", False)):
        node = node.all_input_nodes[0]
    return node
