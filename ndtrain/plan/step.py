"""Builds a rank's stages and runs one training step, recorded. A dry run and a real one call the same function."""

import gc
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ndtrain.checkpoint.elements import described_of, parts_of, slices_of
from ndtrain.checkpoint.safetensors_io import plan_files
from ndtrain.config import CheckpointConfig, Config
from ndtrain.data import Batch
from ndtrain.engine.train_step import TrainingStep
from ndtrain.mesh.flight_recorder import CollectiveRecord
from ndtrain.mesh.mesh import Mesh
from ndtrain.parallel.build import Stages, build_stages
from ndtrain.parallel.compile_choice import compiles
from ndtrain.plan.compiled import pretended_compiler
from ndtrain.plan.recording import HOST, Peak, Recording, classify_state, label_step
from ndtrain.plan.world import journalled


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind over one axis in a step.

    Attributes:
        axis: of the mesh, or several as in "fsdp+cp".
        op: its name in the flight recorder.
        bytes: of the whole buffers.
    """

    axis: str
    op: str
    count: int
    bytes: int


@dataclass(frozen=True)
class CheckpointSize:
    """A checkpoint of the run.

    Attributes:
        files: files with tensors: of the whole checkpoint, or of each host in the layout `host`.
        bytes: of the whole checkpoint.
        rank_bytes: bytes that this rank writes.
    """

    files: int
    bytes: int
    rank_bytes: int


@dataclass(frozen=True)
class RankRecord:
    """The memory, the FLOPs and the traffic of one rank in a training step.

    Attributes:
        state: kind -> bytes between steps. A kind that begins with "host: " is in host memory.
        peak_bytes: the most bytes alive during a step, without host memory if the device has its own.
        at_peak: kind -> bytes alive at that time, including host memory.
        flops: "matmul" and "attention" -> FLOPs of the step.
        attention: the name of the attention kernel; empty on a CPU.
        compiled: True if the run compiles its blocks and its loss.
        seconds: time that it took to make this record.
    """

    state: dict[str, int]
    peak_bytes: int
    at_peak: dict[str, int]
    flops: dict[str, int]
    traffic: tuple[Traffic, ...]
    checkpoint: CheckpointSize
    attention: str
    compiled: bool
    seconds: float


class RecordedStep(NamedTuple):
    """A rank's record, and the peaks of its parts.

    Attributes:
        windows: part -> peak, in order: None (before the first action), each action of the rank's row, and `AFTER`.
    """

    record: RankRecord
    windows: dict[Hashable, Peak]


AFTER = "after the last action"


def record_step(
    cfg: Config,
    mesh: Mesh,
    batches: Sequence[Batch],
    separate_host: bool,
    fill: Callable[[Stages], None] = lambda stages: None,
) -> RecordedStep:
    """Build this rank's stages and run the first training step.

    Nothing is compiled if tensors have memory, because the allocations of compiled code cannot be followed.

    Args:
        batches: this rank's microbatches.
        separate_host: True if host memory is separate from the device's memory.
        fill: sets the stages' weights.
    """
    began, recording = time.perf_counter(), Recording(separate_host)
    pretends = mesh.device.type == "meta"
    with pretended_compiler() if pretends else torch.compiler.set_stance("force_eager"), recording:
        stages = build_stages(cfg, mesh)
        classify_state(recording, stages.units)
        fill(stages)
        with recording.labelled(f"{HOST}copies" if cfg.optim.offload else "update"):
            step = TrainingStep(cfg, mesh, stages)
        label_step(recording, stages, step)
        recording.open_window_at(step.executor, "run_turn", lambda turn, number: turn.action)
        recording.open_window_at(step.executor.pipeline, "finish", lambda: AFTER)
        gc.collect()
        state = recording.state_bytes()
        recording.restart()
        with journalled(journal := []):
            step.run(1, batches).result.wait("the recorded step")
        recording.open_window(None)  # closes the last window
    peak = max(recording.windows.values(), key=lambda p: p.nbytes)
    record = RankRecord(
        state=state,
        peak_bytes=peak.nbytes,
        at_peak=peak.kinds,
        flops=dict(recording.flops),
        traffic=traffic_of([entry.record for entry in journal if entry.group is not None]),
        checkpoint=checkpoint_size(stages, cfg.checkpoint),
        attention=next(iter(stages.models.values())).kernel or "",
        compiled=compiles(cfg.train, cfg.model, mesh.spec, mesh.device),
        seconds=time.perf_counter() - began,
    )
    return RecordedStep(record, recording.windows)


def traffic_of(collectives: Sequence[CollectiveRecord]) -> tuple[Traffic, ...]:
    """Sum up the collectives by axis and operation."""
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for c in collectives:
        key = c.axis, c.op
        counts[key] += 1
        sizes[key] += c.nbytes
    return tuple(Traffic(axis, op, counts[axis, op], sizes[axis, op]) for axis, op in sorted(counts))


def checkpoint_size(stages: Stages, options: CheckpointConfig) -> CheckpointSize:
    """Return the number and bytes of a checkpoint's files, and this rank's share."""
    plans = {stem: plan_files(stem, of, options.max_file_bytes) for stem, of in described_of(stages).items()}
    files = [file for planned in plans.values() for file in planned]
    parts = [part for of_stem in parts_of(stages.units.plan).values() for part in of_stem]
    own = sum(s.rows.numel * part.dtype.itemsize for part in parts for s in slices_of(stages, part, owned_only=True))
    return CheckpointSize(len(plans if options.layout == "host" else files), sum(f.size for f in files), own)
