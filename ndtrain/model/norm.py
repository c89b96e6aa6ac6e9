"""Root-mean-square normalisation (Zhang and Sennrich, 2019, arXiv:1910.07467).

Shape legend: N rows, E the normalised dim.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F


class _RMSNorm(torch.autograd.Function):
    """The backward in seven passes over x where autograd's takes twelve; saves x and one number a row. What is small
    next to those passes costs by the call, not by the element: so few calls, and none that changes nothing."""

    @staticmethod
    def forward(ctx, x: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        x_NE = x.reshape(-1, x.shape[-1])
        wide_NE = _wide(x_NE)
        length_N1 = torch.linalg.vector_norm(wide_NE, dim=-1, keepdim=True)
        mean_of_squares_N1 = torch.addcmul(_scalar(eps, wide_NE), length_N1, length_N1, value=1 / x.shape[-1])
        inverse_N1 = mean_of_squares_N1.rsqrt_()
        ctx.save_for_backward(x_NE, weight_E, inverse_N1)
        return _as((wide_NE * inverse_N1).mul_(weight_E), x).view(x.shape)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x_NE, weight_E, inverse_N1 = ctx.saved_tensors
        grad_NE, weight_E = _wide(grad.reshape(x_NE.shape)), _wide(weight_E)
        unit_NE = _wide(x_NE) * inverse_N1
        product_NE = grad_NE * unit_NE
        along_N1 = torch.mv(product_NE, weight_E)[:, None]  # the part of the gradient along x does not change y
        dx_NE = (grad_NE * weight_E).addcmul_(unit_NE, along_N1, value=-1 / x_NE.shape[-1]).mul_(inverse_N1)
        return _as(dx_NE, x_NE).view(grad.shape), product_NE.sum(0), None


def _wide(x: Tensor) -> Tensor:
    """x in fp32 or wider."""
    return x.float() if x.dtype.itemsize < 4 else x


def _as(x: Tensor, like: Tensor) -> Tensor:
    return x if x.dtype == like.dtype else x.to(like.dtype)


@cache
def _scalar_of(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=dtype, device=device)


def _scalar(value: float, like: Tensor) -> Tensor:
    """A number on the device, made once."""
    return _scalar_of(value, like.dtype, like.device)


def rms_norm(x: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, computed in fp32 or wider; x's shape and dtype."""
    if torch.compiler.is_compiling():  # the compiler fuses the plain form
        return F.rms_norm(x, weight_E.shape, weight_E, eps)
    return _RMSNorm.apply(x, weight_E, eps)
