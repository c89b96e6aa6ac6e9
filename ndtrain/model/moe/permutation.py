"""Sorts tokens by expert, and undoes it. Forward and backward only gather, so no sum depends on the order in which a
device happens to run.

Shape legend: N tokens, K experts of a token, M = N K rows, X experts, E hidden_size.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ndtrain.device.kind import on_gpu

_CACHED = 1 << 17  # elements that stay in a core's cache between two passes over them


class Permutation(NamedTuple):
    """The rows of a microbatch sorted by expert. Rows of one expert are in the order of their tokens.

    Attributes:
        slots: [M], the slot (token x K + choice) of each row.
        rows: [N, K], the row of each slot.
        counts: [X], the number of rows of each expert.
    """

    slots: Tensor
    rows: Tensor
    counts: Tensor

    @classmethod
    def of(cls, experts_NK: Tensor, number: int) -> "Permutation":
        """Sort the choices by expert.

        Args:
            number: the number of experts.
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
        return _sums_of_rows(y_ME.detach(), rows_NK, weights_NK.detach())  # detached, or PyTorch prepares a backward

    @staticmethod
    def backward(ctx, grad_NE: Tensor):
        y_ME, weights_NK, slots_M, rows_NK = ctx.saved_tensors
        tokens_M, weights_M1 = slots_M // rows_NK.shape[1], weights_NK.flatten()[slots_M, None]
        dy_ME, dots_M = torch.empty_like(y_ME), torch.empty_like(weights_M1[:, 0])
        each = len(y_ME) if on_gpu(y_ME) else max(1, _CACHED // y_ME.shape[1])
        for part in (slice(at, at + each) for at in range(0, len(y_ME), each)):
            # converted to the weights' precision: from a narrower gradient, this copies a part at a time
            grad_RE = grad_NE.index_select(0, tokens_M[part]).to(weights_NK.dtype)
            torch.sum(grad_RE * y_ME[part], 1, out=dots_M[part])
            torch.mul(grad_RE, weights_M1[part], out=dy_ME[part])
        return dy_ME, dots_M[rows_NK], None, None


def _sums_of_rows(x_ME: Tensor, rows_NK: Tensor, weights_NK: Tensor | None = None) -> Tensor:
    """Sum the rows of each token in the order of its choices, times their weights if given: [N, E]. The sum is computed
    in the weights' precision."""
    narrow = weights_NK is not None and weights_NK.dtype != x_ME.dtype
    if not (on_gpu(x_ME) or narrow or torch.compiler.is_compiling()):  # one pass, without an intermediate [N, K, E]
        return F.embedding_bag(rows_NK, x_ME, mode="sum", per_sample_weights=weights_NK)
    x_NKE = x_ME[rows_NK]
    return (x_NKE if weights_NK is None else x_NKE * weights_NK[..., None]).sum(1).to(x_ME.dtype)


def permute(x_NE: Tensor, p: Permutation) -> Tensor:
    """Copy each token once for each of its experts, sorted by expert: [M, E]."""
    return _Permute.apply(x_NE, p.slots, p.rows)


def combine(y_ME: Tensor, weights_NK: Tensor, p: Permutation) -> Tensor:
    """Return the weighted sum of each token's rows, [N, E]. It is computed in the weights' precision, in the order of
    the choices."""
    return _Combine.apply(y_ME, weights_NK, p.slots, p.rows)
