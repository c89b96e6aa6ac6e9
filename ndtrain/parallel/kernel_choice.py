"""Chooses the attention kernel of a run on a GPU (`hardware.attention`): the one named, or the fastest for its shape.

The fastest kernel depends on the GPU, the head size, the sequence length and the release of cuDNN. It is therefore
measured at start, forward and backward. All ranks use the same kernel: the one with the least time on average.

Shape legend: B batch, T time, N query heads, K key/value heads, D head_dim.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from ndtrain.config import Config, ConfigError, LocalShapes
from ndtrain.distributed.host_device import gather_numbers
from ndtrain.distributed.mesh import Mesh
from ndtrain.model.attention.core import attend
from ndtrain.model.attention.kernels import GPU_KERNELS
from ndtrain.model.attention.scores import Scores

WARM_UP, TIMED = 2, 5  # runs of each kernel


class Shape(NamedTuple):
    """The shape of one call of the attention core on one rank.

    Attributes:
        in_tiles: whether the run computes it tile by tile (`model/attention/core.py`).
    """

    B: int
    T: int
    N: int
    K: int
    D: int
    dtype: torch.dtype
    in_tiles: bool

    @classmethod
    def of(cls, cfg: Config, dtype: torch.dtype) -> "Shape":
        """Of a resolved configuration."""
        m, t, local = cfg.model, cfg.train, LocalShapes.of(cfg)
        in_tiles = local.core_length < t.seq_len or cfg.data.pack or m.sliding_window is not None
        return cls(t.micro_batch, local.core_length, local.core_heads, local.core_kv_heads, m.head_dim, dtype, in_tiles)


Measure = Callable[[str, Shape, torch.device], float]


def choose_kernel(cfg: Config, mesh: Mesh, dtype: torch.dtype, measure: Measure | None = None) -> tuple[str, str]:
    """Returns the kernel's name, and a line for the user with the times. Both are the same on every rank of the mesh.

    Args:
        dtype: of the queries.
        measure: returns the seconds that a kernel takes on this rank; inf where it does not run.

    Raises:
        ConfigError: none of those asked for runs on every rank.
    """
    asked, shape = cfg.hardware.attention, Shape.of(cfg, dtype)
    changes_scores = cfg.model.alibi or cfg.model.attn_logit_softcapping is not None  # by `math` only
    able = [name for name, k in GPU_KERNELS.items() if name == "math" or (dtype in k.dtypes and not changes_scores)]
    names = able if asked == "auto" else [asked]
    measure = measure or (by_preference if mesh.device.type == "meta" else seconds)
    mine = [measure(name, shape, mesh.device) for name in names]
    rows = gather_numbers(mine, mesh.world, mesh.device)
    mean = dict(zip(names, rows.mean(dim=0).tolist(), strict=True))
    best = min(names, key=mean.get)
    if mean[best] == math.inf:
        raise ConfigError(
            f"hardware.attention={asked} does not run on this GPU in {str(dtype).removeprefix('torch.')} with "
            f"head_dim {shape.D}: choose another, or auto"
        )
    times = ", ".join(f"{n} {1e3 * s:.2f}" if s < math.inf else f"{n} does not run" for n, s in mean.items())
    return best, f"attention by {best}: ms forward and backward of a block's: {times}"


def by_preference(name: str, shape: Shape, device: torch.device) -> float:
    """Instead of a time, where nothing can be measured: the place of the kernel in the table."""
    return float(list(GPU_KERNELS).index(name))


def seconds(name: str, shape: Shape, device: torch.device) -> float:
    """The time of one forward and backward of the kernel; inf where it does not run or runs out of memory."""
    B, T, N, K, D, dtype, in_tiles = shape
    q, k, v = (torch.randn(B, T, heads, D, dtype=dtype, device=device, requires_grad=True) for heads in (N, K, K))
    grad = torch.randn_like(q)
    recall = (lambda make: make()) if in_tiles else None
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    try:
        for number in range(WARM_UP + TIMED):
            if number == WARM_UP:
                marks[0].record()
            out = attend(q, k, v, Scores(kernel=name), recall)
            torch.autograd.grad(out, (q, k, v), grad)
        marks[1].record()
        marks[1].synchronize()
    except RuntimeError:
        return math.inf
    return marks[0].elapsed_time(marks[1]) / 1e3 / TIMED
