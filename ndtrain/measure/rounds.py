"""Times implementations of the same work against each other.

They alternate in rounds. A round times one block of a few steps of each, so that disturbances by other programs affect
all of them. A block's time is its slowest rank's. Each round gives one ratio peer / ours; above 1, ours is faster.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from ndtrain.arguments import option

T = TypeVar("T")
BLOCK_S = 0.02  # target duration of a block of short calls; one long call may take longer


class Repeats(Protocol):
    """The amount of measuring for each implementation: rounds, steps of a block, and untimed steps before."""

    rounds: int
    steps: int
    warmup: int


@dataclass(frozen=True)
class BlockOptions:
    """Options of a bench that times training steps in blocks."""

    rounds: int = option("timed blocks of each case", 10)
    steps: int = option("steps per block", 2)
    warmup: int = option("untimed steps before the timed ones", 3)
    profile: bool = option("show where the time goes, by kind of work", False)
    out: str = option("JSON file for all results", "")


class BlockTimer:
    """Times one implementation in blocks of steps.

    Args:
        step: runs one step.
        finish: waits for the steps in progress.

    Attributes:
        block_ms: milliseconds per step of each block so far.
    """

    def __init__(self, step: Callable[[], object], finish: Callable[[], object] = lambda: None):
        self._step, self._finish = step, finish
        self.block_ms: list[float] = []

    def run(self, n: int) -> None:
        """Run n steps, untimed."""
        for _ in range(n):
            self._step()
        self._finish()

    def time_block(self, n: int) -> None:
        """Time n steps, from the moment when all ranks begin until the slowest rank ends."""
        if dist.is_initialized():
            dist.barrier()
        began = time.perf_counter()
        self.run(n)
        self.block_ms.append(max_over_ranks(time.perf_counter() - began) * 1e3 / n)

    @property
    def ms_per_step(self) -> float:
        return statistics.median(self.block_ms)


def run_rounds(timers: Mapping[str, BlockTimer], repeats: Repeats) -> None:
    """Warm every implementation up, then time a block of each in every round."""
    for timer in timers.values():
        timer.run(repeats.warmup)
    for i in range(repeats.rounds):
        for name in in_round(timers, i):
            timers[name].time_block(repeats.steps)


def in_round(names: Iterable[T], i: int) -> list[T]:
    """Return the order of round i. Every other round runs backwards, so that a drift of the machine's speed affects all
    alike."""
    return list(names)[:: -1 if i % 2 else 1]


def calls_in_block(seconds: float, most: int) -> int:
    """Return the number of calls per block, from 1 to `most`, for calls that take `seconds` each."""
    return max(1, min(most, int(BLOCK_S / seconds)))


def max_over_ranks(value: float) -> float:
    largest = torch.tensor(value, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


def quartiles(values: Sequence[float]) -> dict[str, float]:
    q1, median, q3 = np.percentile(values, [25, 50, 75]).tolist()
    return {"median": median, "q1": q1, "q3": q3}


def ratio(peer: BlockTimer, own: BlockTimer) -> dict[str, float]:
    """Return statistics of peer / ours over the rounds. `best` compares the fastest blocks, which a busy machine
    disturbs least."""
    by_round = [a / b for a, b in zip(peer.block_ms, own.block_ms, strict=True)]
    best = min(peer.block_ms) / min(own.block_ms)
    return {**quartiles(by_round), "min": min(by_round), "max": max(by_round), "best": best}
