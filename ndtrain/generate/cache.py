"""Attention with a key/value cache, for text that grows by one token at a time.

Shape legend: B texts, T new tokens, S tokens so far, N query heads, K key/value heads, G = N / K, D head_dim.
"""

import torch
from torch import Tensor

from ndtrain.model import Context
from ndtrain.model.attention.core import local_core
from ndtrain.model.attention.scores import Scores


class KeyValueCache:
    """The keys and values of every layer. `core` replaces the attention core of a model (`Ops.core`), whose layers call
    it in order.

    Args:
        length: the largest number of tokens.
    """

    def __init__(self, length: int):
        self._length, self._tokens, self._layer = length, 0, 0
        self._layers: list[tuple[Tensor, Tensor]] = []  # keys and values, each [B, length, K, D]

    @property
    def tokens(self) -> int:
        """How many tokens the cache holds."""
        return self._tokens

    def advance(self, tokens: int) -> None:
        """Ends a forward over `tokens` new tokens."""
        self._tokens, self._layer = self._tokens + tokens, 0

    def core(self, q_BTND: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, ctx: Context) -> Tensor:
        """Attention of the new tokens over all tokens so far. The first forward has the whole prompt, each later one
        a single token."""
        layer, self._layer = self._layer, self._layer + 1
        end = self._tokens + k_BTKD.shape[1]
        if layer == len(self._layers):
            empty = lambda x: x.new_empty(x.shape[0], self._length, *x.shape[2:])
            self._layers.append((empty(k_BTKD), empty(v_BTKD)))
        keys, values = self._layers[layer]
        keys[:, self._tokens : end], values[:, self._tokens : end] = k_BTKD, v_BTKD
        if self._tokens == 0:
            return local_core(q_BTND, k_BTKD, v_BTKD, ctx)
        return last_token_attention(q_BTND, keys[:, :end], values[:, :end], ctx.scores)


def last_token_attention(q_B1ND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, scores: Scores) -> Tensor:
    """Attention of the last of S tokens, in fp32 or wider -> [B, 1, N, D]."""
    if scores.window is not None:
        k_BSKD, v_BSKD = k_BSKD[:, -scores.window :], v_BSKD[:, -scores.window :]
    B, S, K, D = k_BSKD.shape
    wide = torch.promote_types(q_B1ND.dtype, torch.float32)
    q_BKGD = q_B1ND.to(wide).view(B, K, -1, D) * D**-0.5
    s_BKGS = q_BKGD @ k_BSKD.to(wide).permute(0, 2, 3, 1)
    if scores.softcap is not None:
        s_BKGS = scores.softcap * torch.tanh(s_BKGS / scores.softcap)
    if scores.slopes is not None:
        distance_S = torch.arange(S - 1, -1, -1, dtype=wide, device=s_BKGS.device)
        slopes_KG1 = torch.tensor(scores.slopes, dtype=wide, device=s_BKGS.device).view(K, -1, 1)
        s_BKGS = s_BKGS - slopes_KG1 * distance_S
    out_BKGD = s_BKGS.softmax(dim=-1) @ v_BSKD.to(wide).transpose(1, 2)
    return out_BKGD.reshape(B, 1, -1, D).to(q_B1ND.dtype)
