"""Counts what one rank of a large run does besides computing, for several numbers of ranks, in this process.

Nothing is sent: a rank is built without memory, and the diagnosis of a hang gets the messages of all ranks. Seconds are
CPU time.
"""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import ceil
from random import Random
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from lab.islands.figures import rounded
from lab.islands.options import OutOptions
from ndtrain.arguments import option
from ndtrain.checkpoint.elements import BLOCK, described_of, parts_of, slices_of
from ndtrain.checkpoint.layouts import Owned, owned_of
from ndtrain.checkpoint.pieces import STEMS
from ndtrain.checkpoint.safetensors_io import plan_files
from ndtrain.config import Config, ConfigError
from ndtrain.measure.results import save
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.observe.stragglers import Stragglers
from ndtrain.parallel.build import Stages, build_stages
from ndtrain.plan.hardware import load_hardware
from ndtrain.plan.options import RunOptions, planned_config
from ndtrain.plan.world import pretended_world
from ndtrain.run import descriptors
from ndtrain.run.hang_diagnosis import diagnose, questions
from ndtrain.run.hang_report import Report
from tests.scale.hung_cluster import Cluster

_TP = 8
_RANKS_OF_A_HOST = 8
_SAMPLE = 24  # ranks whose files are counted


@dataclass(frozen=True)
class Options(OutOptions):
    """Options of the trial."""

    ranks: str = option("numbers of ranks, with commas", "32,256,2048,16384")
    recipe: str = option("the model", "llama3_405b")
    hardware: str = option("the devices", "h100")
    hang: int = option("most ranks whose hang is diagnosed: it needs 150 KB of memory for each", 16384)


def run(options: Options) -> bool:
    """Count, print and write. Return True."""
    options.check()
    if not all(text.isdecimal() for text in options.ranks.split(",")):
        raise ConfigError(f"ranks={options.ranks}: must be whole numbers, with commas")
    rows = [_counted(options, int(text)) for text in options.ranks.split(",")]
    save("scale table", options, rows=rounded(rows))
    for key in rows[0]:
        print(f"{key:28}", *(f"{row[key]:>12,.5g}" if row[key] is not None else f"{'-':>12}" for row in rows))
    return True


@contextmanager
def _timed(into: dict[str, Any], key: str) -> Iterator[None]:
    gc.collect()
    began = time.process_time()
    yield
    into[key] = time.process_time() - began


def _counted(options: Options, ranks: int) -> dict[str, Any]:
    pp = 16 if ranks >= 16 * _TP else 4
    axes = {"pp": pp, "tp": _TP, "fsdp": ranks // _TP // pp}
    overrides = [f"recipe={options.recipe}", *(f"mesh.{axis}={size}" for axis, size in axes.items())]
    overrides += [f"train.global_batch={max(256, axes['fsdp'] * pp)}", "train.micro_batch=1"]
    overrides += ["schedule.split=null"] if pp < 16 else []
    row: dict[str, Any] = {"ranks": ranks}
    with _timed(row, "configuration_s"):
        cfg = planned_config(overrides, RunOptions(hardware=options.hardware), load_hardware(options.hardware))
    spec = MeshSpec.of(cfg.mesh)
    with _groups_counted() as made, _timed(row, "planning_s"):
        _of_rank(cfg, ranks // 2 + 3, lambda stages: None)
    row["groups"] = len(made)
    row["descriptors"] = descriptors.needed("nccl", 1, ranks)
    row["descriptors_rank_0"] = descriptors.needed("nccl", 0, ranks)
    row |= _of_checkpoint(cfg, ranks)
    watch, busy = Stragglers(spec), Random(0)
    times = [busy.random() for _ in range(ranks)]
    with _timed(row, "stragglers_s"):
        watch.compare(times)
    return row | (_of_hang(spec) if ranks <= options.hang else dict.fromkeys(_HANG))


def _of_rank(cfg: Config, rank: int, look: Callable[[Stages], Any]) -> Any:
    """Build the stages of a rank without memory, and return what `look` returns."""
    spec, meta = MeshSpec.of(cfg.mesh), torch.device("meta")
    with pretended_world(rank, spec.world_size, "cuda"):
        return look(build_stages(cfg, Mesh(spec, rank, meta)))


@contextmanager
def _groups_counted() -> Iterator[list[Any]]:
    """Count the process groups that are created in this block. On NCCL each is one split of the world."""
    made: list[Any] = []
    new_group = dist.new_group

    def counted(*args: Any, **options: Any) -> Any:
        made.append(args)
        return new_group(*args, **options)

    with mock.patch.object(dist, "new_group", counted):
        yield made


def _of_checkpoint(cfg: Config, ranks: int) -> dict[str, Any]:
    """Return figures of the files that some ranks write and read."""
    own = sorted(Random(1).sample(range(ranks), min(ranks, _SAMPLE)))
    found = [_of_rank(cfg, rank, lambda stages: _files_of(cfg, stages)) for rank in own]
    sizes = sorted(size for one in found for size in one["writes"])
    packed = sorted(size for one in found for size in one["packed"])
    hosts = -(-ranks // _RANKS_OF_A_HOST)
    return {
        "files": found[0]["files"],
        "files_written": max(len(one["written"]) for one in found),
        "files_read": max(len(one["read"]) for one in found),
        "writers_of_a_file": ceil(ranks * sum(len(one["written"]) for one in found) / len(found) / found[0]["files"]),
        "writes": max(len(one["writes"]) for one in found),
        "smallest_write": sizes[0],
        "median_write": median(sizes),
        "host_files": hosts * len(STEMS),
        "host_writers_of_a_file": min(ranks, _RANKS_OF_A_HOST),
        "host_writes": max(len(one["packed"]) for one in found),
        "host_smallest_write": packed[0],
        "host_median_write": median(packed),
    }


def _files_of(cfg: Config, stages: Stages) -> dict[str, Any]:
    plans = [plan_files(s, d, cfg.checkpoint.max_file_bytes) for s, d in described_of(stages).items()]
    where = {name: file.name for files in plans for file in files for name in file.offsets}
    owned = list(owned_of(stages, writes_biases=False))
    read = {
        where[part.prefix + held.tensor]
        for parts in parts_of(stages.units.plan).values()
        for part in parts
        for held in slices_of(stages, part, owned_only=False)
    }
    writes = [o.rows.length * o.values.element_size() for o in owned for _ in range(o.rows.number)]
    return {
        "files": len(set(where.values())),
        "written": {where[o.name] for o in owned},
        "read": read,
        "writes": writes,
        "packed": [size for part in parts_of(stages.units.plan) for size in _packed(part, owned)],
    }


def _packed(stem: str, owned: Sequence[Owned]) -> Iterator[int]:
    """Yield the bytes of each write of a rank into the file of its host: blocks that follow one another are joined."""
    waiting = 0
    for o in owned:
        item = o.values.element_size()
        for block in o.rows.chunks(BLOCK // item) if o.stem == stem else ():
            if waiting + block.numel * item > BLOCK:
                yield waiting
                waiting = 0
            waiting += block.numel * item
    yield waiting


_HANG = ("report_bytes", "hang_read_s", "hang_diagnose_s")


def _of_hang(spec: MeshSpec) -> dict[str, Any]:
    """Return what it costs to diagnose the hang of a rank that sleeps: on the rank that prints the diagnosis."""
    cluster = Cluster(spec, spec.world_size // 3, lambda step: step[:2])
    own = list(cluster.reports())
    sent: Mapping[int, Any] = {report.rank: asdict(report.brief()) for report in own}
    row: dict[str, Any] = {"report_bytes": max(len(repr(x)) for x in list(sent.values())[:100])}
    gc.collect()
    gc.freeze()
    with _timed(row, "hang_read_s"):
        reports = {rank: Report.from_json(value, rank, spec.world_size) for rank, value in sent.items()}
        asked = questions(reports)
    near = {report.rank: report.near(asked) for report in own}
    with _timed(row, "hang_diagnose_s"):
        text = diagnose({rank: report.with_records(near[rank]) for rank, report in reports.items()}, spec)
    gc.unfreeze()
    if not text.startswith(f"rank {cluster.victim} "):
        raise AssertionError(text)
    return row
