"""Routers: choose the experts of each token, and their weights.

Shape legend: N tokens, X experts, K experts of a token, G groups of Y experts.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Routing(NamedTuple):
    """
    Attributes:
        weights: [N, K], fp32 or wider: the factors of the experts' outputs.
        experts: [N, K], int64: the indices of the chosen experts.
    """

    weights: Tensor
    experts: Tensor


def softmax_top_k(logits_NX: Tensor, k: int, renormalise: bool, bias_X: Tensor | None = None) -> Routing:
    """Choose the k most probable experts (Shazeer et al., 2017, arXiv:1701.06538).

    Args:
        logits_NX: fp32 or wider.
        renormalise: whether to divide a token's weights by their sum.
        bias_X: added to the probabilities for the choice, but not to the weights. None: zeros.
    """
    scores_NX = logits_NX.softmax(-1)
    chosen_by_NX = scores_NX if bias_X is None else scores_NX.detach() + bias_X
    experts_NK = chosen_by_NX.topk(k, dim=-1).indices
    weights_NK = scores_NX.gather(-1, experts_NK)
    if renormalise:
        weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
    return Routing(weights_NK, experts_NK)


def sigmoid_top_k(
    logits_NX: Tensor,
    k: int,
    n_group: int,
    topk_group: int,
    renormalise: bool,
    factor: float,
    bias_X: Tensor | None = None,
) -> Routing:
    """Choose the k best experts of the best groups (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).

    An expert's score is the sigmoid of its logit. A group's score is the sum of its two best scores, including biases.

    Args:
        logits_NX: fp32 or wider.
        n_group: number of groups of consecutive experts.
        topk_group: number of groups from which a token's experts are chosen.
        renormalise: whether to divide a token's weights by their sum.
        factor: the weights are multiplied by it.
        bias_X: added to the scores for the choice, but not to the weights. None: zeros.
    """
    scores_NX = logits_NX.sigmoid()
    chosen_by_NX = scores_NX.detach() if bias_X is None else scores_NX.detach() + bias_X
    if topk_group < n_group:
        chosen_by_NX = _in_the_best(chosen_by_NX, n_group, topk_group)
    experts_NK = chosen_by_NX.topk(k, dim=-1).indices
    weights_NK = scores_NX.gather(1, experts_NK)
    if renormalise:
        weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + 1e-20)
    return Routing(weights_NK * factor, experts_NK)


def _in_the_best(scores_NX: Tensor, n_group: int, topk_group: int) -> Tensor:
    """Return the scores, with -inf for experts that are in none of the best groups."""
    scores_NGY = scores_NX.unflatten(1, (n_group, -1))
    best_NG = scores_NGY.topk(2, dim=-1).values.sum(-1).topk(topk_group, dim=-1).indices
    other_NG = torch.ones(scores_NGY.shape[:2], dtype=torch.bool, device=scores_NX.device).scatter_(1, best_NG, False)
    return scores_NGY.masked_fill(other_NG[..., None], -torch.inf).flatten(1)
