"""RMSNorm over the heads of all tp ranks, each of which holds some of the heads."""

import torch
import torch.distributed as dist
from torch import Tensor

from ndtrain.mesh.collectives import all_reduce


class _SumOverRanks(torch.autograd.Function):
    """The sum over the ranks. Every rank's loss depends on it, so its gradients are summed too."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _summed(grad, ctx.group), None


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    all_reduce(total, group).wait()
    return total


def norm_of_heads(x_NI: Tensor, weight_I: Tensor, eps: float, group: dist.ProcessGroup) -> Tensor:
    """Apply `rms_norm` over the heads of all ranks, in fp32 or wider. Ranks that hold the same head have the same
    weight in the mean."""
    wide = x_NI.to(torch.promote_types(x_NI.dtype, torch.float32))
    mean = _SumOverRanks.apply(wide.square().mean(-1, keepdim=True) / group.size(), group)
    return (wide * (mean + eps).rsqrt() * weight_I).to(x_NI.dtype)
