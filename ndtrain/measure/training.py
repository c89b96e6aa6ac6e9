"""Training steps of one configuration by ours and by peers, on synthetic tokens. Steps are queued back to back as in a
run, compared at the first step, and timed in alternating rounds."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ndtrain.config import Config
from ndtrain.data import Batch, Tokens, microbatches, rows_of
from ndtrain.data.token_array import Packing
from ndtrain.engine.train_step import StepReport, TrainingStep
from ndtrain.measure.rounds import BlockTimer, Repeats, max_over_ranks, quartiles, ratio, run_rounds
from ndtrain.mesh.mesh import Mesh
from ndtrain.mesh.sequence_sharding import SequenceSharding
from ndtrain.mesh.sharding import BATCH_AXES
from ndtrain.model import flops
from ndtrain.model.init import Draw
from ndtrain.observe import peak_flops, peak_memory_bytes, reset_peak_memory
from ndtrain.parallel.build import DTYPES, build_stages, initialise

DISTINCT = 4  # steps before the batches repeat
# Relative difference allowed between equal work at the first step: (loss, norm of all gradients). There the loss hardly
# depends on the computation, so the norm has to show whether the model is the same
TOLERANCE = {"fp32": (1e-5, 1e-3), "fp64": (1e-9, 1e-6), "bf16": (5e-3, 5e-2), "fp8": (1e-2, 1e-1)}


class DifferentWork(RuntimeError):
    """An implementation's step has a different result from ours, or ours has none."""


class Outcome(NamedTuple):
    """Loss and gradient norm of a step over the whole mesh, before its update."""

    loss: float
    grad_norm: float


@dataclass
class Implementation:
    """A training step, ready to run.

    Attributes:
        launch: queues a step on this rank's microbatches. Returns a function that waits for the outcome.
        state_bytes: bytes held on the device between steps; None: not known.
        skipped_ops: ops that the recompute of each block skips (see `flops.hardware_flops_per_token`); None: not known.
    """

    launch: Callable[[Sequence[Batch]], Callable[[], Outcome]]
    state_bytes: int | None = None
    skipped_ops: Sequence[frozenset[str] | None] | None = None


Build = Callable[[Config, Mesh], Implementation]


def draw_on(device: torch.device) -> Draw:
    """Return a function that draws N(0, 1) elements on the device. `initialise`'s own stream takes minutes for 8
    billion. The same piece of a parameter always gets the same elements."""

    def draw(seed: int, name: str, start: int, length: int) -> Tensor:
        digest = hashlib.sha256(f"{seed}\0{name}\0{start}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))
        return torch.randn(length, generator=generator, device=device)

    return draw


def ours(cfg: Config, mesh: Mesh) -> Implementation:
    """Build ndtrain's own step."""
    stages = build_stages(cfg, mesh)
    initialise(stages, cfg.run.seed, draw_on(mesh.device))
    step, numbers = TrainingStep(cfg, mesh, stages), count(1)

    def launch(batches: Sequence[Batch]) -> Callable[[], Outcome]:
        report = step.run(next(numbers), batches)
        return lambda: outcome_of(report.wait())

    return Implementation(launch, stages.units.state_bytes(), stages.recompute.skipped_ops)


def outcome_of(report: StepReport) -> Outcome:
    """Return the outcome of a step.

    Raises:
        DifferentWork: the step was skipped.
    """
    if report.skipped:
        raise DifferentWork(
            f"step {report.step} was skipped: loss {report.loss:.6g}, gradient norm {report.grad_norm:.6g}"
        )
    return Outcome(report.loss, report.grad_norm)


class QueuedSteps:
    """Launches one step per call and reads the outcomes only in `finish`, so that no step waits for the host.

    Args:
        batches: this rank's microbatches for each of some steps; they repeat.
    """

    def __init__(self, implementation: Implementation, batches: Sequence[Sequence[Batch]], device: torch.device):
        self.implementation, self.device, self.outcomes = implementation, device, []
        self._batches, self._launched, self._unread = batches, 0, []

    def __call__(self) -> None:
        self._unread.append(self.implementation.launch(self._batches[self._launched % len(self._batches)]))
        self._launched += 1

    def finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.outcomes += [read() for read in self._unread]
        self._unread.clear()


class Chain(Tokens):
    """Sequences that a model can learn: three of four tokens follow from the previous token. The same on every mesh."""

    def __init__(self, vocab_size: int, length: int):
        self._states, self._length = min(vocab_size, 1024), length

    def tokens(self, step: int, rows: Sequence[int]) -> np.ndarray:
        """Return int64 [rows, length]."""
        return np.stack([self._sequence(np.random.default_rng((step, row))) for row in rows])

    def _sequence(self, draw: np.random.Generator) -> np.ndarray:
        fresh = draw.integers(0, self._states, self._length)
        index = np.arange(self._length)
        begins = np.maximum.accumulate(np.where(draw.random(self._length) < 0.25, index, 0))
        return (fresh[begins] + 7 * (index - begins)) % self._states


def batches_of(cfg: Config, mesh: Mesh, step: int) -> list[Batch]:
    """Return this rank's microbatches of a step (from 0), on its device. With data.pack, token 0 ends a document."""
    t, source = cfg.train, Chain(cfg.model.vocab_size, cfg.train.seq_len + 1)
    rows = rows_of(mesh.index(*BATCH_AXES), mesh.size(*BATCH_AXES), t.global_batch)
    packing = Packing(0) if cfg.data.pack else None
    batches = microbatches(source, step, rows, t.micro_batch, SequenceSharding.of(cfg), mesh.index("cp"), packing)
    return [b.to(mesh.device) for b in batches]


def timed(
    cfg: Config,
    mesh: Mesh,
    builders: Mapping[str, Build],
    repeats: Repeats,
    extra: Callable[[QueuedSteps], Any] | None = None,
) -> dict[str, Any]:
    """Build, compare, warm up and time these implementations on one rank. Ratios are the others' times over the first
    one's.

    Args:
        builders: name -> what builds the implementation.
        extra: called with the first implementation's steps after the timing. Its result is returned under "extra".

    Raises:
        DifferentWork: an implementation's first step, or its updates, differ from the first implementation's.
    """
    names = list(builders)
    batches, tolerance = [batches_of(cfg, mesh, step) for step in range(DISTINCT)], TOLERANCE[cfg.precision.compute]
    steps = {name: QueuedSteps(build(cfg, mesh), batches, mesh.device) for name, build in builders.items()}
    for queued in steps.values():
        queued()
        queued.finish()
    compare({name: queued.outcomes[0] for name, queued in steps.items()}, *tolerance)
    reset_peak_memory(mesh.device)
    timers = {name: BlockTimer(queued, queued.finish) for name, queued in steps.items()}
    run_rounds(timers, repeats)
    compare_progress({name: [o.loss for o in queued.outcomes] for name, queued in steps.items()}, tolerance[0])
    memory = int(max_over_ranks(peak_memory_bytes(mesh.device)))
    more = extra(steps[names[0]]) if extra else None
    rates = rates_of(cfg, mesh) if mesh.rank == 0 else None
    if dist.is_initialized():
        dist.barrier()  # the others wait while the peak is measured
    return {
        "sides": {name: _figures(timers[name], steps[name], rates) for name in names} if rates else {},
        "ratios": {name: ratio(timers[name], timers[names[0]]) for name in names[1:]},
        "peak_memory_bytes": memory if len(names) == 1 else None,  # with several, their memory adds up
        "parameters": flops.parameter_count(cfg.model),
        "tokens_per_step": cfg.train.global_batch * cfg.train.seq_len,
        "extra": more,
    }


def compare(outcomes: dict[str, Outcome], *bounds: float) -> None:
    """Compare the outcomes of a step with the first implementation's.

    Args:
        outcomes: outcome of the same step, by implementation.
        bounds: largest relative differences of the loss and of the gradient norm.

    Raises:
        DifferentWork: a difference exceeds its bound or is NaN.
    """
    (first, expected), *others = outcomes.items()
    for name, outcome in others:
        for what, bound, own, other in zip(Outcome._fields, bounds, expected, outcome, strict=True):
            if not abs(other - own) <= bound * abs(own):
                raise DifferentWork(f"not the same work: {what} of {name} is {other:.6g}, of {first} {own:.6g}")


def compare_progress(losses: dict[str, list[float]], bound: float) -> None:
    """Check that all implementations made similar updates. Rounding errors grow with the steps. The last losses may
    differ by a fifth of the first one's change in loss. If `bound` times the loss is more, that is the limit.

    Raises:
        DifferentWork: a last loss differs by more, or is NaN.
    """
    (first, expected), *others = losses.items()
    allowed = max(bound * abs(expected[-1]), 0.2 * abs(expected[-1] - expected[0]))
    for name, own in others:
        if not abs(own[-1] - expected[-1]) <= allowed:
            last = f"the last loss of {name} is {own[-1]:.6g}, of {first} {expected[-1]:.6g}"
            raise DifferentWork(f"not the same work: {last}")


Rates = Callable[[float, Implementation], dict[str, float | None]]


def rates_of(cfg: Config, mesh: Mesh) -> Rates:
    """Return a function (ms per step, implementation) -> tokens per second, and MFU and HFU per device."""
    m, t = cfg.model, cfg.train
    peak = peak_flops(cfg.hardware, mesh.device.type, DTYPES[cfg.precision.compute])

    def rates(ms: float, implementation: Implementation) -> dict[str, float | None]:
        tokens_per_s, skipped = t.global_batch * t.seq_len / ms * 1e3, implementation.skipped_ops
        share = tokens_per_s / mesh.spec.world_size / peak
        return {
            "tokens_per_s": tokens_per_s,
            "mfu": share * flops.flops_per_token(m, t.seq_len),
            "hfu": None if skipped is None else share * flops.hardware_flops_per_token(m, t.seq_len, skipped),
        }

    return rates


def _figures(timer: BlockTimer, steps: QueuedSteps, rates: Rates) -> dict[str, Any]:
    of = quartiles(timer.block_ms)
    return {
        "ms_per_step": of["median"],
        "q1": of["q1"],
        "q3": of["q3"],
        **rates(of["median"], steps.implementation),
        "state_bytes": steps.implementation.state_bytes,
        "block_ms": timer.block_ms,
        "losses": [outcome.loss for outcome in steps.outcomes],
        "grad_norms": [outcome.grad_norm for outcome in steps.outcomes],
        "steps": len(steps.outcomes),
    }
