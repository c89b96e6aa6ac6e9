"""Sampling of the next token from logits.

Shape legend: B texts, V vocabulary.
"""

import torch
from torch import Tensor


def next_tokens(
    logits_BV: Tensor, temperature: float = 0.0, top_k: int | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """Return the next token of each text, int64 [B].

    Args:
        temperature: the logits are divided by it before the softmax. 0: the most likely token (greedy).
        top_k: sample only from the `top_k` most likely tokens. None: from all tokens.
        generator: the random number generator, on the device of the logits. None: PyTorch's default generator.
    """
    if temperature == 0:
        return logits_BV.argmax(dim=-1)
    wide_BV = logits_BV.float() / temperature
    if top_k is not None and top_k < wide_BV.shape[-1]:
        least_B1 = wide_BV.topk(top_k).values[:, -1:]
        wide_BV = wide_BV.masked_fill(wide_BV < least_B1, -torch.inf)
    return torch.multinomial(wide_BV.softmax(dim=-1), 1, generator=generator)[:, 0]
