"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864) with linear, Llama-3 and YaRN frequency scaling.

Shape legend: B batch, T time, N query heads, K key heads, D rotated elements of a head, P = D / 2 rotated pairs.
"""

import math

import torch
from torch import Tensor

from ndtrain.config import ModelConfig
from ndtrain.config.rope_kinds import ORIGINAL
from ndtrain.config.schema import resolved
from ndtrain.model.contiguous import cat_if_contiguous


def inverse_frequencies(m: ModelConfig, device: torch.device | None = None) -> Tensor:
    """Return the angle per position of each rotated pair, fp64 [P]. If `qk_rope_head_dim` is set, only that part of a
    head is rotated."""
    rotated = m.qk_rope_head_dim or resolved(m.head_dim)
    exponent_P = torch.arange(0, rotated, 2, dtype=torch.float64, device=device) / rotated
    inverse_P = m.rope_theta**-exponent_P
    scaling, kind = _scaling(m)
    if kind == "linear":
        return inverse_P / scaling["factor"]
    if kind == "llama3":
        return _llama3(inverse_P, scaling)
    if kind == "yarn":
        return _yarn(inverse_P, m.rope_theta, scaling)
    return inverse_P


def _scaling(m: ModelConfig) -> tuple[dict, str]:
    """Return (`rope_scaling`, its kind)."""
    scaling = m.rope_scaling or {}
    return scaling, scaling.get("rope_type", scaling.get("type", "default"))


def _llama3(inverse_P: Tensor, scaling: dict) -> Tensor:
    """Divide the frequencies of long wavelengths by `factor`, keep short wavelengths, and interpolate between the two
    (Llama 3.1 model card)."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    rotations_P = scaling["original_max_position_embeddings"] * inverse_P / (2 * math.pi)
    kept_P = ((rotations_P - low) / (high - low)).clamp(0, 1)
    return inverse_P * (kept_P + (1 - kept_P) / scaling["factor"])


def _yarn(inverse_P: Tensor, theta: float, scaling: dict) -> Tensor:
    """Scale the frequencies as YaRN does (Peng et al., 2023, arXiv:2309.00071, section 3.2).

    Pairs that turn more than `beta_fast` times within the original length are kept. Pairs that turn less than
    `beta_slow` times are divided by `factor`. Pairs in between are interpolated by their index."""
    pairs = len(inverse_P)
    # the index of the pair that turns `turns` times
    index = lambda turns: pairs * math.log(scaling[ORIGINAL] / (turns * 2 * math.pi)) / math.log(theta)
    first = max(math.floor(index(scaling.get("beta_fast", 32))), 0)
    last = min(math.ceil(index(scaling.get("beta_slow", 1))), 2 * pairs - 1)
    at_P = torch.arange(pairs, dtype=torch.float64, device=inverse_P.device)
    divided_P = ((at_P - first) / max(last - first, 0.001)).clamp(0, 1)
    return inverse_P * (1 - divided_P + divided_P / scaling["factor"])


def _yarn_mscale(factor: float, mscale: float = 1) -> float:
    """Return YaRN's factor for queries and keys if the context grows by `factor` (its section 3.3)."""
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


def table_factor(m: ModelConfig) -> float:
    """Return the factor of cos and sin. It is 1 except for YaRN (`attention_factor`)."""
    scaling, kind = _scaling(m)
    if kind != "yarn" or scaling.get("attention_factor") is not None:
        return scaling.get("attention_factor", 1.0)
    mscale, of_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and of_all:
        return _yarn_mscale(scaling["factor"], mscale) / _yarn_mscale(scaling["factor"], of_all)
    return _yarn_mscale(scaling["factor"])


def score_factor(m: ModelConfig) -> float:
    """Return the factor of the scores of latent attention, where RoPE rotates only part of a head.

    With `mscale_all_dim`, YaRN also scales the elements of queries and keys that are not rotated."""
    scaling, kind = _scaling(m)
    of_all = scaling.get("mscale_all_dim")
    return _yarn_mscale(scaling["factor"], of_all) ** 2 if kind == "yarn" and of_all else 1.0


def rope_table(
    positions_T: Tensor, inverse_P: Tensor, dtype: torch.dtype, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return (cos [..., T, 1, D], sin [..., T, 1, P]) of every angle times `factor`, in `dtype`. Each cos appears
    twice, once for each element of its pair. Both tensors broadcast over heads."""
    angles_T1P = (positions_T[..., None].double() * inverse_P)[..., None, :]
    cos = (angles_T1P.cos() * factor).to(dtype)
    return torch.cat((cos, cos), -1), (angles_T1P.sin() * factor).to(dtype)


class _Rotate(torch.autograd.Function):
    """The rotation of q and k. It saves neither of them, because its backward is the inverse rotation.

    If q and k are adjacent in one storage (one matmul computed both), the results are adjacent too. The gradients
    always are."""

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
    """Return the rotated x as a new tensor."""
    out = x_BTND.new_empty(x_BTND.shape)
    _rotate_into(x_BTND, cos, sin, 1, out)
    return out


def _rotate_into(x_BTND: Tensor, cos: Tensor, sin: Tensor, direction: int, out: Tensor) -> None:
    """Write the rotation of x to `out`, or the inverse rotation if `direction` is -1."""
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
    """Rotate the pairs (i, i + P) of the last dim, in the precision of the table. The results have the dtypes of q and
    k."""
    if torch.compiler.is_compiling():  # the compiler fuses the plain form
        return _plain(q_BTND, *table), _plain(k_BTKD, *table)
    return _Rotate.apply(q_BTND, k_BTKD, *table)


def _plain(x_BTND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x_BTND.chunk(2, dim=-1)
    return (x_BTND * cos + torch.cat((-b * sin, a * sin), dim=-1)).to(x_BTND.dtype)


def neighbours_apart(x_BTND: Tensor) -> Tensor:
    """Move the pairs (2 i, 2 i + 1) of the last dim to (i, i + P), where `rotate` expects them."""
    return x_BTND.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
