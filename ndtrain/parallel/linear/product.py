"""The product of tokens with weights that share an input, with gradients written straight into the flat buffers.

Autograd makes each weight gradient as a tensor of its own and then adds it to `.grad`. Here the matmul accumulates in
place, as Megatron-LM's gradient-accumulation fusion does: no zeroing, no temporary, no addition afterwards.

Shape legend: N tokens, I in, O out.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from ndtrain.parallel.linear.accumulator import FusedWeights, GradAccumulator, join_gradients, split_outputs
from ndtrain.parallel.linear.comm import LinearComm
from ndtrain.parallel.linear.matmul import PLAIN_MATMUL, MatmulImpl, plain_gradients


class _Linear(torch.autograd.Function):
    """y_i = x @ w_i.T + b_i, as a `Product` computes it.

    The gathered input is not saved: backward gathers it again. The Parameters are attributes, not saved tensors,
    because fsdp frees their storage between forward and backward. The weights are not inputs of autograd, so it
    accumulates no gradient for them.
    """

    @staticmethod
    def forward(ctx, product: "Product", recall: Callable | None, x_NI: Tensor, *biases: nn.Parameter | None):
        ctx.product, ctx.biases = product, biases
        ctx.save_for_backward(x_NI)
        if recall is None:
            return product.with_biases(x_NI, biases)
        return recall(partial(product.with_biases, x_NI, biases))

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (x_NI,) = ctx.saved_tensors
        db = [None if b is None else g.sum(0) for b, g in zip(ctx.biases, grads, strict=True)]
        return None, None, ctx.product.gradients(x_NI, join_gradients(grads, ctx.product.weights)), *db


@dataclass(eq=False)
class Product(ABC):
    """y_i = x @ w_i.T for several weights with one input.

    Attributes:
        accumulator: accumulates the weights' gradients.
        weights: the weights, as far as possible several as one.
        function: computes the outputs with a gradient.
    """

    accumulator: GradAccumulator
    weights: list[FusedWeights]
    function: ClassVar[type[torch.autograd.Function]] = _Linear

    def __call__(
        self, x_NI: Tensor, biases: Sequence[Tensor | None], recall: Callable | None = None
    ) -> tuple[Tensor, ...]:
        """Return y + b for each weight.

        Args:
            recall: a function that computes the outputs, or returns the saved ones; None: they are computed.
        """
        return self.function.apply(self, recall, x_NI, *biases)

    def with_biases(self, x_NI: Tensor, biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """Return y + b for each weight, without a graph."""
        ys = split_outputs(self.outputs(x_NI), self.weights)
        for y, bias_O in zip(ys, biases, strict=True):
            if bias_O is not None:
                y += bias_O
        return tuple(ys)

    @abstractmethod
    def outputs(self, x_NI: Tensor) -> Sequence[Tensor]:
        """Return x @ w.T for each of `weights`."""

    @abstractmethod
    def gradients(self, x_NI: Tensor, dys_NO: Sequence[Tensor]) -> Tensor:
        """Accumulate the weights' gradients and return the input's gradient."""


@dataclass(eq=False)
class LocalProduct(Product):
    """A product without communication, by `PLAIN_MATMUL`. The host has less to do for it."""

    def __post_init__(self) -> None:
        self._matrices = [s.weight for s in self.weights]

    def outputs(self, x_NI: Tensor) -> Sequence[Tensor]:
        return PLAIN_MATMUL.outputs(x_NI, self._matrices)

    def gradients(self, x_NI: Tensor, dys_NO: Sequence[Tensor]) -> Tensor:
        return plain_gradients(self.accumulator, dys_NO, x_NI, self._matrices)


@dataclass(eq=False)
class CommProduct(Product):
    """A product by any matmul, with the communication around it. x and y have the residual stream's tokens."""

    comm: LinearComm
    matmul: MatmulImpl

    def outputs(self, x: Tensor) -> Sequence[Tensor]:
        matmul, x_NI = self.matmul, self.matmul.input(self.comm.gather_input.gather(x))
        factors = [matmul.weight(s.weight, backward=False) for s in self.weights]
        reduce = self.comm.reduce_output.reduce
        outs = [reduce(lambda rows, w=w: matmul.output(x_NI.rows(rows), w), x_NI.order) for w in factors]
        return [out() for out in outs]

    def gradients(self, x: Tensor, dys: Sequence[Tensor]) -> Tensor:
        """Accumulate the weights' gradients and return the input's gradient. The input's gradient is computed first. It
        is then sent while the weights' gradients are computed."""
        comm, matmul = self.comm, self.matmul
        gathered = matmul.input(comm.gather_input.gather(x))
        arriving = [matmul.gradient(comm.reduce_output.gather(dy)) for dy in dys]
        factors = [matmul.weight(s.weight, backward=True) for s in self.weights]
        produce = lambda rows: matmul.input_gradient([dy.rows(rows) for dy in arriving], factors)
        dx = comm.gather_input.reduce(produce, arriving[0].order)
        x_NI = gathered.all()
        for s, dy in zip(self.weights, arriving, strict=True):
            matmul.weight_gradient(self.accumulator, s.weight, dy.all(), x_NI)
        return dx()
