"""Root-mean-square normalisation (Zhang and Sennrich, 2019, arXiv:1910.07467).

Shape legend: E the last dim, which is normalised.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F


class _RMSNorm(torch.autograd.Function):
    """RMSNorm whose backward makes seven passes over x, compared with autograd's twelve. It saves x and one number per
    row. Small tensors are bound by the overhead of each call, so it makes few calls."""

    @staticmethod
    def forward(ctx, x: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        wide = _wide(x)
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        mean_of_squares = torch.addcmul(_scalar(eps, wide), length, length, value=1 / x.shape[-1])
        inverse = mean_of_squares.rsqrt_()
        ctx.save_for_backward(x, weight_E, inverse)
        return _as((wide * inverse).mul_(weight_E), x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight_E, inverse = ctx.saved_tensors
        rows = tuple(range(x.ndim - 1))
        wide_grad, weight_E = _wide(grad), _wide(weight_E)
        unit = _wide(x) * inverse
        product = wide_grad * unit
        d_weight = product.sum(rows)
        along = torch.matmul(product, weight_E).unsqueeze(-1)  # the component of the gradient along x
        dx = (wide_grad * weight_E).addcmul_(unit, along, value=-1 / x.shape[-1]).mul_(inverse)
        return _as(dx, x), d_weight, None


def _wide(x: Tensor) -> Tensor:
    """Return x in fp32 or wider."""
    return x.float() if x.dtype.itemsize < 4 else x


def _as(x: Tensor, like: Tensor) -> Tensor:
    return x if x.dtype == like.dtype else x.to(like.dtype)


@cache
def _scalar_of(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=dtype, device=device)


def _scalar(value: float, like: Tensor) -> Tensor:
    """Return a cached scalar tensor on the device of `like`."""
    return _scalar_of(value, like.dtype, like.device)


def rms_norm(x: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dim, in x's dtype. It is computed in fp32 or wider."""
    if torch.compiler.is_compiling():  # the compiler fuses the plain form
        return F.rms_norm(x, weight_E.shape, weight_E, eps)
    return _RMSNorm.apply(x, weight_E, eps)
