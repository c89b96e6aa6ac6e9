"""Predicts the time, the memory and the MFU of a training step on described hardware."""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property, partial
from typing import NamedTuple

import torch

from ndtrain.arguments import option
from ndtrain.config import Config, ConfigError
from ndtrain.mesh.mesh import EP, MeshSpec
from ndtrain.model.flops import flops_per_token, hardware_flops_per_token
from ndtrain.model.transformer import sparse_layers
from ndtrain.parallel.balance import looks_ahead
from ndtrain.parallel.build import DTYPES
from ndtrain.plan import accuracy as published
from ndtrain.plan.drawings import waterfall_svg
from ndtrain.plan.events import Kernel, Piece
from ndtrain.plan.fault_tolerance import DAY, HOUR
from ndtrain.plan.hardware import Hardware, load_hardware
from ndtrain.plan.islands import Exchange, Link, Shards, Sync, exchange_of, host_bytes, island_config, islands_of
from ndtrain.plan.memory import RankMemory, rank_memory
from ndtrain.plan.options import IMBALANCE, LinkOptions, RunOptions, at_least_1, planned_config, write_file
from ndtrain.plan.pieces import record_pieces, update_bytes
from ndtrain.plan.price import Prices, Rates, peak_flops, rates_for, rates_of
from ndtrain.plan.report import si, table
from ndtrain.plan.simulate import CAUSES, Simulation, Sizes, StepTimes
from ndtrain.program.passes import Variant
from ndtrain.program.step import StepProgram


@dataclass(frozen=True, kw_only=True)
class Options(RunOptions, LinkOptions):
    """The options of `plan predict`."""

    svg: str | None = option("SVG file to draw the breakdown of the step time in", None)
    imbalance: float = option(IMBALANCE, 1.0, read=at_least_1)


def run(options: Options, overrides: Sequence[str]) -> None:
    """Predict the step, print the tables and write the files.

    Raises:
        ConfigError: the run's configuration is invalid, it cannot be priced, or a file cannot be written.
    """
    hardware = options.on(load_hardware(options.hardware))
    cfg = planned_config(overrides, options, hardware)
    predictor = Predictor(hardware, Rates(imbalance=options.imbalance))
    prediction = predictor.predict(cfg)
    print(as_text(cfg, hardware, prediction))
    if options.svg:
        write_file("svg", options.svg, waterfall_svg(prediction.step_time_s, prediction.mfu, prediction.waterfall))
    if options.json:
        length = run_length(cfg, prediction.step_time_s, MeshSpec.of(cfg.mesh).world_size)
        body = {
            "hardware": asdict(hardware),
            "rates": asdict(predictor.rates),
            **asdict(prediction),
            "run": length and length._asdict(),
        }
        write_file("json", options.json, json.dumps(body, indent=1))


@dataclass(frozen=True)
class Prediction:
    """The prediction of a training step in steady state.

    Attributes:
        tokens_per_s: of the whole mesh, and of all islands.
        mfu, hfu: as ndtrain logs them, relative to the hardware's peak in the compute precision (fp8: the bf16 peak).
        memory_bytes: the peak of the rank that needs most, including the overhead of the allocator and NCCL.
        waterfall: cause -> seconds of the step, mean over the pipeline's ranks. Their sum is `step_time_s`. Empty if it
            was not requested.
        islands: the exchange between islands; None: the job trains alone.
    """

    step_time_s: float
    tokens_per_s: float
    tokens_per_s_per_device: float
    mfu: float
    hfu: float
    memory_bytes: int
    waterfall: dict[str, float]
    islands: Exchange | None = None


class Predictor:
    """Predicts the steps of runs on one kind of hardware.

    Args:
        rates: the shares of their peaks that machines reach. None: the defaults. Rates that are measured in the
            hardware's description take precedence.

    Raises:
        ConfigError: the description has an unknown rate, or a factor of 0.
    """

    def __init__(self, hardware: Hardware, rates: Rates | None = None):
        self.hardware, self.rates = hardware, rates_of(hardware, rates)

    def predict(self, cfg: Config, explain: bool = True) -> Prediction:
        """Predict the step of a resolved configuration.

        Args:
            explain: also make the waterfall, which takes a few more simulations.

        Raises:
            ConfigError: the step cannot be planned, or the hardware's description lacks a rate.
        """
        return self.price(plan_step(cfg, self.hardware.device, self.rates.imbalance), explain)

    def price(self, plan: "StepPlan", explain: bool = True) -> Prediction:
        """Predict a step that is already planned.

        Raises:
            ConfigError: the hardware's description lacks a rate.
        """
        cfg, mesh = plan.cfg, MeshSpec.of(plan.cfg.mesh)
        prices, waterfall = Prices(self.hardware, rates_for(self.rates, cfg), mesh), {}
        simulated = _simulations(plan, prices)
        seconds = simulated(frozenset()).end
        if explain or prices.ranks_a_core > 1:
            waterfall = _waterfall(plan, prices, simulated)
        if prices.ranks_a_core > 1:
            seconds = self._on_shared_cores(plan, mesh, seconds - waterfall["bubble"])
            waterfall["bubble"] += seconds - sum(waterfall.values())
        slower = self.rates.slower
        seconds *= slower
        waterfall = {part: slower * s for part, s in waterfall.items()} if explain else {}
        exchange = _exchange(plan, prices, seconds)
        if exchange:
            seconds += exchange.exposed_s
            waterfall |= {"exposed islands": exchange.exposed_s} if explain else {}
        m, t = cfg.model, cfg.train
        rate = t.global_batch * t.seq_len / seconds
        per_device = rate / (mesh.world_size * islands_of(cfg))
        peak = peak_flops(self.hardware, "bf16" if cfg.precision.compute == "fp8" else cfg.precision.compute)
        return Prediction(
            step_time_s=seconds,
            tokens_per_s=rate,
            tokens_per_s_per_device=per_device,
            mfu=per_device * flops_per_token(m, t.seq_len) / peak,
            hfu=per_device * plan.hardware_flops_per_token / peak,
            memory_bytes=self.memory(plan),
            waterfall=waterfall,
            islands=exchange,
        )

    def _on_shared_cores(self, plan: "StepPlan", mesh: MeshSpec, work: float) -> float:
        """Return the seconds of a step if there are more ranks than cores.

        A rank that waits leaves its core to another rank. So a bubble costs nothing as long as there is other work.

        Args:
            work: seconds of a rank that never waits for another rank, and gets its share of a core.
        """
        own_core = Prices(self.hardware, rates_for(self.rates, plan.cfg), mesh, own_core=True)
        return max(work, Simulation(plan.program, plan.pieces, plan.sizes, own_core).times.end)

    def memory(self, plan: "StepPlan") -> int:
        """Return the bytes of device memory of the pipeline rank that needs most."""
        if self.hardware.device == "cpu":
            return plan.tensor_bytes + _island_bytes(plan)
        factor = self.rates.memory_factor
        return int(max(m.state + factor * m.step for m in plan.memory) + 1e9 * self.rates.memory_gb)


@dataclass(frozen=True)
class StepPlan:
    """The work of a step, independent of the hardware's rates.

    Attributes:
        pieces: the piece of each pass of a layer in `program`.
        reported: the pipeline rank whose memory is reported; None: the rank that needs most.
    """

    cfg: Config
    program: StepProgram
    pieces: Mapping[Variant, Piece]
    sizes: Sizes
    reported: int | None = None

    @cached_property
    def memory(self) -> list[RankMemory]:
        """The memory of the pipeline rank `reported`, or of each pipeline rank if it is None."""
        ranks = self.program.ranks if self.reported is None else [self.program.ranks[self.reported]]
        return [rank_memory(self.program, rank, self.pieces, self.sizes) for rank in ranks]

    @cached_property
    def tensor_bytes(self) -> int:
        """The peak bytes of tensors, on the rank in `memory` that needs most."""
        return max(map(sum, self.memory))

    @cached_property
    def hardware_flops_per_token(self) -> float:
        """FLOPs per token as in `model.flops`, including the recompute of all blocks."""
        skipped = Counter(ops for rank in self.program.ranks for ops in rank.skipped_ops)
        of = partial(hardware_flops_per_token, self.cfg.model, self.cfg.train.seq_len)
        ahead = looks_ahead(self.cfg.model, self.cfg.moe)
        return sum(times * of([ops], look_ahead=ahead) for ops, times in skipped.items()) / skipped.total()


def plan_step(cfg: Config, device: str, imbalance: float = 1.0) -> StepPlan:
    """Plan the step of a resolved configuration on devices of this kind, "cpu" or "cuda".

    Args:
        imbalance: as in `Rates`.

    Raises:
        ConfigError: the program cannot be built, or it cannot be priced.
    """
    if cfg.optim.offload:
        raise ConfigError(
            "optim.offload=true: hardware descriptions have no rate between host and device, so it cannot be "
            "predicted: set optim.offload=false"
        )
    own = island_config(cfg)
    recorded = record_pieces(own, device, imbalance)
    compute, master = DTYPES[cfg.precision.compute].itemsize, DTYPES[cfg.precision.params].itemsize
    message, context = recorded.boundary_bytes, recorded.context_bytes
    loads = torch.float64.itemsize * len(sparse_layers(cfg.model)) * (cfg.model.num_experts or 0)
    sizes = Sizes(compute, master, message, context, update_bytes(cfg), gradient=master, loads=loads)
    return StepPlan(cfg, StepProgram.of(own, recorded.compiled, device), recorded.recorded, sizes)


def _exchange(plan: StepPlan, prices: Prices, step_s: float) -> Exchange | None:
    """Return the exchange between the run's islands, whose own steps take `step_s`. Return None if it has none."""
    count = islands_of(plan.cfg)
    if count == 1:
        return None
    shards = Shards.of(plan.program, prices.mesh.world_size)
    return exchange_of(Sync.of(plan.cfg), Link.of(prices), shards, count, step_s)


def _island_bytes(plan: StepPlan) -> int:
    """Return the host memory of a rank for the exchange with other islands."""
    count = islands_of(plan.cfg)
    return host_bytes(Sync.of(plan.cfg), Shards.of(plan.program, 1), count) if count > 1 else 0


# -------------------------------------------------------------------------------------------------------- the waterfall


Simulated = Callable[[frozenset[str]], StepTimes]  # the causes in `CAUSES` that take no time -> the step


def _simulations(plan: StepPlan, prices: Prices) -> Simulated:
    """Return a cached simulation of the step. Causes that this step does not have are ignored in its argument."""
    run = cache(lambda free: Simulation(plan.program, plan.pieces, plan.sizes, prices, free).times)
    mesh, units = plan.cfg.mesh, plan.program.units.values()
    sizes = {
        "launch": math.inf, "tp": mesh.tp, "cp": mesh.cp, "ep": mesh.ep, "pp": mesh.pp,
        "fsdp": max(u.shards for u in units), "dp": max(u.replicas for u in units),
    }  # fmt: skip
    return lambda free: run(frozenset(cause for cause in free if sizes[cause] > 1))


def _waterfall(plan: StepPlan, prices: Prices, simulated: Simulated) -> dict[str, float]:
    """Break the step time down by cause.

    Kernel time is summed per kind. For the rest, enable the causes in `CAUSES` one at a time, and attribute the added
    step time to the cause just enabled. So a wait that delays other ranks is charged to the operation that caused it.
    """
    kernels = _kernel_seconds(plan, prices)
    free = [frozenset(CAUSES[i:]) for i in range(len(CAUSES) + 1)]
    steps = [simulated(causes) for causes in free]
    parts = kernels | {"memory-bound": kernels["memory-bound"] + steps[0].copies}
    parts["bubble"] = max(0.0, steps[0].gradients - sum(parts.values()))
    for i, cause in enumerate(CAUSES):
        name = cause if cause == "launch" else f"exposed {cause}"
        parts[name] = steps[i + 1].gradients - steps[i].gradients
    parts["fixed"] = prices.rates.step_s
    parts["optimizer"] = steps[-1].end - steps[-1].gradients - parts["fixed"]
    return parts


def _kernel_seconds(plan: StepPlan, prices: Prices) -> dict[str, float]:
    """Return the seconds of the passes' kernels by kind, as the mean over the pipeline's ranks."""
    parts = dict.fromkeys(("matmul at peak", "matmul below peak", "attention", "memory-bound", "recompute"), 0.0)
    of_pass = {
        v: _pass_seconds(plan.pieces[v], v.recompute, prices) for rank in plan.program.ranks for v in rank.passes
    }
    for rank in plan.program.ranks:
        for variant, times in rank.passes.items():
            for name, seconds in of_pass[variant].items():
                parts[name] += times * seconds / len(plan.program.ranks)
    return parts


def _pass_seconds(piece: Piece, recompute: bool, prices: Prices) -> dict[str, float]:
    parts: dict[str, float] = {}
    add = lambda name, seconds: parts.__setitem__(name, parts.get(name, 0.0) + seconds)
    for k in piece.events:
        if not isinstance(k, Kernel):
            continue
        seconds = prices.kernel(k)
        if recompute:
            add("recompute", seconds)
        elif k.kind == "matmul":
            at_peak = k.flops / peak_flops(prices.hardware, k.dtype)
            add("matmul at peak", at_peak)
            add("matmul below peak", seconds - at_peak)
        else:
            add("attention" if k.kind == "attention" else "memory-bound", seconds)
    return parts


# ------------------------------------------------------------------------------------------------------- the whole run


class RunLength(NamedTuple):
    """A run from its first to its last step.

    Attributes:
        tokens: number of tokens in all steps.
        gpu_hours: hours of all devices together.
    """

    tokens: int
    tokens_per_day: float
    days: float
    gpu_hours: float


def run_length(cfg: Config, step_time_s: float, devices: int) -> RunLength | None:
    """Return the length of a run in which nothing fails, or None if `train.steps` is not set. (`plan goodput` adds
    failures and checkpoints.)

    Args:
        step_time_s: of a step after `train.batch_ramp`.
        devices: of one island.
    """
    t = cfg.train
    if not t.steps:
        return None
    seconds = run_seconds(cfg, step_time_s)
    return RunLength(
        tokens=t.tokens,
        tokens_per_day=t.global_batch * t.seq_len * DAY / step_time_s,
        days=seconds / DAY,
        gpu_hours=islands_of(cfg) * devices * seconds / HOUR,
    )


def run_seconds(cfg: Config, step_time_s: float) -> float:
    """Return the seconds of all steps. A step of `train.batch_ramp` is assumed to take less in proportion to its
    sequences."""
    t = cfg.train
    return step_time_s * t.batch_sizes.before(t.steps) / t.global_batch


# ------------------------------------------------------------------------------------------------------------- the text


def as_text(cfg: Config, hardware: Hardware, p: Prediction) -> str:
    """Format the prediction as tables for people."""
    mesh = MeshSpec.of(cfg.mesh)
    named = [*zip(mesh.order, mesh.sizes, strict=True), (EP, mesh.ep)]
    sizes = " ".join(f"{a}={n}" for a, n in named if n > 1) or "one rank"
    limit = hardware.memory_gb
    of_limit = f", {p.memory_bytes / limit / 1e7:.0f} % of {limit:g} GB" if limit else ""
    free = [("memory free", f"{limit - p.memory_bytes / 1e9:.1f} GB")] if limit else []
    known = published.applies_to(hardware) and p.islands is None  # the published runs have no islands
    error = ", likely {:.4g} to {:.4g}".format(*published.band(p.step_time_s)) if known else ""
    facts = [
        ("step time", f"{p.step_time_s:.4g} s{error}"),
        ("tokens/s", f"{p.tokens_per_s:,.0f}"),
        ("tokens/s per device", f"{p.tokens_per_s_per_device:,.0f}"),
        ("MFU", f"{100 * p.mfu:.1f} %"),
        ("HFU", f"{100 * p.hfu:.1f} %"),
        ("memory", f"{p.memory_bytes / 1e9:.1f} GB{of_limit}"),
        *free,
        *_island_facts(p.islands),
        *_length_facts(cfg, p.step_time_s, mesh.world_size),
    ]
    parts = [
        (name, f"{seconds:.4f}", f"{100 * seconds / p.step_time_s:.1f} %") for name, seconds in p.waterfall.items()
    ]
    microbatches, count = island_config(cfg).microbatches, islands_of(cfg)
    islands = f"{count} islands of " if count > 1 else ""
    ranks = f"{islands}{mesh.world_size} ranks of {hardware.name}"
    blocks = [
        f"{ranks}: {sizes}, zero={cfg.mesh.zero}, {microbatches} microbatches",
        table(facts),
        table([("where the step time goes", "seconds", "share"), *parts]),
    ]
    if known:
        blocks.append(published.note())
    if limit and p.memory_bytes > 1e9 * limit:
        blocks.append(f"does not fit in {limit:g} GB")
    return "\n\n".join(blocks)


def _island_facts(exchange: Exchange | None) -> list[tuple[str, str]]:
    """Return the table rows about the exchange between islands, or none if the job trains alone."""
    if exchange is None:
        return []
    return [
        ("a rank reads from islands", f"{si(exchange.rank_bytes, 'B')} a step"),
        ("an island reads", f"{si(exchange.island_bytes, 'B')} a step, in {exchange.seconds:.4g} s"),
        ("host memory for islands", f"{si(exchange.host_bytes, 'B')} a rank"),
    ]


def _length_facts(cfg: Config, step_time_s: float, devices: int) -> list[tuple[str, str]]:
    """Return the table rows about the whole run, or none if its length is not known."""
    length = run_length(cfg, step_time_s, devices)
    if length is None:
        return []
    return [
        ("tokens per day", si(length.tokens_per_day, "").strip()),
        (f"{si(length.tokens, '').strip()} tokens", f"{length.days:.3g} days, {length.gpu_hours:,.0f} GPU hours"),
    ]
