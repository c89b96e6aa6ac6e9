"""Statistics of the experts' loads, and the losses that balance them.

A balance loss is the sum over experts of share times score. The share is the part of all choices that went to the
expert, and has no gradient. The score is the mean score that tokens gave the expert. Each rank can compute the
terms of its own tokens (share . score) and add them up. Only the shares have to be known beforehand.

Shape legend: N tokens, X experts, L layers with experts.
"""

import math

import torch
from torch import Tensor


class _WithGradientOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, grad.new_ones(())


def with_gradient_of(x: Tensor, loss: Tensor) -> Tensor:
    """Return `x`, with a backward that also adds the gradient of `loss`. The value of `x` does not change.

    Args:
        loss: a scalar in the precision of `x`.
    """
    return _WithGradientOf.apply(x, loss)


def balance_loss(shares: Tensor, scores_NX: Tensor) -> Tensor:
    """Return the sum over tokens of share . score, times the number of experts. It is K N if all loads are equal.

    Args:
        shares: [X] or [N, X]: the average number of the K choices of a token that go to each expert. The average is
            over the tokens that are balanced together.
        scores_NX: the probabilities of the experts.
    """
    return (shares.to(scores_NX.dtype) * scores_NX).sum() * scores_NX.shape[1]


def z_loss(logits_NX: Tensor) -> Tensor:
    """Return the sum over tokens of logsumexp^2. It keeps logits small (Zoph et al., 2022, arXiv:2202.08906)."""
    return logits_NX.logsumexp(-1).square().sum()


def load_max_over_mean(counts_LX: Tensor) -> Tensor:
    """Return [L]: the load of the busiest expert divided by the mean load. It is 1 if all loads are equal."""
    return counts_LX.amax(1) / counts_LX.mean(1)


def load_entropy(counts_LX: Tensor) -> Tensor:
    """Return [L]: the entropy of the loads, divided by its maximum. It is 1 if all loads are equal, and 0 if one expert
    has all tokens."""
    entropy_L = torch.special.entr(counts_LX / counts_LX.sum(1, keepdim=True)).sum(1)
    return entropy_L / math.log(max(2, counts_LX.shape[1]))
