"""The tables and the JSON of a plan."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ndtrain.config import Config
from ndtrain.mesh.mesh import EP, MeshSpec
from ndtrain.plan.hardware import Hardware
from ndtrain.plan.recording import HOST
from ndtrain.plan.step import RankRecord


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
        f"a checkpoint: {files} files, {si(size, 'B')}",
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


def table(rows: Iterable[Sequence[str]]) -> str:
    """Format columns aligned to the right, the first one to the left."""
    rows = list(rows)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )


_PREFIXES = ["", "k", "M", "G", "T", "P", "E", "Z"]


def si(number: float, unit: str) -> str:
    """Format a number with three digits and a decimal prefix: 27.9 GB."""
    for prefix in _PREFIXES:
        if abs(number) < 999.5:
            return f"{number:.3g} {prefix}{unit}"
        number /= 1000
    return f"{number * 1000:.0f} {_PREFIXES[-1]}{unit}"


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
