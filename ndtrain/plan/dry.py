"""A dry run: run the program of rank r of N on tensors without memory."""

import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ndtrain.arguments import option
from ndtrain.config import Config, ConfigError, LocalShapes, OptimConfig
from ndtrain.mesh.mesh import EP, Mesh, MeshSpec
from ndtrain.model.objective import make_objective
from ndtrain.parallel.distribution import Distribution
from ndtrain.parallel.param_groups import groups_of_shard
from ndtrain.parallel.recompute_budget import typical_batch
from ndtrain.plan import steady
from ndtrain.plan.hardware import Hardware, load_hardware
from ndtrain.plan.options import RunOptions, planned_config, write_file
from ndtrain.plan.recording import HOST
from ndtrain.plan.report import Progress, si, table
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
    print(as_text(cfg, hardware, planned))
    if options.json:
        write_file("json", options.json, as_json(cfg, hardware, planned))


@dataclass(frozen=True)
class Planned:
    """A rank and its record.

    Attributes:
        ranks: this rank, and all ranks with the same record.
        stages: the rank's pipeline stages.
    """

    ranks: list[int]
    stages: tuple[int, ...]
    record: RankRecord


def _planned(cfg: Config, hardware: Hardware, groups: Sequence[list[int]]) -> list[Planned]:
    """Return the record of the first rank of each group. Equal records are merged."""
    planned = [
        Planned(ranks, stages_at(cfg, ranks[0]), dry_run(cfg, ranks[0], hardware.device))
        for ranks in Progress().count(groups, "planning a rank", len(groups))
    ]
    return merged(planned)


def merged(planned: Sequence[Planned]) -> list[Planned]:
    """Merge equal records of the same stages into one, with all their ranks."""
    by_record: dict[Any, Planned] = {}
    for p in planned:
        body = asdict(p.record) | {"seconds": 0, "stages": p.stages}
        key = json.dumps(body, sort_keys=True)
        if key in by_record:
            by_record[key].ranks.extend(p.ranks)
        else:
            by_record[key] = Planned(list(p.ranks), p.stages, p.record)
    return list(by_record.values())


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


# ----------------------------------------------------------------------------------------------------------- the tables


def as_text(cfg: Config, hardware: Hardware, planned: Sequence[Planned]) -> str:
    """Format the plan as tables for people, with decimal prefixes."""
    mesh = MeshSpec.of(cfg.mesh)
    sizes = " ".join(f"{a}={mesh.size(a)}" for a in (*mesh.order, EP) if mesh.size(a) > 1) or "one rank"
    records = {_name(p.ranks): p.record for p in planned}
    first = planned[0].record
    files, size = first.checkpoint.files, first.checkpoint.bytes
    parts = [
        f"{mesh.world_size} ranks of {hardware.name}: {sizes}, zero={cfg.mesh.zero}, {cfg.microbatches} microbatches"
        + f"; attention by {first.attention}" * bool(first.attention)
        + "; compiled" * first.compiled,
        _overview(mesh, hardware, planned),
        "alive at the peak\n" + _by_rank(records, lambda r: {k: si(n, "B") for k, n in sorted(r.at_peak.items())}),
        "collectives per step: count and buffer bytes\n" + _by_rank(records, _traffic),
        f"a checkpoint: {files} files{' per host' * (cfg.checkpoint.layout == 'host')}, {si(size, 'B')}",
        *_notes(hardware, planned),
    ]
    return "\n\n".join(parts)


def _overview(mesh: MeshSpec, hardware: Hardware, planned: Sequence[Planned]) -> str:
    head = ["rank", "place", "stages", "state", "peak", "of memory", "matmul", "attention", "writes", "seconds"]
    rows = [head]
    for p in planned:
        r = p.record
        share = f"{r.peak_bytes / hardware.memory_gb / 1e7:.0f} %" if hardware.memory_gb else "-"
        on_device = sum(n for kind, n in r.state.items() if not kind.startswith(HOST))
        flops = [si(r.flops.get(kind, 0), "FLOP") for kind in ("matmul", "attention")]
        rows.append([
            _name(p.ranks), mesh.where(p.ranks[0]) or "-", ",".join(map(str, p.stages)), si(on_device, "B"),
            si(r.peak_bytes, "B"), share, *flops, si(r.checkpoint.rank_bytes, "B"), f"{r.seconds:.1f}",
        ])  # fmt: skip
    return table(rows)


def _traffic(r: RankRecord) -> dict[str, str]:
    return {f"{t.axis} {t.op}": f"{t.count} x, {si(t.bytes, 'B')}" for t in r.traffic}


def _by_rank(records: dict[str, RankRecord], cells: Callable[[RankRecord], dict[str, str]]) -> str:
    """Make a table with a column for each record, and a row for each name that `cells` returns for any record."""
    columns = {rank: cells(r) for rank, r in records.items()}
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    return table([["rank", *columns], *([n, *(c.get(n, "-") for c in columns.values())] for n in names)])


def _notes(hardware: Hardware, planned: Sequence[Planned]) -> list[str]:
    over = [_name(p.ranks) for p in planned if p.record.peak_bytes > 1e9 * (hardware.memory_gb or float("inf"))]
    return [f"does not fit in {hardware.memory_gb:g} GB: rank {', '.join(over)}"] if over else []


def _name(ranks: Sequence[int]) -> str:
    return ",".join(map(str, ranks))


def as_json(cfg: Config, hardware: Hardware, planned: Sequence[Planned]) -> str:
    """Format the plan as JSON, in bytes and FLOPs."""
    mesh = MeshSpec.of(cfg.mesh)
    body = {
        "hardware": asdict(hardware),
        "ranks": mesh.world_size,
        "mesh": {a: mesh.size(a) for a in (*mesh.order, EP)} | {"zero": cfg.mesh.zero},
        "plans": [{"ranks": p.ranks, "stages": p.stages, **asdict(p.record)} for p in planned],
    }
    return json.dumps(body, indent=1)
