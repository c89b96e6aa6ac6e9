"""Which experts a token goes to, and with which weights.

Shape legend: N tokens, X experts, K experts of a token.
"""

from typing import NamedTuple

from torch import Tensor


class Routing(NamedTuple):
    """
    Attributes:
        weights: [N, K], fp32 or wider: the factors of the experts' outputs.
        experts: [N, K], int64: the chosen experts.
    """

    weights: Tensor
    experts: Tensor


def softmax_top_k(logits_NX: Tensor, k: int, renormalise: bool, bias_X: Tensor | None = None) -> Routing:
    """The k most probable experts (Shazeer et al., 2017, arXiv:1701.06538).

    Args:
        logits_NX: fp32 or wider.
        renormalise: whether a token's weights are divided by their sum.
        bias_X: added to the probabilities for the choice, and not in the weights; None: zeros.
    """
    scores_NX = logits_NX.softmax(-1)
    chosen_by_NX = scores_NX if bias_X is None else scores_NX.detach() + bias_X
    experts_NK = chosen_by_NX.topk(k, dim=-1).indices
    weights_NK = scores_NX.gather(-1, experts_NK)
    if renormalise:
        weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
    return Routing(weights_NK, experts_NK)
