"""The parts that both kinds of `bench peers` share: whole training steps (`run`) and attention alone (`attention`)."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ndtrain.arguments import option
from ndtrain.config import ConfigError
from ndtrain.measure.ranks import run_ranks
from ndtrain.measure.results import require_folder, save
from ndtrain.measure.rounds import BlockOptions, BlockTimer
from ndtrain.observe.profile import record

TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}  # relative difference allowed between results of equal work
PROFILED = 3  # steps


@dataclass(frozen=True)
class AxisOptions:
    """The axis, ranks and precision of a comparison."""

    axis: Literal["one", "dp", "fsdp", "tp", "cp", "pp"] = option("axis to compare the peers on")
    ranks: int = option("processes; default: 1 for axis=one, otherwise 2", 0)
    precision: Literal["fp32", "bf16"] = option("precision of the computation", "fp32")


@dataclass(frozen=True)
class CommonOptions(BlockOptions, AxisOptions):
    """Options of every comparison: first `AxisOptions`, then `BlockOptions`."""

    @property
    def world(self) -> int:
        return self.ranks or (1 if self.axis == "one" else 2)

    @property
    def resolved(self) -> dict[str, Any]:
        """The resolved values of options that differ from the given ones."""
        return {"ranks": self.world}

    def check(self) -> None:
        """Check the options.

        Raises:
            ConfigError: options that do not go together.
        """
        if (self.axis == "one") != (self.world == 1):
            raise ConfigError(f"ranks={self.world}: axis=one needs 1 rank, the other axes at least 2")
        require_folder("out", self.out)


def compare(options: CommonOptions, shapes: Iterable[Any], measure: Callable, show: Callable) -> None:
    """Measure each shape on its ranks, print it and write `options.out`.

    Args:
        measure: (rank, options, shape) -> rank 0's result; runs in each rank's process.
        show: prints a result, given (options, shape, result).

    Raises:
        ConfigError: options that do not go together.
    """
    options.check()
    by_shape = {}
    for shape in shapes:
        by_shape[str(shape)] = run_ranks(measure, options.world, options, shape)
        show(options, shape, by_shape[str(shape)])
    save("peers", options, **options.resolved, shapes=by_shape)


def profiles(timers: Mapping[str, BlockTimer]) -> dict[str, list[str]]:
    """Return implementation -> the lines of its profile, on this rank."""
    here = torch.device("cpu")
    return {name: record(lambda t=timer: t.run(1), PROFILED, here).lines() for name, timer in timers.items()}


def show_ratios(result: Mapping[str, Any]) -> None:
    """Print the ratios and, if there are any, the profiles."""
    for name, r in result["ratios"].items():
        print(
            f"  {name + ' / ours':24} {r['median']:.3f}   quartiles {r['q1']:.3f} .. {r['q3']:.3f}"
            f"   range {r['min']:.3f} .. {r['max']:.3f}   of best blocks {r['best']:.3f}"
        )
    for name, lines in result.get("profile", {}).items():
        print(f"\n  where the time of {name} goes (rank 0)", *lines, sep="\n    ")
