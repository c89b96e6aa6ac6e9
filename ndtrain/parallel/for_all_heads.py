"""What every head reads though no head makes it (the rotated key of a latent attention), where each rank has some of
the heads."""

import torch
from torch import Tensor

from ndtrain.parallel.fused_grad_accumulation import StreamComm


class _ForAllHeads(torch.autograd.Function):
    """Each rank's heads give a part of the gradient, so the parts are summed."""

    @staticmethod
    def forward(ctx, x: Tensor, comm: StreamComm) -> Tensor:
        ctx.comm = comm
        return comm.gather(x).all().view(-1, x.shape[-1])

    @staticmethod
    def backward(ctx, grad_NI: Tensor):
        produce = lambda rows: grad_NI[rows].clone()  # the sum is made in place
        return ctx.comm.reduce(produce, [slice(0, len(grad_NI))])(), None


def for_all_heads(x: Tensor, comm: StreamComm) -> Tensor:
    """x [S, I] of the residual stream's tokens on this rank -> [N, I], those of the heads' tokens.

    Args:
        comm: between the two.
    """
    return _ForAllHeads.apply(x, comm)
