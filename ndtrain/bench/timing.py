"""One configuration's training steps by us and by others, on made-up tokens: queued one behind the other as a run does
it, compared at the first step, and timed by turns."""

import hashlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ndtrain.bench import baselines
from ndtrain.bench.turns import Pace, Turns, ratio, slowest, take_turns
from ndtrain.config import Config
from ndtrain.data import Batch, microbatches, rows_of
from ndtrain.distributed.mesh import Mesh
from ndtrain.distributed.sharding import BATCH_AXES
from ndtrain.engine.train_step import StepReport, TrainingStep
from ndtrain.metrics import peak_flops, peak_memory_bytes, reset_peak_memory
from ndtrain.model import flops
from ndtrain.parallel.build import DTYPES, build_stages, initialise, sequence_sharding

DISTINCT = 4  # steps before the batches repeat
# How far equal work may differ at the first step, relative: the loss hardly depends on the arithmetic there, so the
# norm of all gradients says whether it is the same model
AGREE = {"fp32": (1e-5, 1e-3), "fp64": (1e-9, 1e-6), "bf16": (5e-3, 5e-2), "fp8": (1e-2, 1e-1)}


class DifferentWork(RuntimeError):
    """A side's first step came to something else than ours."""


class Outcome(NamedTuple):
    """What a step came to over the whole mesh, before its update."""

    loss: float
    grad_norm: float


@dataclass
class Side:
    """One side, built.

    Attributes:
        launch: queues a step on this rank's microbatches; what it returns waits for the outcome.
        state_bytes: held on the device between steps; None: not known.
        spared: what the second run of each block leaves out (`cost.hardware_flops_per_token`); None: not known.
    """

    launch: Callable[[Sequence[Batch]], Callable[[], Outcome]]
    state_bytes: int | None = None
    skipped_ops: Sequence[frozenset[str] | None] | None = None


def draw_on(device: torch.device) -> baselines.Draw:
    """Draws N(0, 1) elements on the device itself: `initialise`'s own stream takes minutes for 8 billion of them. The
    same for the same piece of a parameter."""

    def draw(seed: int, name: str, start: int, length: int) -> Tensor:
        digest = hashlib.sha256(f"{seed}\0{name}\0{start}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))
        return torch.randn(length, generator=generator, device=device)

    return draw


def build(name: str, cfg: Config, mesh: Mesh) -> Side:
    """The side `name`: ours, or one of `baselines.PEERS`."""
    if name == "ours":
        return ours(cfg, mesh)
    loop = baselines.PEERS[name](cfg, mesh.device, draw_on(mesh.device))

    def launch(batches: Sequence[Batch]) -> Callable[[], Outcome]:
        loss, norm = loop.launch(batches)
        return lambda: Outcome(loss.item(), norm.item())

    return Side(launch)


def ours(cfg: Config, mesh: Mesh) -> Side:
    """ndtrain's own step."""
    stages = build_stages(cfg, mesh)
    initialise(stages, cfg, draw_on(mesh.device))
    step, numbers = TrainingStep(cfg, mesh, stages), count(1)

    def launch(batches: Sequence[Batch]) -> Callable[[], Outcome]:
        report = step.run(next(numbers), batches)
        return lambda: _outcome(report.wait())

    return Side(launch, stages.units.state_bytes(), step.skipped_ops)


def _outcome(report: StepReport) -> Outcome:
    return Outcome(report.loss, report.grad_norm)


class Steady:
    """Launches a step a call and reads what they came to in the end, so that the host is never waited for.

    Args:
        batches: for each of some steps this rank's microbatches, which repeat.
    """

    def __init__(self, side: Side, batches: Sequence[Sequence[Batch]], device: torch.device):
        self.side, self.device, self.outcomes = side, device, []
        self._batches, self._launched, self._unread = batches, 0, []

    def __call__(self) -> None:
        self._unread.append(self.side.launch(self._batches[self._launched % len(self._batches)]))
        self._launched += 1

    def finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.outcomes += [read() for read in self._unread]
        self._unread.clear()


class Chain:
    """Sequences that a model can learn: three of four tokens follow from the one before. The same on every mesh."""

    def __init__(self, vocab_size: int, length: int):
        self._states, self._length = min(vocab_size, 1024), length

    def tokens(self, step: int, rows: Sequence[int]) -> np.ndarray:
        """int64 [rows, length]"""
        return np.stack([self._sequence(np.random.default_rng((step, row))) for row in rows])

    def _sequence(self, draw: np.random.Generator) -> np.ndarray:
        fresh = draw.integers(0, self._states, self._length)
        place = np.arange(self._length)
        begins = np.maximum.accumulate(np.where(draw.random(self._length) < 0.25, place, 0))
        return (fresh[begins] + 7 * (place - begins)) % self._states


def batches_of(cfg: Config, mesh: Mesh, step: int) -> list[Batch]:
    """This rank's microbatches of a step (from 0), on its device. With data.pack, token 0 ends a document."""
    t, source = cfg.train, Chain(cfg.model.vocab_size, cfg.train.seq_len + 1)
    rows = rows_of(mesh.index(*BATCH_AXES), mesh.size(*BATCH_AXES), t.global_batch)
    eos = 0 if cfg.data.pack else None
    found = microbatches(source, step, rows, t.micro_batch, sequence_sharding(cfg), mesh.index("cp"), eos)
    return [b.to(mesh.device) for b in found]


def timed(
    cfg: Config, mesh: Mesh, names: Sequence[str], pace: Pace, extra: Callable[[Steady], Any] | None = None
) -> dict[str, Any]:
    """On one rank: the sides `names`, built, compared, warm and timed; the ratios are of the others to the first.

    Args:
        extra: what else is asked of the first side, once it is warm; comes back under "extra".

    Raises:
        DifferentWork: a side's first step is not the first side's, or its updates are not.
    """
    batches = [batches_of(cfg, mesh, step) for step in range(DISTINCT)]
    steady = {name: Steady(build(name, cfg, mesh), batches, mesh.device) for name in names}
    for side in steady.values():
        side()
        side.finish()
    compare({name: side.outcomes[0] for name, side in steady.items()}, *AGREE[cfg.precision.compute])
    reset_peak_memory(mesh.device)
    turns = {name: Turns(side, side.finish) for name, side in steady.items()}
    take_turns(turns, pace)
    compare_progress(
        {n: [o.loss for o in side.outcomes] for n, side in steady.items()}, AGREE[cfg.precision.compute][0]
    )
    memory = int(slowest(peak_memory_bytes(mesh.device)))  # the largest
    found = extra(steady[names[0]]) if extra else None
    rates = rates_of(cfg, mesh) if mesh.rank == 0 else None
    if dist.is_initialized():
        dist.barrier()  # the peak is measured while the others wait
    return {
        "sides": {n: _figures(turns[n], steady[n], rates) for n in names} if rates else {},
        "ratios": {n: ratio(turns[n], turns[names[0]]) for n in names[1:]},
        "peak_memory_bytes": memory if len(names) == 1 else None,  # several sides hold theirs at one time
        "parameters": flops.parameter_count(cfg.model),
        "tokens_per_step": cfg.train.global_batch * cfg.train.seq_len,
        "extra": found,
    }


def compare(outcomes: dict[str, Outcome], *bounds: float) -> None:
    """
    Args:
        outcomes: of the same step by each side.
        bounds: how far the others' loss and gradient norm may be off the first one's, relative.

    Raises:
        DifferentWork: something is further off, or no number.
    """
    (first, expected), *others = outcomes.items()
    for name, found in others:
        for what, bound, own, other in zip(Outcome._fields, bounds, expected, found, strict=True):
            if not abs(other - own) <= bound * abs(own):
                raise DifferentWork(f"not the same work: {what} of {name} is {other:.6g}, of {first} {own:.6g}")


def compare_progress(losses: dict[str, list[float]], bound: float) -> None:
    """Whether the sides' updates were alike: rounding grows with the steps, so that a fifth of what the first side's
    loss has changed by is allowed, or `bound` of the loss, whichever is more.

    Raises:
        DifferentWork: a side's last loss is elsewhere, or no number.
    """
    (first, expected), *others = losses.items()
    allowed = max(bound * abs(expected[-1]), 0.2 * abs(expected[-1] - expected[0]))
    for name, found in others:
        if not abs(found[-1] - expected[-1]) <= allowed:
            last = f"the last loss of {name} is {found[-1]:.6g}, of {first} {expected[-1]:.6g}"
            raise DifferentWork(f"not the same work: {last}")


def rates_of(cfg: Config, mesh: Mesh) -> Callable[[float, Side], dict[str, float | None]]:
    """(ms of a step, side) -> tokens a second, and per device MFU and HFU."""
    m, t = cfg.model, cfg.train
    dtype = DTYPES[cfg.precision.compute]
    peak = peak_flops(cfg.hardware, mesh.device.type, dtype)

    def rates(ms: float, side: Side) -> dict[str, float | None]:
        rate = t.global_batch * t.seq_len / ms * 1e3
        share = rate / mesh.spec.world_size / peak
        hfu = (
            None if side.skipped_ops is None else share * flops.hardware_flops_per_token(m, t.seq_len, side.skipped_ops)
        )
        return {"tokens_per_s": rate, "mfu": share * flops.flops_per_token(m, t.seq_len), "hfu": hfu}

    return rates


def _figures(turns: Turns, steady: Steady, rates: Callable[[float, Side], dict[str, float | None]]) -> dict[str, Any]:
    q1, q3 = np.percentile(turns.block_ms, [25, 75]).tolist()
    ms = statistics.median(turns.block_ms)
    return {
        "ms_per_step": ms,
        "q1": q1,
        "q3": q3,
        **rates(ms, steady.side),
        "state_bytes": steady.side.state_bytes,
        "block_ms": turns.block_ms,
        "losses": [steady.outcomes[0].loss, steady.outcomes[-1].loss],
        "steps": len(steady.outcomes),
    }
