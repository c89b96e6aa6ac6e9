"""Attention with a key/value cache, for text that grows by one token at a time.

Shape legend: B texts, T new tokens, S tokens so far, N query heads, K key/value heads, G = N / K, D head_dim.
"""

import torch
from torch import Tensor

from ndtrain.model import Context
from ndtrain.model.attention.core import local_core
from ndtrain.model.attention.mods import Places, apply_score
from ndtrain.model.attention.scores import AttentionMod, Scores


class KeyValueCache:
    """The cached keys and values of every layer.

    `core` replaces the attention core of a model (`Ops.core`). The layers of the model call it in order.

    Args:
        length: the largest number of tokens.
    """

    def __init__(self, length: int):
        self._length, self._tokens, self._layer = length, 0, 0
        self._layers: list[tuple[Tensor, Tensor]] = []  # keys and values, each [B, length, K, D]

    @property
    def tokens(self) -> int:
        """The number of tokens in the cache."""
        return self._tokens

    def advance(self, tokens: int) -> None:
        """End a forward over `tokens` new tokens."""
        self._tokens, self._layer = self._tokens + tokens, 0

    def core(
        self, q_BTND: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, ctx: Context, largest_N: Tensor | None = None
    ) -> Tensor:
        """Compute the attention of the new tokens over all tokens so far.

        The first forward has the whole prompt, each later one a single token.
        """
        layer, self._layer = self._layer, self._layer + 1
        end = self._tokens + k_BTKD.shape[1]
        if layer == len(self._layers):
            empty = lambda x: x.new_empty(x.shape[0], self._length, *x.shape[2:])
            self._layers.append((empty(k_BTKD), empty(v_BTKD)))
        keys, values = self._layers[layer]
        keys[:, self._tokens : end], values[:, self._tokens : end] = k_BTKD, v_BTKD
        if self._tokens == 0:
            return local_core(q_BTND, k_BTKD, v_BTKD, ctx, largest_N)
        return last_token_attention(q_BTND, keys[:, :end], values[:, :end], ctx.scores)


def last_token_attention(q_B1ND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, scores: Scores) -> Tensor:
    """Return the attention output of the last of S tokens, [B, 1, N, D], computed in fp32 or wider."""
    last = k_BSKD.shape[1] - 1
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
    if scores.mod is not None:
        s_BKGS = _modified(s_BKGS.flatten(1, 2)[:, :, None], scores.mod, last).view_as(s_BKGS)
    blind = (s_BKGS == -torch.inf).all(-1, keepdim=True)  # the user's mask hides every key: the output is 0
    out_BKGD = s_BKGS.softmax(dim=-1).masked_fill(blind, 0) @ v_BSKD.to(wide).transpose(1, 2)
    return out_BKGD.reshape(B, 1, -1, D).to(q_B1ND.dtype)


def _modified(s_BN1S: Tensor, mod: AttentionMod, last: int) -> Tensor:
    """Return the scores of the query at position `last` over the last S keys, after the user's score and mask
    functions.
    """
    count = lambda first, end: torch.arange(first, end, device=s_BN1S.device)
    B, N, _, S = s_BN1S.shape
    places = Places.of(count(0, B), count(0, N), count(last, last + 1), count(last + 1 - S, last + 1))
    if mod.score is not None:
        s_BN1S = apply_score(mod.score, s_BN1S, places)
    return s_BN1S if mod.mask is None else s_BN1S.masked_fill(~mod.mask(*places), -torch.inf)
