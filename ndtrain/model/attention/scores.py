"""The operations on attention scores before the softmax.

Shape legend: B batch, T time, D head_dim.
"""

import math
from dataclasses import dataclass

from ndtrain.model.attention.tiles import Documents


@dataclass(frozen=True)
class Scores:
    """The operations on the scores q_i . k_j / sqrt(D): first the softcap, then the ALiBi bias, then the mask.

    Attributes:
        window: number of tokens that a query attends to, including itself (Beltagy et al., 2020, arXiv:2004.05150);
            None: all previous ones.
        softcap: c in c * tanh(score / c) (Gemma 2, arXiv:2408.00118); None: no softcap.
        slopes: slope of each local query head; slope * (i - j) is subtracted (ALiBi: Press et al., 2022,
            arXiv:2108.12409); None: no bias.
        documents: for each row of the batch, the starts of its documents in the whole sequence, 0 first. A token
            attends only to its own document. None: each row is one document.
        kernel: the key in `GPU_KERNELS` of the kernel on a GPU; None: PyTorch's order of preference.
    """

    window: int | None = None
    softcap: float | None = None
    slopes: tuple[float, ...] | None = None
    documents: Documents = None
    kernel: str | None = None

    @property
    def plain(self) -> bool:
        """Whether it is plain causal attention."""
        return self.window is None and self.softcap is None and self.slopes is None and self.documents is None


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """The ALiBi slope of each head (Press et al., 2022, arXiv:2108.12409). If the number n of heads is a power of two,
    they are 2^(-8/n), 2^(-16/n), ... Otherwise they are those of the next lower power of two, followed by every other
    one of the next higher power."""
    n = 2 ** math.floor(math.log2(heads))
    geometric = lambda n: [2 ** (-8 * i / n) for i in range(1, n + 1)]
    return tuple(geometric(n) + geometric(2 * n)[::2][: heads - n])
