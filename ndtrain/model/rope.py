"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864) with linear and Llama-3 frequency scaling.

Shape legend: B batch, T time, N heads, D head_dim, P = D / 2 rotated pairs.
"""

import math

import torch
from torch import Tensor

from ndtrain.config import ModelConfig


def inverse_frequencies(m: ModelConfig, device: torch.device | None = None) -> Tensor:
    """Angle per position of each pair, fp64 [P]."""
    exponent_P = torch.arange(0, m.head_dim, 2, dtype=torch.float64, device=device) / m.head_dim
    inverse_P = m.rope_theta**-exponent_P
    scaling = m.rope_scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "linear":
        return inverse_P / scaling["factor"]
    if kind == "llama3":
        return _llama3(inverse_P, scaling)
    return inverse_P


def _llama3(inverse_P: Tensor, scaling: dict) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between interpolated (Llama 3.1 model card)."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns_P = scaling["original_max_position_embeddings"] * inverse_P / (2 * math.pi)
    kept_P = ((turns_P - low) / (high - low)).clamp(0, 1)
    return inverse_P * (kept_P + (1 - kept_P) / scaling["factor"])


def rope_table(positions_T: Tensor, inverse_P: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of every angle, each [..., T, 1, P] of `dtype` so that they broadcast over heads."""
    angles_TP = positions_T[..., None].double() * inverse_P
    return angles_TP.cos().to(dtype)[..., None, :], angles_TP.sin().to(dtype)[..., None, :]


class _Rotate(torch.autograd.Function):
    """Each half written once and added to once; saves nothing of x, and its backward is the rotation back."""

    @staticmethod
    def forward(ctx, x_BTND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x_BTND, cos, sin, 1)

    @staticmethod
    def backward(ctx, grad_BTND: Tensor):
        return _turn(grad_BTND, *ctx.saved_tensors, -1), None, None


def _turn(x_BTND: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    wide = x_BTND if x_BTND.dtype == cos.dtype else x_BTND.to(cos.dtype)
    out = torch.empty(wide.shape, dtype=wide.dtype, device=wide.device)
    (a, b), (to_a, to_b) = wide.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.mul(a, cos, out=to_a).addcmul_(b, sin, value=-direction)
    torch.mul(b, cos, out=to_b).addcmul_(a, sin, value=direction)
    return out if wide is x_BTND else out.to(x_BTND.dtype)


def rotate(x_BTND: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates the pairs (i, i + P) of the last dim, in the table's precision; returns x's dtype."""
    cos, sin = table
    if torch.compiler.is_compiling():  # the compiler fuses the plain form
        a, b = x_BTND.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x_BTND.dtype)
    return _Rotate.apply(x_BTND, cos, sin)
