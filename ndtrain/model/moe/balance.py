"""How evenly experts are loaded, and the losses that even it out.

A balance loss is the sum over experts of share times score: the share of the choices that an expert got, which has no
gradient, and the mean score that tokens gave it. Each token's part of it is share . score, so that the losses of all
tokens add up whoever computes them; only the shares need to be known before.

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
    """`x`, whose backward also adds the gradient of `loss`, a scalar in the precision of `x`. The value of what is
    computed from `x` does not change."""
    return _WithGradientOf.apply(x, loss)


def balance_loss(shares: Tensor, scores_NX: Tensor) -> Tensor:
    """The sum over tokens of share . score, times the number of experts: K N where all is even.

    Args:
        shares: [X] or [N, X]: how many of K choices a token makes for each expert, on average over the tokens that are
            balanced together.
        scores_NX: the probabilities of the experts.
    """
    return (shares.to(scores_NX.dtype) * scores_NX).sum() * scores_NX.shape[1]


def z_loss(logits_NX: Tensor) -> Tensor:
    """The sum over tokens of logsumexp^2, which keeps logits small (Zoph et al., 2022, arXiv:2202.08906)."""
    return logits_NX.logsumexp(-1).square().sum()


def load_max_over_mean(counts_LX: Tensor) -> Tensor:
    """[L]: the load of the busiest expert over the mean load; 1 where all are equal."""
    return counts_LX.amax(1) / counts_LX.mean(1)


def load_entropy(counts_LX: Tensor) -> Tensor:
    """[L]: the entropy of the loads over that of equal ones; 1 where all are equal, 0 where one expert has all."""
    entropy_L = torch.special.entr(counts_LX / counts_LX.sum(1, keepdim=True)).sum(1)
    return entropy_L / math.log(max(2, counts_LX.shape[1]))
