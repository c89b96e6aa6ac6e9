"""The attention core: what lies between the q/k/v and the output projection.

Shape legend: B batch, T time, N query heads, K key/value heads, D head_dim.
"""

from torch import Tensor
from torch.nn import functional as F


def local_core(q_BTND: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, ctx) -> Tensor:
    """Causal softmax attention over the whole sequence on this device; [B, T, N, D].

    Grouped query heads share the key/value head `n * K // N` (Ainslie et al., 2023, arXiv:2305.13245).
    """
    q, k, v = (x.transpose(1, 2) for x in (q_BTND, k_BTKD, v_BTKD))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)
