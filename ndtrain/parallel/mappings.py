"""The ways between the residual stream's tokens and those that all tp ranks work on together, as functions of autograd.
A matmul has both ways in itself (`LinearComm`). These are for ops that are no matmul: the rotated key of a latent
attention, which every head reads, and experts of which each rank has a slice."""

from collections.abc import Callable

import torch
from torch import Tensor

from ndtrain.parallel.fused_grad_accumulation import StreamComm


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, comm: StreamComm) -> Tensor:
        ctx.comm = comm
        return comm.gather(x).all().view(-1, x.shape[-1])

    @staticmethod
    def backward(ctx, grad_NI: Tensor):
        return _sum(grad_NI, ctx.comm), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_NI: Tensor, comm: StreamComm, recall: Callable | None) -> Tensor:
        ctx.comm = comm
        make = lambda: _sum(y_NI, comm)
        return make() if recall is None else recall(make)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return ctx.comm.gather(grad).all(), None, None


def _sum(y_NI: Tensor, comm: StreamComm) -> Tensor:
    y_NI = y_NI.clone(memory_format=torch.contiguous_format) if comm.sums_in_place else y_NI.contiguous()
    return comm.reduce(lambda rows: y_NI[rows], [slice(0, len(y_NI))])()


def gather_tokens(x: Tensor, comm: StreamComm) -> Tensor:
    """x [S, I] of the residual stream's tokens on this rank -> [N, I], those of all ranks. Each rank's work on them
    gives a part of the gradient, so the parts are summed.

    Args:
        comm: between the two.
    """
    return _Gather.apply(x, comm)


def reduce_tokens(y_NI: Tensor, comm: StreamComm, recall: Callable | None = None) -> Tensor:
    """The sum over the ranks of y [N, I], which is a part of it, for this rank's tokens of the residual stream [S, I].

    Args:
        comm: between the two.
        recall: computes the sum, or returns the saved one; None: it is computed.
    """
    return _Reduce.apply(y_NI, comm, recall)
