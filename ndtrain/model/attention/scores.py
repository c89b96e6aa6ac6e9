"""What attention scores go through before the softmax.

Shape legend: B batch, T time, D head_dim.
"""

import math
from dataclasses import dataclass

from ndtrain.model.attention.tiles import Documents


@dataclass(frozen=True)
class Scores:
    """What is done to the scores q_i . k_j / sqrt(D) before the softmax, in this order, and which pairs are seen.

    Attributes:
        window: tokens a query sees, itself included (Beltagy et al., 2020, arXiv:2004.05150); None: all before it.
        softcap: c in c * tanh(score / c) (Gemma 2, arXiv:2408.00118).
        slopes: of each query head here; slope * (i - j) is subtracted (ALiBi: Press et al., 2022, arXiv:2108.12409).
        documents: for each row of the batch where its documents start in the whole sequence, 0 first. A token sees
            only its own document. None: each row is one document.
        kernel: which of `GPU_KERNELS` computes them on a GPU; None: PyTorch's own order of preference.
    """

    window: int | None = None
    softcap: float | None = None
    slopes: tuple[float, ...] | None = None
    documents: Documents = None
    kernel: str | None = None

    @property
    def plain(self) -> bool:
        """Whether it is causal attention and nothing more."""
        return self.window is None and self.softcap is None and self.slopes is None and self.documents is None


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """The slope of each of `heads` heads: 2^(-8/n), 2^(-16/n), ... for n heads where n is a power of two; otherwise
    those of the power of two below, then every other one of the power above (Press et al., 2022, arXiv:2108.12409)."""
    n = 2 ** math.floor(math.log2(heads))
    geometric = lambda n: [2 ** (-8 * i / n) for i in range(1, n + 1)]
    return tuple(geometric(n) + geometric(2 * n)[::2][: heads - n])
