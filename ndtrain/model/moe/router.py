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


def softmax_top_k(logits_NX: Tensor, k: int, renormalise: bool) -> Routing:
    """The k most probable experts (Shazeer et al., 2017, arXiv:1701.06538).

    Args:
        logits_NX: fp32 or wider.
        renormalise: whether a token's weights are divided by their sum.
    """
    weights_NK, experts_NK = logits_NX.softmax(-1).topk(k, dim=-1)
    if renormalise:
        weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
    return Routing(weights_NK, experts_NK)
