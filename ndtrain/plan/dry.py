"""A dry run: run the program of rank r of N on tensors without memory."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from ndtrain.arguments import option
from ndtrain.config import Config, ConfigError, LocalShapes, OptimConfig
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.model.objective import make_objective
from ndtrain.parallel.distribution import Distribution
from ndtrain.parallel.param_groups import groups_of_shard
from ndtrain.parallel.recompute_budget import typical_batch
from ndtrain.plan import report, steady
from ndtrain.plan.hardware import Hardware, load_hardware
from ndtrain.plan.options import RunOptions, planned_config, write_file
from ndtrain.plan.progress import Progress
from ndtrain.plan.step import RankRecord, RecordedStep, record_step
from ndtrain.plan.world import pretended_world


def read_rank(key: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{key}={text}: must be a rank, a whole number from 0")
    return int(text)


def require_rank(rank: int, world: int) -> None:
    """Check that a run of `world` ranks has this rank.

    Raises:
        ConfigError: it does not.
    """
    if rank >= world:
        raise ConfigError(f"rank={rank}: there are {world} ranks, 0 to {world - 1}")


@dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    """Options of `plan dry`."""

    rank: int | None = option(
        "rank to plan, counted from 0; default: the first, a middle and the last rank of each pipeline position",
        None,
        read=read_rank,
    )


def run(options: Options, overrides: Sequence[str]) -> None:
    """Plan the ranks, print the tables and write the JSON.

    Raises:
        ConfigError: there is no such run or rank, a rank cannot be built, or the file cannot be written.
    """
    hardware = load_hardware(options.hardware)
    cfg = planned_config(overrides, options, hardware)
    world = MeshSpec.of(cfg.mesh).world_size
    if options.rank is not None:
        require_rank(options.rank, world)
    planned = _planned(cfg, hardware, [[options.rank]] if options.rank is not None else plan_alike(cfg))
    print(report.as_text(cfg, hardware, planned))
    if options.json:
        write_file("json", options.json, report.as_json(cfg, hardware, planned))


def _planned(cfg: Config, hardware: Hardware, groups: Sequence[list[int]]) -> list[report.Planned]:
    """Return the record of the first rank of each group. Equal records are merged."""
    planned = [
        report.Planned(ranks, stages_at(cfg, ranks[0]), dry_run(cfg, ranks[0], hardware.device))
        for ranks in Progress().count(groups, "planning a rank", len(groups))
    ]
    return report.merged(planned)


def dry_run(cfg: Config, rank: int, device: str) -> RankRecord:
    """Build the stages of a rank and run one training step, as on a device of this kind. If the step has many
    microbatches, extrapolate its record from two shorter steps (`plan.steady`).

    Args:
        cfg: resolved.
        device: "cpu" or "cuda".

    Raises:
        ConfigError: the rank cannot be built.
    """
    sample = steady.sample_of(cfg)
    if sample is None:
        return walk(cfg, rank, device).record
    counts = (1, sample.fewer, sample.more)  # a process's first step makes constants that later steps share
    _, fewer, more = (walk(steady.with_microbatches(cfg, count), rank, device) for count in counts)
    return steady.extended(fewer, more, sample)


def walk(cfg: Config, rank: int, device: str) -> RecordedStep:
    """Run all microbatches of a rank's step, as on a device of this kind.

    Raises:
        ConfigError: the rank cannot be built.
    """
    spec, meta = MeshSpec.of(cfg.mesh), torch.device("meta")
    with pretended_world(rank, spec.world_size, device):
        shapes, columns = LocalShapes.of(cfg), make_objective(cfg.objective).columns
        batches = [typical_batch(shapes, columns, cfg.data.pack, meta) for _ in range(cfg.microbatches)]
        return record_step(cfg, Mesh(spec, rank, meta), batches, separate_host=device == "cuda")


def plan_alike(cfg: Config) -> list[list[int]]:
    """Return the first, a middle and the last rank of each pp coordinate, grouped by equal programs. The first rank of
    a group represents the group."""
    distribution = Distribution.of(cfg)
    spec = distribution.mesh
    others = [axis for axis in spec.order if axis != "pp"]
    alike: dict[Hashable, list[int]] = {}
    for pp in range(spec.size("pp")):
        members = spec.members(spec.rank(dict.fromkeys(others, 0) | {"pp": pp}), *others)
        for rank in dict.fromkeys((members[0], members[len(members) // 2], members[-1])):
            alike.setdefault(_program(distribution, cfg.optim, rank), []).append(rank)
    return list(alike.values())


def _program(distribution: Distribution, optim: OptimConfig, rank: int) -> Hashable:
    """Return a key that is equal for ranks with equal programs.

    It holds the pp and the cp coordinate, and for each unit:
    - its number of elements, and how many of them this rank holds
    - how many of the rank's elements are in each parameter group
    - how many of the rank's elements it counts in the gradient norm and writes to a checkpoint
    - True if the rank is the first replica
    """
    coords, layouts = distribution.mesh.coords(rank), distribution.layouts(rank)
    units = []
    for unit in layouts.flat().values():
        own, groups = unit.own, unit.groups
        counted = [s.stop - s.start for s in unit.slices(*own, lambda t: t.owned)]
        updated = [(group, s.stop - s.start) for group, s in groups_of_shard(optim, unit)]
        units.append((unit.numel, own[1] - own[0], tuple(updated), tuple(counted), groups.replica == 0))
    return coords["pp"], coords["cp"], tuple(units)


def stages_at(cfg: Config, rank: int) -> tuple[int, ...]:
    """Return the pipeline stages that a rank holds."""
    distribution = Distribution.of(cfg)
    return tuple(distribution.placement.schedule.stages_of(distribution.mesh.coords(rank)["pp"]))
