"""The model's weight ops with gradients written straight into the flat buffers.

Autograd makes each weight gradient as a tensor of its own and then adds it to `.grad`. Here the matmul accumulates in
place, as Megatron-LM's gradient-accumulation fusion does: no zeroing, no temporary, no addition afterwards.

Shape legend: N tokens, I in, O out, E hidden_size, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ndtrain.model import Ops
from ndtrain.model.loss import chunked_loss


class Gradients:
    """Writes into parameters' `.grad`. A *fresh* one holds nothing yet: the first write overwrites it."""

    def __init__(self) -> None:
        self._fresh: set[nn.Parameter] = set()

    def open(self, parameters: Sequence[nn.Parameter]) -> None:
        self._fresh.update(parameters)

    def close(self, parameters: Sequence[nn.Parameter]) -> None:
        """Those that nothing was written to become zero."""
        for p in parameters:
            if self._take(p):
                p.grad.zero_()

    def add_product(self, p: nn.Parameter, a: Tensor, b: Tensor) -> None:
        """p.grad += a @ b"""
        beta = 0 if self._take(p) else 1
        if p.grad.dtype == a.dtype:
            torch.addmm(p.grad, a, b, beta=beta, out=p.grad)
        elif beta:
            p.grad.add_(a @ b)
        else:
            p.grad.copy_(a @ b)

    def add_rows(self, p: nn.Parameter, index_N: Tensor, rows_NE: Tensor) -> None:
        """p.grad[index] += rows, in a fixed order."""
        if self._take(p):
            p.grad.zero_()
        rows_NE = rows_NE.to(p.grad.dtype)
        if rows_NE.is_cuda:
            p.grad.index_put_((index_N,), rows_NE, accumulate=True)  # sorts; index_add_ would race
        else:
            p.grad.index_add_(0, index_N, rows_NE)

    def _take(self, p: nn.Parameter) -> bool:
        fresh = p in self._fresh
        self._fresh.discard(p)
        return fresh


class _Linear(torch.autograd.Function):
    """y_i = x @ w_i.T + b_i for several weights. The Parameters themselves are kept, not copies of them among the
    saved tensors: under fsdp their storage is empty between forward and backward."""

    @staticmethod
    def forward(ctx, gradients: Gradients, x: Tensor, count: int, *parameters: nn.Parameter | None):
        ctx.gradients, ctx.count, ctx.parameters = gradients, count, parameters
        ctx.save_for_backward(x)
        return tuple(F.linear(x, w, b) for w, b in zip(parameters[:count], parameters[count:], strict=True))

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (x,) = ctx.saved_tensors
        x_NI = x.flatten(0, -2)
        dx_NI = None
        db: list[Tensor | None] = []
        for w, b, grad in zip(ctx.parameters[: ctx.count], ctx.parameters[ctx.count :], grads, strict=True):
            grad_NO = grad.flatten(0, -2)
            ctx.gradients.add_product(w, grad_NO.t(), x_NI)
            dx_NI = grad_NO @ w if dx_NI is None else dx_NI.addmm_(grad_NO, w)
            db.append(None if b is None else grad_NO.sum(0))
        return None, dx_NI.view_as(x), None, *(None,) * ctx.count, *db


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gradients: Gradients, tokens: Tensor, weight: nn.Parameter) -> Tensor:
        ctx.gradients, ctx.weight = gradients, weight
        ctx.save_for_backward(tokens)
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (tokens,) = ctx.saved_tensors
        ctx.gradients.add_rows(ctx.weight, tokens.flatten(), grad.flatten(0, -2))
        return None, None, None


class _HeadLoss(torch.autograd.Function):
    """The loss comes scaled, so its own gradient is one: the weight's is complete when forward returns."""

    @staticmethod
    def forward(
        ctx, gradients: Gradients, x_BTE: Tensor, weight: nn.Parameter, labels: Tensor, scale: Tensor, chunk: int
    ):
        x_NE = x_BTE.flatten(0, -2)
        add = lambda a, b: gradients.add_product(weight, a, b)
        wanted = any(ctx.needs_input_grad)
        loss, dx_NE = chunked_loss(x_NE, weight, labels.flatten(), scale, chunk, wanted, add)
        if wanted:
            ctx.save_for_backward(dx_NE.view_as(x_BTE))
        return loss

    @staticmethod
    def backward(ctx, grad: Tensor):
        return None, ctx.saved_tensors[0], None, None, None, None


def direct_ops(gradients: Gradients) -> Ops:
    """The model's ops, with weight gradients through `gradients`. Vectors (biases, norms) stay with autograd."""

    def linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        return _Linear.apply(gradients, x, len(weights), *weights, *biases)

    return Ops(
        linear=linear,
        embedding=lambda tokens, weight: _Embedding.apply(gradients, tokens, weight),
        head_loss=lambda x, weight, labels, scale, chunk: _HeadLoss.apply(gradients, x, weight, labels, scale, chunk),
    )
