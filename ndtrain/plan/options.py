"""The options of the plans themselves. On the command line they are mixed with the run's overrides."""

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from ndtrain.arguments import ArgumentError, option, unknown
from ndtrain.config import AXES, Config, ConfigError, resolve
from ndtrain.engine.setup import model_of_folder
from ndtrain.plan.hardware import Hardware
from ndtrain.run import cli


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of a plan of a run: its machines, and the file to write."""

    hardware: str = option("cpu, a100, h100, h200, b200, or your own description, FILE.yaml")
    nodes: int | None = option("number of hosts; each of their devices is a rank", None)
    ranks: int | None = option("number of ranks, instead of nodes; default: the size of the mesh", None)
    json: str | None = option("JSON file for the plan", None)


IMBALANCE = "load imbalance of experts: rows of the busiest rank over the mean; only used if mesh.ep is above 1"


def at_least_1(key: str, text: str) -> float:
    """Read a number of at least 1, or raise ArgumentError."""
    return _number(key, text, "from 1", lambda value: value >= 1)


def at_least_0(key: str, text: str) -> float:
    """Read a number of at least 0, or raise ArgumentError."""
    return _number(key, text, "at least 0", lambda value: value >= 0)


def above_0(key: str, text: str) -> float:
    """Read a number above 0, or raise ArgumentError."""
    return _number(key, text, "above 0", lambda value: value > 0)


def _number(key: str, text: str, which: str, fits: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and fits(value)):
        raise ArgumentError(f"{key}={text}: must be a number {which}")
    return value


@dataclass(frozen=True, kw_only=True)
class LinkOptions:
    """The options of the link between islands, which replace the values of the hardware's description."""

    island_gb_s: float | None = option(
        "bandwidth from one island to the others, in 10^9 bytes/s; default: the description's", None, read=above_0
    )
    island_latency_s: float | None = option(
        "seconds from one island to another, one way; default: the description's", None, read=at_least_0
    )

    def on(self, hardware: Hardware) -> Hardware:
        """Return the hardware with these values."""
        given = {key: getattr(self, key) for key in ("island_gb_s", "island_latency_s")}
        return replace(hardware, **{key: value for key, value in given.items() if value is not None})


def refuse_overrides(cls: type, overrides: Sequence[str]) -> None:
    """Refuse all overrides, for a plan that does not concern a run.

    Raises:
        ConfigError: there is an argument that is not an option of the plan.
    """
    if overrides:
        own = [f.metadata.get("key") or f.name for f in fields(cls)]
        raise ConfigError(unknown("key", overrides[0].partition("=")[0], own))


def planned_config(overrides: Sequence[str], options: RunOptions, hardware: Hardware) -> Config:
    """Return the resolved configuration of the run to plan.

    Raises:
        ConfigError: the configuration is invalid, or the hardware cannot compute it.
    """
    cfg = unresolved_config(overrides, hardware)
    return resolve(cfg, world_of(cfg, options, hardware))


def unresolved_config(overrides: Sequence[str], hardware: Hardware) -> Config:
    """Return the configuration of the run before its mesh is known.

    Raises:
        ConfigError: the configuration is invalid, or the hardware cannot compute it.
    """
    cfg = cli.plain_config(list(overrides))
    if cfg.init_from:
        cfg, _ = model_of_folder(cfg, 0)
    if cfg.precision.compute == "fp8" and hardware.device == "cuda" and "fp8" not in hardware.peak_tflops:
        raise ConfigError(f"precision.compute=fp8: hardware={hardware.name} has no fp8 matmuls: compute in bf16")
    if cfg.precision.params == "fp64" and cfg.precision.compute != "fp64" and hardware.device == "cuda":
        raise ConfigError(
            "precision.params=fp64: a GPU accumulates fp64 gradients only with precision.compute=fp64: set it"
        )
    return cfg


def world_of(cfg: Config, options: RunOptions, hardware: Hardware) -> int:
    """Return the number of ranks.

    Raises:
        ConfigError: both nodes and ranks are given, or neither is and the mesh does not determine the number.
    """
    if options.nodes and options.ranks:
        raise ConfigError(f"nodes={options.nodes} and ranks={options.ranks}: give only one of them")
    if options.nodes or options.ranks:
        return options.ranks or (options.nodes or 0) * hardware.gpus_per_node
    world = 1
    for axis in AXES:
        size = getattr(cfg.mesh, axis)
        if size == -1:
            raise ConfigError(f"mesh.{axis}=-1 takes the rest of the ranks: give their number with nodes= or ranks=")
        world *= max(1, size)
    return world


def words_of(key: str, text: str) -> list[str]:
    """Split overrides as a shell does.

    Raises:
        ArgumentError: a quote is not closed.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ArgumentError(f"{key}={text}: a quote is not closed") from error


def write_file(key: str, path: str, text: str) -> None:
    """Write the file that the option `key` requests.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        Path(path).write_text(text + "\n")
    except OSError as error:
        raise ConfigError(f"{key}={path}: cannot be written ({error.strerror})") from error
