"""Root-mean-square normalisation (Zhang and Sennrich, 2019, arXiv:1910.07467).

Shape legend: E the normalised dim; ... all before it.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


class _RMSNorm(torch.autograd.Function):
    """The backward in seven passes over x where autograd's takes twelve; saves x and one number a row."""

    @staticmethod
    def forward(ctx, x: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = (length.square_() / x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight_E, inverse)
        return (wide * inverse).mul_(weight_E).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight_E, inverse = ctx.saved_tensors
        unit = x.to(inverse.dtype) * inverse
        grad, weight_E = grad.to(inverse.dtype), weight_E.to(inverse.dtype)
        product = grad * unit
        along = (product @ weight_E).div_(x.shape[-1])[..., None]  # the part of the gradient along x does not change y
        dx = (grad * weight_E).addcmul_(unit, along, value=-1).mul_(inverse)
        return dx.to(x.dtype), product.flatten(0, -2).sum(0), None


def rms_norm(x: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, computed in fp32 or wider; x's shape and dtype."""
    if torch.compiler.is_compiling():  # the compiler fuses the plain form
        return F.rms_norm(x, weight_E.shape, weight_E, eps)
    return _RMSNorm.apply(x, weight_E, eps)
