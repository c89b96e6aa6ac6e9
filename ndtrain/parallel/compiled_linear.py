"""The matmuls of a compiled block. Their weight gradients go straight into the flat buffers.

A compiled graph would compute each weight gradient in the compute precision and return it. Autograd would then copy it
and add it. Here the whole backward of a matmul is one custom op. It computes the input's gradient, and accumulates the
weights' gradients in the precision of the buffers, like the backward outside compiled graphs
(`fused_grad_accumulation.py`).

The op adds to buffers that the graph does not see. They may not even exist during the forward, since fsdp allocates
them for a unit's backward. This is safe because of what the graph does see: the op returns the input's gradient, which
the next op needs. The op is therefore neither left out, nor run twice, nor run before the gradients of the outputs
exist. The weights that a graph saves for backward are the Parameters that it was called with, so the op finds the
buffer as their `.grad`.

Shape legend: N tokens, I in, O out.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ndtrain.model.opaque import opaque
from ndtrain.parallel.grad_accumulator import GradAccumulator

_accumulators = WeakIdKeyDictionary()  # parameter -> the accumulator of its gradient


def register(parameters: Iterable[nn.Parameter], accumulator: GradAccumulator) -> None:
    """Register the accumulator through which compiled graphs accumulate the gradients of these matrices."""
    for p in parameters:
        _accumulators[p] = accumulator


def accumulator_of(weight: Tensor) -> GradAccumulator:
    """Return the accumulator of a weight's gradient.

    Raises:
        RuntimeError: the graph passes a tensor that is not the Parameter that it was called with.
    """
    if weight not in _accumulators:
        raise RuntimeError(f"a compiled graph accumulates the gradient of an unknown weight {list(weight.shape)}")
    return _accumulators[weight]


def linear(x_NI: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Return x @ w.T + b for each weight, in a form that the compiler can trace. Autograd computes the gradients of
    biases."""
    return add_biases(apply(_Linear, x_NI, weights), biases)


def apply(function: type[torch.autograd.Function], x_NI: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Apply the function to x and any number of weights. Without gradients only its forward runs: the compiler would
    otherwise miscount a variable number of arguments."""
    if torch.is_grad_enabled():
        return function.apply(x_NI, *weights)
    return function.outputs(x_NI, weights)


def add_biases(ys: Iterable[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    return tuple(y if b is None else y + b for y, b in zip(ys, biases, strict=True))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_NI: Tensor, *weights_OI: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x_NI, *weights_OI)
        return _Linear.outputs(x_NI, weights_OI)

    @staticmethod
    def outputs(x_NI: Tensor, weights_OI: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(torch.mm(x_NI, w_OI.t()) for w_OI in weights_OI)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, *weights_OI = ctx.saved_tensors
        return linear_backward(grads, x_NI, weights_OI), *[None] * len(weights_OI)


@opaque
def linear_backward(dys_NO: Sequence[Tensor], x_NI: Tensor, weights_OI: Sequence[Tensor]) -> Tensor:
    """Return the gradient [N, I] of the input, which is the sum of dy @ w. Accumulate dy.T @ x for each weight."""
    dx_NI = torch.mm(dys_NO[0], weights_OI[0])
    for dy_NO, w_OI in zip(dys_NO[1:], weights_OI[1:], strict=True):
        dx_NI.addmm_(dy_NO, w_OI)
    for dy_NO, w_OI in zip(dys_NO, weights_OI, strict=True):
        accumulator_of(w_OI).accumulate_product(w_OI, dy_NO.t(), x_NI)
    return dx_NI


@linear_backward.register_fake
def _(dys_NO, x_NI, weights_OI):
    return x_NI.new_empty(x_NI.shape)
