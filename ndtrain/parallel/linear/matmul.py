"""The matmuls of y = x @ w.T and of its gradients, outside of compiled graphs and inside.

A compiled graph would compute each weight gradient in the compute precision and return it. Autograd would then copy it
and add it. Here the whole backward of a matmul is one custom op. It computes the input's gradient, and accumulates the
weights' gradients in the precision of the buffers, like the backward outside compiled graphs.

The op adds to buffers that the graph does not see. They may not even exist during the forward, since fsdp allocates
them for a unit's backward. This is safe because of what the graph does see: the op returns the input's gradient, which
the next op needs. The op is therefore neither left out, nor run twice, nor run before the gradients of the outputs
exist. The weights that a graph saves for backward are the Parameters that it was called with, so the op finds the
buffer as their `.grad`.

Shape legend: N tokens, I in, O out.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ndtrain.model.opaque import opaque
from ndtrain.parallel.linear.accumulator import GradAccumulator, accumulator_of
from ndtrain.parallel.linear.comm import Gathered


class MatmulImpl:
    """The matmuls, and the preparation of their factors. This class leaves the factors as they are.

    Attributes:
        compiled: `in_graph` as an autograd Function. Each implementation has one of its own, because a compiler passes
            only tensors and constants to a Function.
    """

    compiled: type[torch.autograd.Function]

    def of_weight(self, w_OI: Tensor) -> "MatmulImpl":
        """Return the implementation that multiplies by this weight."""
        return self

    def input(self, x: Gathered) -> Gathered:
        return x

    def gradient(self, dy: Gathered) -> Gathered:
        return dy

    def weight(self, w_OI: Tensor, backward: bool) -> Any:
        """Prepare the weight as a factor of `output`, or with `backward` as a factor of `input_gradient`."""
        return w_OI

    def output(self, x_NI: Any, w_OI: Any) -> Tensor:
        return torch.mm(x_NI, w_OI.t())

    def input_gradient(self, dys: Sequence[Any], weights: Sequence[Any]) -> Tensor:
        """Return the sum of dy_NO @ w_OI, [N, I]."""
        dx_NI = torch.mm(dys[0], weights[0])
        for dy, w in zip(dys[1:], weights[1:], strict=True):
            dx_NI.addmm_(dy, w)
        return dx_NI

    def weight_gradient(self, accumulator: GradAccumulator, w: nn.Parameter, dy_NO: Any, x_NI: Any) -> None:
        """Accumulate dy.T @ x."""
        accumulator.accumulate_product(w, dy_NO.t(), x_NI)

    # ------------------------------------------------------------------------------------ inside of compiled graphs

    def in_graph(self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """Return x @ w.T + b for each weight, in a form that the compiler can trace. Autograd computes the gradients of
        biases. Without gradients only the forward runs: the compiler would otherwise miscount a variable number of
        arguments."""
        ys = self.compiled.apply(x, *weights) if torch.is_grad_enabled() else self.outputs(x, weights)
        return tuple(y if b is None else y + b for y, b in zip(ys, biases, strict=True))

    def outputs(self, x_NI: Any, weights_OI: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return x @ w.T for each weight."""
        return tuple(self.output(x_NI, self.weight(w_OI, backward=False)) for w_OI in weights_OI)

    def backward(self, dys_NO: Sequence[Tensor], x_NI: Tensor, weights_OI: Sequence[Tensor]) -> Tensor:
        """Return the gradient [N, I] of the input, and accumulate the weights' gradients, in one custom op."""
        return linear_backward(dys_NO, x_NI, weights_OI)


class WideMatmul(MatmulImpl):
    """Matmuls of an input in fp32 or wider with a weight that may be narrower."""

    def weight(self, w_OI: Tensor, backward: bool) -> Tensor:
        return w_OI.to(torch.promote_types(w_OI.dtype, torch.float32))


PLAIN_MATMUL, WIDE_MATMUL = MatmulImpl(), WideMatmul()


def plain_gradients(
    accumulator: GradAccumulator, dys_NO: Sequence[Tensor], x_NI: Tensor, weights_OI: Sequence[Tensor]
) -> Tensor:
    """Return the gradient [N, I] of the input, which is the sum of dy @ w. Accumulate dy.T @ x for each weight."""
    lefts_ON = [dy_NO.t() for dy_NO in dys_NO]  # here, because after a large product a view costs twenty times as much
    dx_NI = PLAIN_MATMUL.input_gradient(dys_NO, weights_OI)
    for w_OI, left_ON in zip(weights_OI, lefts_ON, strict=True):
        accumulator.accumulate_product(w_OI, left_ON, x_NI)
    return dx_NI


class _CompiledLinear(torch.autograd.Function):
    """y_i = x @ w_i.T in a compiled graph."""

    @staticmethod
    def forward(ctx, x_NI: Tensor, *weights_OI: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x_NI, *weights_OI)
        return PLAIN_MATMUL.outputs(x_NI, weights_OI)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, *weights_OI = ctx.saved_tensors
        return PLAIN_MATMUL.backward(grads, x_NI, weights_OI), *[None] * len(weights_OI)


MatmulImpl.compiled = _CompiledLinear


@opaque
def linear_backward(dys_NO: Sequence[Tensor], x_NI: Tensor, weights_OI: Sequence[Tensor]) -> Tensor:
    """Compute `plain_gradients` in a compiled graph."""
    return plain_gradients(accumulator_of(weights_OI), dys_NO, x_NI, weights_OI)


@linear_backward.register_fake
def _(dys_NO, x_NI, weights_OI):
    return x_NI.new_empty(x_NI.shape)
