"""The choice of the attention kernel of a run on a GPU (`hardware.attention`): the kernel that the user names, or the
fastest for the run's shape.

The fastest kernel depends on the GPU, the release of cuDNN, the head size, the sequence length, documents and windows.
It is therefore measured at start on the shapes of the run, forward and backward. All ranks use the same kernel: the one
with the least time on average.

Shape legend: B batch, T time, N query heads, K key/value heads, D head_dim.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch

from ndtrain.config import ConfigError, LocalShapes, ModelConfig
from ndtrain.config.schema import resolved
from ndtrain.mesh.host_device import gather_numbers
from ndtrain.mesh.mesh import Mesh
from ndtrain.model.attention.core import attend
from ndtrain.model.attention.kernels import GPU_KERNELS, Kernel
from ndtrain.model.attention.mods import attention_mod
from ndtrain.model.attention.scores import Scores, alibi_slopes
from ndtrain.model.attention.tiles import Documents

WARM_UP, TIMED = 2, 5  # runs of each kernel


class Shape(NamedTuple):
    """One call of the attention core on one rank.

    Attributes:
        in_tiles: True if the run computes it tile by tile (`model/attention/core.py`).
        scores: the changes of the scores. If the run packs documents, they contain sample documents.
    """

    B: int
    T: int
    N: int
    K: int
    D: int
    dtype: torch.dtype
    in_tiles: bool
    scores: Scores

    @classmethod
    def of(cls, m: ModelConfig, local: LocalShapes, packed: bool, dtype: torch.dtype) -> "Shape":
        """Return the shape of a rank's calls.

        Args:
            packed: True if the run packs documents.
            dtype: the dtype of the queries.
        """
        B, T = local.sequences, local.core_length
        scores = Scores(
            window=m.sliding_window,
            softcap=m.attn_logit_softcapping,
            slopes=alibi_slopes(m.num_attention_heads) if m.alibi else None,
            mod=attention_mod(m),
            documents=sample_documents(B, T) if packed else None,
        )
        sharded = local.seq_len > T
        return cls(
            B,
            T,
            local.core_heads,
            local.core_kv_heads,
            resolved(m.head_dim),
            dtype,
            sharded or not scores.plain,
            scores,
        )


Measure = Callable[[str, Shape, torch.device], float]


def choose_kernel(asked: str, shape: Shape, mesh: Mesh, measure: Measure | None = None) -> tuple[str, str]:
    """Return the kernel's name, and a line for the user with the times. Both are the same on every rank of the mesh.

    Args:
        asked: `hardware.attention`.
        measure: returns the seconds that a kernel takes on this rank, or inf if it does not run.

    Raises:
        ConfigError: none of the requested kernels runs on every rank.
    """
    names = able(shape) if asked == "auto" else [asked]
    measure = measure or (by_preference if mesh.device.type == "meta" else seconds)
    mine = [measure(name, shape, mesh.device) for name in names]
    rows = gather_numbers(mine, mesh.world, mesh.device)
    mean = dict(zip(names, rows.mean(dim=0).tolist(), strict=True))
    best = min(names, key=mean.get)
    if mean[best] == math.inf:
        raise ConfigError(
            f"hardware.attention={asked} does not run on this GPU in {str(shape.dtype).removeprefix('torch.')} with "
            f"head_dim {shape.D}: choose another, or auto"
        )
    times = ", ".join(f"{n} {1e3 * s:.2f}" if s < math.inf else f"{n} does not run" for n, s in mean.items())
    return best, f"attention kernel {best}; ms for forward and backward of one block: {times}"


def able(shape: Shape) -> list[str]:
    """Return the kernels that can compute this shape, and that may be fast at it."""

    def may(name: str, kernel: Kernel) -> bool:
        if kernel.whole or name == "math":  # they support every change of scores, at a price
            return name == "math" or shape.scores.changed
        builds_graphs = (
            name == "cudnn" and shape.scores.documents is not None
        )  # it builds a graph for each length of a document
        return not shape.scores.changed and not builds_graphs

    return [n for n, k in GPU_KERNELS.items() if may(n, k) and (n == "math" or shape.dtype in k.dtypes)]


def sample_documents(B: int, T: int) -> Documents:
    """Return documents of unequal length for B rows of T tokens: from T/32 to T/4, in another order in each row."""
    lengths = [max(1, T // 32 * part) for part in (8, 1, 4, 2, 1, 6, 3, 2, 5)]
    rows = [lengths[row % len(lengths) :] + lengths[: row % len(lengths)] for row in range(B)]
    return tuple((0, *(end for end in accumulate(row[:-1]) if end < T)) for row in rows)


def by_preference(name: str, shape: Shape, device: torch.device) -> float:
    """Return the kernel's position in the table instead of a time, if nothing can be measured."""
    return float(list(GPU_KERNELS).index(name))


def seconds(name: str, shape: Shape, device: torch.device) -> float:
    """Return the time of one forward and backward of the kernel, or inf if it does not run or runs out of memory."""
    B, T, N, K, D, dtype, in_tiles, scores = shape
    scores = replace(scores, kernel=name)
    q, k, v = (torch.randn(B, T, heads, D, dtype=dtype, device=device, requires_grad=True) for heads in (N, K, K))
    grad = torch.randn_like(q)
    recall = (lambda make: make()) if in_tiles else None
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    try:
        for number in range(WARM_UP + TIMED):
            if number == WARM_UP:
                marks[0].record()
            out = attend(q, k, v, scores, recall)
            torch.autograd.grad(out, (q, k, v), grad)
        marks[1].record()
        marks[1].synchronize()
    except RuntimeError:
        return math.inf
    return marks[0].elapsed_time(marks[1]) / 1e3 / TIMED
