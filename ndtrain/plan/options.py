"""The plan's own arguments, which stand among the overrides of the run."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from ndtrain.arguments import option, parse
from ndtrain.config import AXES, Config, ConfigError
from ndtrain.plan.hardware import Hardware


@dataclass(frozen=True)
class Options:
    """What a plan is for."""

    hardware: str = option("cpu, a100, h100, h200, b200, or a description of your own, FILE.yaml")
    nodes: int | None = option("hosts; their devices make the ranks", None)
    ranks: int | None = option("ranks, in place of nodes; neither: as many as the mesh has", None)
    rank: int | None = option(
        "the rank to plan, from 0; unless given the first, a middle and the last one of each place in the pipeline",
        None,
        read=lambda key, text: _rank(text),
    )
    json: str | None = option("the file to write the plan to", None)


def _rank(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"rank={text}: must be a rank, a whole number from 0")
    return int(text)


def split_options(args: Sequence[str]) -> tuple[Options, list[str]]:
    """The plan's options, and the other arguments.

    Raises:
        ArgumentError, ConfigError: an option has no such value, or `hardware` is missing.
    """
    own = {f.name for f in fields(Options)}
    mine = [arg for arg in args if arg.partition("=")[0] in own]
    return parse(Options, mine), [arg for arg in args if arg not in mine]


def world_of(cfg: Config, options: Options, hardware: Hardware) -> int:
    """The number of ranks.

    Raises:
        ConfigError: it is given twice, or not at all; or there is no such rank.
    """
    if options.nodes and options.ranks:
        raise ConfigError(f"nodes={options.nodes} and ranks={options.ranks}: give only one of them")
    world = options.ranks or (options.nodes or 0) * hardware.gpus_per_node
    if not world:
        world = 1
        for axis in AXES:
            size = getattr(cfg.mesh, axis)
            if size == -1:
                raise ConfigError(f"mesh.{axis}=-1 takes the rest of the ranks: give their number by nodes= or ranks=")
            world *= max(1, size)
    if options.rank is not None and options.rank >= world:
        raise ConfigError(f"rank={options.rank}: there are {world} ranks, 0 to {world - 1}")
    return world
