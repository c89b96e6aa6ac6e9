"""The operations on attention scores before the softmax.

Shape legend: B batch, T time, N query heads, S time of the keys, D head_dim.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ndtrain.model.attention.tiles import Documents

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class AttentionMod:
    """A user's operations on scores, in the form of FlexAttention (Dong et al., 2024, arXiv:2412.05496).

    Both are elementwise functions of tensors that broadcast against each other. In a generated kernel these are single
    elements, elsewhere blocks of the score matrix. `head` counts the query heads of the whole model. `query` and `key`
    are positions in the whole sequence. `batch` is the row of the microbatch.

    Attributes:
        score: (score, batch, head, query, key) -> the changed score. None: no change.
        mask: (batch, head, query, key) -> True if the query may see the key, in addition to the causal mask. None: no
            further mask.
    """

    score: ScoreMod | None = None
    mask: MaskMod | None = None


@dataclass(frozen=True)
class Scores:
    """The operations on the scores q_i . k_j / sqrt(D): the softcap, the ALiBi bias, the user's mod, then the masks.

    Attributes:
        window: number of tokens that a query attends to, including itself (Beltagy et al., 2020, arXiv:2004.05150).
            None: all previous tokens.
        softcap: c in c * tanh(score / c) (Gemma 2, arXiv:2408.00118). None: no softcap.
        slopes: slope of each query head of the model. slope * (i - j) is subtracted (ALiBi: Press et al., 2022,
            arXiv:2108.12409). None: no bias.
        mod: the user's operations. None: there are none.
        documents: for each row of the batch, the starts of its documents in the whole sequence, beginning with 0. A
            token attends only to its own document. None: each row is one document.
        first_head: index of the first local query head in the model.
        kernel: the key in `GPU_KERNELS` of the kernel on a GPU. None: PyTorch's order of preference.
    """

    window: int | None = None
    softcap: float | None = None
    slopes: tuple[float, ...] | None = None
    mod: AttentionMod | None = None
    documents: Documents = None
    first_head: int = 0
    kernel: str | None = None

    @property
    def plain(self) -> bool:
        """True for plain causal attention."""
        return self.window is None and self.documents is None and not self.changed

    @property
    def changed(self) -> bool:
        """True if the scores are changed by more than the causal mask, windows and documents."""
        return self.softcap is not None or self.slopes is not None or self.mod is not None

    def local_slopes(self, heads: int) -> tuple[float, ...] | None:
        """Return the slopes of the `heads` local query heads."""
        return self.slopes and self.slopes[self.first_head : self.first_head + heads]


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Return the ALiBi slope of each head (Press et al., 2022, arXiv:2108.12409).

    If the number n of heads is a power of two, the slopes are 2^(-8/n), 2^(-16/n), ... Otherwise they are the slopes
    for the next lower power of two, followed by every second slope for the next higher power."""
    n = 2 ** math.floor(math.log2(heads))
    geometric = lambda n: [2 ** (-8 * i / n) for i in range(1, n + 1)]
    return tuple(geometric(n) + geometric(2 * n)[::2][: heads - n])
