"""The number of threads with which a rank computes on a CPU."""

import logging
import os

import torch

from ndtrain.config import Config
from ndtrain.config.local_shapes import LocalShapes
from ndtrain.device.cores import THREADS_ARE_A_DEFAULT

log = logging.getLogger("ndtrain")

# Multiply-adds of a block's largest matmul from which several threads are faster on an idle machine (docs/results.md).
# If other programs use the cores, all threads wait for the slowest one in every operator.
PAYS_FROM = 8e6


def set_threads(cfg: Config, device: torch.device) -> None:
    """Set PyTorch's number of threads for a rank on the CPU.

    It is `hardware.threads` or OMP_NUM_THREADS, if the user gives one of them. Otherwise it is 1 for a model and a
    microbatch with small matmuls, and unchanged for larger ones.
    """
    if device.type != "cpu":
        return
    if cfg.hardware.threads is not None:
        torch.set_num_threads(cfg.hardware.threads)
    elif not given_by_user() and torch.get_num_threads() > 1 and largest_matmul(cfg) < PAYS_FROM:
        log.info(
            f"using one thread: the largest matmul has only {largest_matmul(cfg):.0e} multiply-adds (hardware.threads)"
        )
        torch.set_num_threads(1)


def given_by_user() -> bool:
    """Return True if the user has set OMP_NUM_THREADS, rather than `ndtrain torchrun`, which divides the cores."""
    return "OMP_NUM_THREADS" in os.environ and THREADS_ARE_A_DEFAULT not in os.environ


def largest_matmul(cfg: Config) -> int:
    """Return the multiply-adds of the largest matmul of a block, on this rank and for one microbatch."""
    shapes = LocalShapes.of(cfg)
    return shapes.tokens * cfg.model.hidden_size * shapes.intermediate_size
