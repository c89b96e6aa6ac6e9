"""Tokens in the order of their experts, and back. Both ways and both gradients are gathers, so no sum depends on the
order in which a device happens to run.

Shape legend: N tokens, K experts of a token, M = N K rows, X experts, E hidden_size.
"""

from typing import NamedTuple

import torch
from torch import Tensor


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
        return x_NE[slots_M // rows_NK.shape[1]]

    @staticmethod
    def backward(ctx, grad_ME: Tensor):
        (rows_NK,) = ctx.saved_tensors
        return grad_ME[rows_NK].sum(1), None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_ME: Tensor, slots_M: Tensor, rows_NK: Tensor) -> Tensor:
        ctx.save_for_backward(slots_M)
        return y_ME[rows_NK]

    @staticmethod
    def backward(ctx, grad_NKE: Tensor):
        (slots_M,) = ctx.saved_tensors
        return grad_NKE.flatten(0, 1)[slots_M], None, None


def permute(x_NE: Tensor, p: Permutation) -> Tensor:
    """Each token once for each of its experts, sorted by expert: [M, E]."""
    return _Permute.apply(x_NE, p.slots, p.rows)


def combine(y_ME: Tensor, weights_NK: Tensor, p: Permutation) -> Tensor:
    """The weighted sum of each token's rows, [N, E]. It is made in the weights' precision, in the order of the
    choices."""
    y_NKE = _Unpermute.apply(y_ME, p.slots, p.rows)
    return (y_NKE * weights_NK[..., None]).sum(1).to(y_ME.dtype)
