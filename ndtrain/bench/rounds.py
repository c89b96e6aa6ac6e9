"""What every comparison shares: sides that take turns, the ratios that come of it, and what is said about them.

The sides take turns in blocks of a few steps, so that whatever else the machine does meets them alike; a block's time
is that of its slowest rank, and each round gives one ratio peer/ours. Above 1 we are faster.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.distributed as dist

from ndtrain.bench.arguments import require_folder
from ndtrain.bench.ranks import run_ranks
from ndtrain.bench.results import results, write
from ndtrain.config import ConfigError
from ndtrain.profiling.profile import record

AGREE = {"fp32": 1e-4, "bf16": 2e-2}  # how far results of equal work may differ, relative


class Pace(Protocol):
    """How long each side is measured: blocks a side, steps a block, and steps before, untimed."""

    rounds: int
    steps: int
    warmup: int


@dataclass(frozen=True)
class Common:
    """Arguments that every comparison takes.

    Attributes:
        ranks: 1 for axis=one, otherwise 2 unless given.
        rounds: blocks per side; steps: steps per block; warmup: steps before, untimed.
        profile: show where the time of each side goes.
        out: JSON file for everything measured.
    """

    axis: Literal["one", "dp", "fsdp", "tp", "cp", "pp"]
    ranks: int = 0
    precision: Literal["fp32", "bf16"] = "fp32"
    rounds: int = 10
    steps: int = 2
    warmup: int = 3
    profile: bool = False
    out: str = ""

    @property
    def world(self) -> int:
        return self.ranks or (1 if self.axis == "one" else 2)

    @property
    def settled(self) -> dict[str, Any]:
        """The options as they are used, where that is not as given."""
        return {"ranks": self.world}

    def check(self) -> None:
        """
        Raises:
            ConfigError: options that do not go together.
        """
        if (self.axis == "one") != (self.world == 1):
            raise ConfigError(
                f"ranks={self.world}: axis=one compares one process, axis=dp, fsdp, tp, cp and pp need at least 2 ranks"
            )
        require_folder("out", self.out)

    def save(self, shapes: Mapping[str, Any]) -> None:
        """Writes what was measured, and all that it depends on, to `out`."""
        if self.out:
            write(Path(self.out), results("peers", self, **self.settled, shapes=shapes))


def compare(options: Common, shapes: Iterable[Any], measure: Callable, show: Callable) -> None:
    """Measures each shape on its ranks, prints it and writes `options.out`.

    Args:
        measure: (rank, options, shape) -> what rank 0 found, in each rank's process.
        show: prints it, given (options, shape, found).

    Raises:
        ConfigError: options that do not go together.
    """
    options.check()
    found = {}
    for shape in shapes:
        found[str(shape)] = run_ranks(measure, options.world, options, shape)
        show(options, shape, found[str(shape)])
    options.save(found)


class Turns:
    """One side: what makes a step of it, what waits for the steps that are still at work, and the times of its blocks
    so far."""

    def __init__(self, step: Callable[[], object], finish: Callable[[], object] = lambda: None):
        self._step, self._finish = step, finish
        self.block_ms: list[float] = []  # per step

    def steps(self, n: int) -> None:
        for _ in range(n):
            self._step()
        self._finish()

    def block(self, n: int) -> None:
        """n steps, timed from when all ranks begin to when the slowest ends."""
        if dist.is_initialized():
            dist.barrier()
        began = time.perf_counter()
        self.steps(n)
        self.block_ms.append(slowest(time.perf_counter() - began) * 1e3 / n)

    @property
    def ms_per_step(self) -> float:
        return statistics.median(self.block_ms)


def slowest(seconds: float) -> float:
    """The largest of all ranks' numbers."""
    found = torch.tensor(seconds, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


def take_turns(sides: Mapping[str, Turns], options: Pace) -> None:
    for side in sides.values():
        side.steps(options.warmup)
    for i in range(options.rounds):
        for side in list(sides.values())[:: -1 if i % 2 else 1]:  # every other round backwards: a drift meets all alike
            side.block(options.steps)


def ratio(peer: Turns, own: Turns) -> dict[str, float]:
    """Peer/ours over the rounds; `best` is that of the fastest blocks, which a busy machine disturbs least."""
    by_round = [a / b for a, b in zip(peer.block_ms, own.block_ms, strict=True)]
    q1, median, q3 = np.percentile(by_round, [25, 50, 75]).tolist()
    best = min(peer.block_ms) / min(own.block_ms)
    return {"median": median, "q1": q1, "q3": q3, "min": min(by_round), "max": max(by_round), "best": best}


def profiles(sides: Mapping[str, Turns]) -> dict[str, list[str]]:
    here = torch.device("cpu")
    return {name: record(lambda s=side: s.steps(1), 3, here).lines() for name, side in sides.items()}


def show_ratios(result: Mapping[str, Any]) -> None:
    """Prints the ratios and, if there are any, the profiles."""
    for name, r in result["ratios"].items():
        print(
            f"  {name + ' / ours':24} {r['median']:.3f}   quartiles {r['q1']:.3f} .. {r['q3']:.3f}"
            f"   range {r['min']:.3f} .. {r['max']:.3f}   of best blocks {r['best']:.3f}"
        )
    for name, lines in result.get("profile", {}).items():
        print(f"\n  where the time of {name} goes (rank 0)", *lines, sep="\n    ")
