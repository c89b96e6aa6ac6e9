"""Tokens in the order of their experts, and back. Both ways and both gradients are gathers, so no sum depends on the
order in which a device happens to run.

Shape legend: N tokens, K experts of a token, M = N K rows, X experts, E hidden_size.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ndtrain.model.device_kind import on_gpu

_CACHED = 1 << 17  # elements that stay in a core's cache from one pass over them to the next


class Permutation(NamedTuple):
    """The rows of a microbatch sorted by expert, those of one expert in the order of their tokens.

    Attributes:
        slots: [M], which slot (token x K + choice) each row is.
        rows: [N, K], which row each slot is.
        counts: [X], rows of each expert.
    """

    slots: Tensor
    rows: Tensor
    counts: Tensor

    @classmethod
    def of(cls, experts_NK: Tensor, number: int) -> "Permutation":
        """Sorts the choices by expert.

        Args:
            number: of experts.
        """
        sorted_M, slots_M = experts_NK.flatten().sort(stable=True)
        rows_M = torch.empty_like(slots_M).scatter_(0, slots_M, torch.arange(len(slots_M), device=slots_M.device))
        bounds = torch.searchsorted(sorted_M, torch.arange(number + 1, device=sorted_M.device))
        return cls(slots_M, rows_M.view_as(experts_NK), bounds.diff())


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_NE: Tensor, slots_M: Tensor, rows_NK: Tensor) -> Tensor:
        ctx.save_for_backward(rows_NK)
        return x_NE.index_select(0, slots_M // rows_NK.shape[1])

    @staticmethod
    def backward(ctx, grad_ME: Tensor):
        (rows_NK,) = ctx.saved_tensors
        return _sums_of_rows(grad_ME, rows_NK), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_ME: Tensor, weights_NK: Tensor, slots_M: Tensor, rows_NK: Tensor) -> Tensor:
        ctx.save_for_backward(y_ME, weights_NK, slots_M, rows_NK)
        return _sums_of_rows(y_ME.detach(), rows_NK, weights_NK.detach())  # else PyTorch prepares for its own backward

    @staticmethod
    def backward(ctx, grad_NE: Tensor):
        y_ME, weights_NK, slots_M, rows_NK = ctx.saved_tensors
        tokens_M, weights_M1 = slots_M // rows_NK.shape[1], weights_NK.flatten()[slots_M, None]
        dy_ME, dots_M = torch.empty_like(y_ME), torch.empty_like(weights_M1[:, 0])
        each = len(y_ME) if on_gpu(y_ME) else max(1, _CACHED // y_ME.shape[1])
        for part in (slice(at, at + each) for at in range(0, len(y_ME), each)):
            # in the weights' precision, in which a part of a narrower gradient is a copy
            grad_RE = grad_NE.index_select(0, tokens_M[part]).to(weights_NK.dtype)
            torch.sum(grad_RE * y_ME[part], 1, out=dots_M[part])
            torch.mul(grad_RE, weights_M1[part], out=dy_ME[part])
        return dy_ME, dots_M[rows_NK], None, None


def _sums_of_rows(x_ME: Tensor, rows_NK: Tensor, weights_NK: Tensor | None = None) -> Tensor:
    """Of each token the sum over its rows, times its weights if there are any, in the order of its choices: [N, E]. It
    is made in the weights' precision."""
    narrow = weights_NK is not None and weights_NK.dtype != x_ME.dtype
    if not (on_gpu(x_ME) or narrow or torch.compiler.is_compiling()):  # one pass, without [N, K, E] in between
        return F.embedding_bag(rows_NK, x_ME, mode="sum", per_sample_weights=weights_NK)
    x_NKE = x_ME[rows_NK]
    return (x_NKE if weights_NK is None else x_NKE * weights_NK[..., None]).sum(1).to(x_ME.dtype)


def permute(x_NE: Tensor, p: Permutation) -> Tensor:
    """Each token once for each of its experts, sorted by expert: [M, E]."""
    return _Permute.apply(x_NE, p.slots, p.rows)


def combine(y_ME: Tensor, weights_NK: Tensor, p: Permutation) -> Tensor:
    """The weighted sum of each token's rows, [N, E]. It is made in the weights' precision, in the order of the
    choices."""
    return _Combine.apply(y_ME, weights_NK, p.slots, p.rows)
