"""Activation recompute: which blocks keep their autograd graph, and what is run again before a backward
(Chen et al., 2016, arXiv:1604.06174)."""

from collections.abc import Sequence

from ndtrain.config import RecomputeConfig


def groups(blocks: Sequence[int], cfg: RecomputeConfig) -> list[list[int]]:
    """Consecutive segments that are run again together from the first one's input; none with recompute=none."""
    if cfg.name == "none":
        return []
    every = 1 if cfg.name == "full" else cfg.every
    return [list(blocks[i : i + every]) for i in range(0, len(blocks), every)]
