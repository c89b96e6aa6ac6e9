"""How fast a machine is at a moment, by the time of a fixed piece of work.

A shared host changes its speed within minutes: its cores are clocked up and down, and neighbours take their part. Times
of different moments are compared at one speed: that of the moment when the probe took as long as it did then.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ndtrain.bench.rounds import max_over_ranks
from ndtrain.metrics.measured_peak import cpu_cores

# A piece is mixed as a step of a small model: neighbours slow memory and the host's code down more than products.
SIZE, MATMULS = 384, 3
ELEMENTS, PASSES = 1 << 21, 8
FEW, LAUNCHES = 64, 400
PIECES = 5  # of which the median counts


class SpeedProbe:
    """Times the piece of work on no more ranks than there are cores: more would time how long they wait for one."""

    def __init__(self, device: torch.device):
        waiting = device.type == "cpu" and dist.is_initialized() and dist.get_rank() >= cpu_cores()
        self._pieces = 0 if waiting else PIECES
        self._matrix = torch.randn(SIZE, SIZE, device=device)
        self._vector = torch.randn(ELEMENTS, device=device)
        self._doubled = torch.empty_like(self._vector)  # new pages now and then would make two speeds of one
        self._few = torch.randn(FEW, device=device)
        self._finish = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def seconds(
        self, now: Callable[[], Any] = time.perf_counter, between: Callable[[Any, Any], float] = lambda a, b: b - a
    ) -> float:
        """Of this rank, the median of some pieces; 0 on a rank beyond the cores, which waits for the others.

        Args:
            now, between: the clock, and the seconds from one of its times to another.
        """
        if dist.is_initialized():
            dist.barrier()
        took = []
        for _ in range(self._pieces):
            start = now()
            self._work()
            took.append(between(start, now()))
        return statistics.median(took) if took else 0.0

    def slowest(self) -> float:
        """Of the slowest rank, by the clock on the wall."""
        return max_over_ranks(self.seconds())

    def _work(self) -> None:
        for _ in range(MATMULS):
            self._matrix @ self._matrix
        for _ in range(PASSES):
            torch.mul(self._vector, 2, out=self._doubled)
        for _ in range(LAUNCHES):
            self._few * 2
        self._finish()
