"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864) with linear and Llama-3 frequency scaling.

Shape legend: B batch, T time, N query heads, K key heads, D head_dim, P = D / 2 rotated pairs.
"""

import math

import torch
from torch import Tensor

from ndtrain.config import ModelConfig
from ndtrain.model.contiguous import cat_if_contiguous


def inverse_frequencies(m: ModelConfig, device: torch.device | None = None) -> Tensor:
    """The angle per position of each pair, fp64 [P]."""
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
    """Long wavelengths are multiplied by `factor`, short ones are kept, those between are interpolated (Llama 3.1 model
    card)."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    rotations_P = scaling["original_max_position_embeddings"] * inverse_P / (2 * math.pi)
    kept_P = ((rotations_P - low) / (high - low)).clamp(0, 1)
    return inverse_P * (kept_P + (1 - kept_P) / scaling["factor"])


def rope_table(positions_T: Tensor, inverse_P: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos of every angle [..., T, 1, D], once for each element of a pair; sin [..., T, 1, P]), in `dtype`. They
    broadcast over heads."""
    angles_T1P = (positions_T[..., None].double() * inverse_P)[..., None, :]
    cos = angles_T1P.cos().to(dtype)
    return torch.cat((cos, cos), -1), angles_T1P.sin().to(dtype)


class _Rotate(torch.autograd.Function):
    """The rotation of q and k. It saves neither of them; its backward is the inverse rotation. If q and k are adjacent
    in one storage, because one matmul computed both, the results are too. The gradients always are."""

    @staticmethod
    def forward(ctx, q_BTND: Tensor, k_BTKD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        both = cat_if_contiguous((q_BTND, k_BTKD), 2)
        if both is None:
            return _rotated(q_BTND, cos, sin), _rotated(k_BTKD, cos, sin)
        return _rotated(both, cos, sin).split_with_sizes((q_BTND.shape[2], k_BTKD.shape[2]), 2)

    @staticmethod
    def backward(ctx, dq_BTND: Tensor, dk_BTKD: Tensor):
        (B, T, N, D), K = dq_BTND.shape, dk_BTKD.shape[2]
        to_q, to_k = dq_BTND.new_empty(B, T, N + K, D).split_with_sizes((N, K), 2)
        _rotate_into(dq_BTND, *ctx.saved_tensors, -1, to_q)
        _rotate_into(dk_BTKD, *ctx.saved_tensors, -1, to_k)
        return to_q, to_k, None, None


def _rotated(x_BTND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotated x, a new tensor."""
    out = x_BTND.new_empty(x_BTND.shape)
    _rotate_into(x_BTND, cos, sin, 1, out)
    return out


def _rotate_into(x_BTND: Tensor, cos: Tensor, sin: Tensor, direction: int, out: Tensor) -> None:
    """Writes the rotation of x to `out`; with direction -1 the inverse rotation."""
    if x_BTND.dtype != cos.dtype:
        wide = torch.empty(x_BTND.shape, dtype=cos.dtype, device=x_BTND.device)
        _rotate_into(x_BTND.to(cos.dtype), cos, sin, direction, wide)
        out.copy_(wide)
        return
    halves = (sin.shape[-1],) * 2
    (a, b), (to_a, to_b) = x_BTND.split_with_sizes(halves, -1), out.split_with_sizes(halves, -1)
    torch.mul(x_BTND, cos, out=out)
    to_a.addcmul_(b, sin, value=-direction)
    to_b.addcmul_(a, sin, value=direction)


def rotate(q_BTND: Tensor, k_BTKD: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Rotates the pairs (i, i + P) of the last dim in the precision of the table. The results have the dtypes of q and
    k."""
    if torch.compiler.is_compiling():  # the compiler fuses the plain form
        return _plain(q_BTND, *table), _plain(k_BTKD, *table)
    return _Rotate.apply(q_BTND, k_BTKD, *table)


def _plain(x_BTND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x_BTND.chunk(2, dim=-1)
    return (x_BTND * cos + torch.cat((-b * sin, a * sin), dim=-1)).to(x_BTND.dtype)
