"""Autograd functions that map this rank's tokens of the residual stream to the tokens of all tp ranks, and back. A
matmul has both mappings built in (`LinearComm`). These functions are for ops without a matmul: the rotated key of a
latent attention, which every head reads, and experts of which each rank has a slice."""

from collections.abc import Callable

import torch
from torch import Tensor

from ndtrain.parallel.linear.comm import StreamComm


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
    """Gather x [S, I], this rank's tokens of the residual stream, into the tokens of all ranks, [N, I]. Each rank's
    work on them gives a part of the gradient, so the backward sums the parts.

    Args:
        comm: the communication between the two sets of tokens.
    """
    return _Gather.apply(x, comm)


def reduce_tokens(y_NI: Tensor, comm: StreamComm, recall: Callable | None = None) -> Tensor:
    """Sum y [N, I] over the ranks, of which each has a part of the sum. Return this rank's tokens of the residual
    stream, [S, I].

    Args:
        comm: the communication between the two sets of tokens.
        recall: a function that computes the sum, or returns the saved one; None: the sum is computed.
    """
    return _Reduce.apply(y_NI, comm, recall)
