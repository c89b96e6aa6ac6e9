"""`ndtrain plan calibrate out=FILE.yaml`: measure this machine and write a hardware description for `hardware=`.

Training steps of a few model sizes run on one rank, and then on one rank per core (a power of two, at most
`MOST_RANKS`). Each operator in them is timed (`kernel_times`). `bench collectives` measures the collectives. Host time
is the time of a step that no operator accounts for. Two further costs of collectives are fitted to the steps on several
ranks: how they slow compute down, and how late waiting ranks wake up.
"""

import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from ndtrain.arguments import one_of, option
from ndtrain.config import Config, ConfigError, HardwareConfig, load_config, resolve
from ndtrain.device.cores import cpu_cores
from ndtrain.device.measured_peak import cpu_model
from ndtrain.measure.collectives import run as links
from ndtrain.measure.ranks import DEVICE_HELP, Device, choose_device, run_launches, run_ranks
from ndtrain.measure.results import require_folder
from ndtrain.observe import peak_flops
from ndtrain.parallel.build import DTYPES
from ndtrain.plan.events import Kernel
from ndtrain.plan.hardware import Hardware
from ndtrain.plan.kernel_times import CaseTimes, fastest, time_cases
from ndtrain.plan.measured import Measured, Tables
from ndtrain.plan.options import refuse_overrides
from ndtrain.plan.predict import Predictor, plan_step
from ndtrain.run.rendezvous import backend_of

PRECISIONS = ("fp32", "bf16", "fp64")
# hidden_size, intermediate_size, heads, K/V heads, vocab_size, seq_len, micro_batch
SHAPES = [
    (64, 176, 4, 2, 512, 64, 2), (128, 512, 4, 4, 1024, 128, 2), (256, 688, 8, 4, 2048, 128, 4),
    (256, 1024, 8, 2, 4096, 256, 4), (512, 1376, 8, 8, 4096, 128, 1), (512, 2048, 8, 4, 2048, 512, 1),
    (1024, 2816, 16, 8, 1024, 128, 1), (384, 1024, 8, 4, 4096, 1024, 1),
]  # fmt: skip
AXES = ("tp", "cp", "fsdp")  # the cases on several ranks shard over one of them
MOST_RANKS = 8  # to measure on
OPERATIONS = {
    "all_gather": "all_gather", "reduce_scatter": "reduce_scatter", "all_reduce": "all_reduce",
    "all_to_all": "all_to_all", "send/recv": "send_recv", "broadcast": "broadcast",
}  # fmt: skip   # name in the bench -> name in the planner
OF_UPDATE = ("linalg_vector_norm", "_fused_adamw_")  # the planner prices these; the rest of an update is a fixed cost
LINK_ROUNDS = 12  # a single call takes ten times as long if its thread waits for a core
INTERFERENCE = [n / 10 for n in range(21)]  # the fit tries every pair of these two
LATE_S = [10 ** (n / 10) for n in range(-60, -19)]
BUSY = 0.9  # with a smaller share of its core, a rank was slowed down by other programs


@dataclass(frozen=True)
class Options:
    """Options of `plan calibrate`."""

    out: str = option("hardware description to write, FILE.yaml")
    dtypes: str = option('precisions to measure, of fp32, bf16 and fp64: "fp32,bf16"', "fp32,bf16")
    ranks: int = option("largest number of ranks to measure links with", MOST_RANKS)
    launches: int = option("launches of each model; the fastest launch counts", 3)
    steps: int = option("timed steps of each model per launch", 3)
    device: Device = option(DEVICE_HELP, "auto")

    @property
    def precisions(self) -> list[str]:
        return [one_of("dtype", word, list(PRECISIONS)) for word in self.dtypes.replace(",", " ").split()]


def run(options: Options, overrides: Sequence[str]) -> None:
    """Measure this machine, print the rates, and write them to `options.out`.

    Raises:
        ConfigError: the file cannot be written, or an argument is not an option of this plan.
    """
    refuse_overrides(Options, overrides)
    if not options.out.endswith((".yaml", ".yml")):
        raise ConfigError(f"out={options.out}: must be a YAML file: give out=FILE.yaml")
    require_folder("out", options.out)
    device, began = choose_device(options.device), time.perf_counter()
    cores = min(MOST_RANKS, 1 << (_cores(device).bit_length() - 1))
    by_ranks = _timed_steps(options, device, sorted({1, cores}))
    alone = by_ranks[1]
    kernels = {ranks: tables_of(steps.times) for ranks, steps in by_ranks.items()}
    measured = Measured.of({"cores": cores, "kernels": kernels, "collectives": _collectives(options, device)})
    body, conditions = _description(options, device, measured, host_rates(alone.times)), _conditions(alone.share)
    if cores > 1:
        here = Hardware("measured here", **body | {"measured": measured})
        body["rates"] |= _rounded(beside_collectives(by_ranks[cores], here))
    write(Path(options.out), body, conditions)
    _show(body, measured, time.perf_counter() - began)
    print(f"{conditions}\nwrote {options.out}: hardware={options.out}")


def _cores(device: str) -> int:
    return torch.cuda.device_count() if device == "cuda" else cpu_cores()


# -------------------------------------------------------------------------------------------------------------- kernels


def cases(precision: str, ranks: int, device: str) -> list[Config]:
    """Return the models whose steps are timed. On several ranks, each model is sharded over each of `AXES` in turn."""
    made = []
    for shape, axis in product(SHAPES, AXES if ranks > 1 else AXES[:1]):
        hidden, intermediate, heads, kv_heads, vocab, length, micro = shape
        overrides = [
            "recipe=llama_small", "model.num_hidden_layers=1", f"model.hidden_size={hidden}",
            f"model.intermediate_size={intermediate}", f"model.num_attention_heads={heads}",
            f"model.num_key_value_heads={kv_heads}", f"model.vocab_size={vocab}",
            f"model.max_position_embeddings={length}", f"train.seq_len={length}", f"train.micro_batch={micro}",
            f"train.global_batch={2 * micro * (ranks if axis == 'fsdp' else 1)}", f"precision.compute={precision}",
            "train.compile=false", *([f"mesh.{axis}={ranks}"] if ranks > 1 else []),
        ]  # fmt: skip
        if precision == "fp64":
            overrides.append("precision.params=fp64")
        made.append(resolve(load_config(overrides), ranks))
    return made


class TimedSteps(NamedTuple):
    """The timed steps of all cases on one number of ranks.

    Attributes:
        cfgs, times: the configuration and the times of each case.
        share: the share of a core that the first rank had.
    """

    cfgs: list[Config]
    times: list[CaseTimes]
    share: float


def _timed_steps(options: Options, device: str, worlds: Sequence[int]) -> dict[int, TimedSteps]:
    """Return number of ranks -> their timed steps."""
    cfgs = {n: [cfg for precision in options.precisions for cfg in cases(precision, n, device)] for n in worlds}
    jobs = [(time_cases, n, cfgs[n], options.steps, device) for n in worlds]
    launched = run_launches(options.launches, jobs, backend_of(device))
    return {
        n: TimedSteps(cfgs[n], [fastest(of_case) for of_case in by_case], _share_of_a_core(list(chain(*by_case))))
        for n, by_case in zip(worlds, launched, strict=True)
    }


def _share_of_a_core(times: Sequence[CaseTimes]) -> float:
    """Return the time on a core (or GPU) divided by wall time: the share of a core that a rank really had."""
    return sum(sum(t.passes) + sum(t.updates) for t in times) / sum(sum(t.steps_s) for t in times)


def tables_of(times: Sequence[CaseTimes]) -> dict[str, Tables]:
    """Return kind -> "operator dtype" (matmuls: "dtype") -> points. A point is the median over all runs of a kernel."""
    samples: dict[tuple[str, str, tuple[float, ...]], list[float]] = defaultdict(list)
    for case in times:
        for kernels in (case.passes_kernels, case.update_kernels):
            for k, seconds in kernels.items():
                samples[k.kind, *_place(k)] += seconds
    tables: dict[str, Tables] = {kind: {} for kind in ("matmul", "attention", "memory")}
    for kind, key, at in sorted(samples):
        point = [*at, float(f"{statistics.median(samples[kind, key, at]):.4g}")]
        tables[kind].setdefault(key, []).append(point)
    return tables


def _place(k: Kernel) -> tuple[str, tuple[float, ...]]:
    """Return the key of a kernel's table, among the tables of its kind, and the coordinates of its point there."""
    if k.kind == "matmul":
        return k.dtype, tuple(max(1, n) for n in k.shape)
    if k.kind == "attention":
        return f"{k.op} {k.dtype}", (*k.shape, k.flops)
    return f"{k.op} {k.dtype}", (max(1, k.bytes),)


def host_rates(times: Sequence[CaseTimes]) -> dict[str, float]:
    """Return host times as fields of `price.Rates`: seconds of an operator's launch, and of a step outside its program.

    The launch time is the median over all cases, because operators of larger cases push the host's code and data out of
    its caches. The time of a step comes only from the smallest third of the cases. In larger cases, kernels are most of
    it.
    """
    launches = [
        (statistics.median(case.passes) - _sum(case.passes_kernels, case.steps))
        / _count(case.passes_kernels, case.steps)
        for case in times
    ]
    smallest = sorted(times, key=lambda case: statistics.median(case.passes))[: max(1, len(times) // 3)]
    known = lambda case: {k: s for k, s in case.update_kernels.items() if k.op in OF_UPDATE}
    steps = [statistics.median(case.updates) - _sum(known(case), case.steps) for case in smallest]
    return {"launch_s": max(1e-7, statistics.median(launches)), "step_s": max(1e-7, statistics.median(steps))}


def _sum(kernels: Mapping[Kernel, list[float]], steps: int) -> float:
    return sum(statistics.median(seconds) * len(seconds) for seconds in kernels.values()) / steps


def _count(kernels: Mapping[Kernel, list[float]], steps: int) -> float:
    return sum(map(len, kernels.values())) / steps


# ---------------------------------------------------------------------------------------------------------------- links


def _collectives(options: Options, device: str) -> dict[str, Tables]:
    """Return operation -> "RANKS OF A GROUP of RANKS OF THE MESH" -> (bytes, median seconds of the slowest rank)."""
    tables: dict[str, Tables] = defaultdict(dict)
    most = min(options.ranks, _cores(device)) if device == "cuda" else options.ranks
    backend = backend_of(device)
    for world, mesh in _meshes(most):
        asked = links.Options(ranks=world, mesh=mesh, min="1KiB", max="16MiB", factor=16, rounds=LINK_ROUNDS)
        by_axis = run_ranks(links.measure, world, asked, backend, backend=backend)
        for axis in by_axis.values():
            for row in axis["rows"]:
                if op := OPERATIONS.get(row["operation"]):
                    form = row["forms"].get("ours") or row["forms"]["torch"]
                    points = tables[op].setdefault(f"{row['n']} of {world}", [])
                    if row["bytes"] not in [p[0] for p in points]:
                        points.append([row["bytes"], float(f"{form['ms'] / 1e3:.4g}")])
    return {op: {key: sorted(points) for key, points in by_size.items()} for op, by_size in tables.items()}


def _meshes(most: int) -> list[tuple[int, str]]:
    """Return (ranks, mesh): one axis of 2, 4 or 8 ranks, and a mesh with groups of two that run at the same time."""
    made = [(world, f"dp={world}") for world in (2, 4, 8) if world <= most]
    return made + [(4, "dp=2 tp=2")] * (most >= 4)


def beside_collectives(steps: TimedSteps, hardware: Hardware) -> dict[str, float]:
    """Fit `Rates.interference` and `Rates.late_s` to the steps on several ranks.

    The loss is the sum of relative errors of the step times, so that a single disturbed step does not move the fit.
    Every pair of values is tried. Each rate can make up for a part of the other, so a search along one at a time would
    stop early.
    """
    plans = [plan_step(cfg, hardware.device) for cfg in steps.cfgs]
    measured = [statistics.median(case.steps_s) for case in steps.times]

    def off(rates: dict[str, float]) -> float:
        predictor = Predictor(replace(hardware, rates=hardware.rates | rates))
        predicted = (predictor.price(plan, explain=False).step_time_s for plan in plans)
        return sum(abs(p / m - 1) for p, m in zip(predicted, measured, strict=True))

    pairs = ({"interference": share, "late_s": late} for share in INTERFERENCE for late in LATE_S)
    return min(pairs, key=off)


# ------------------------------------------------------------------------------------------------------ the description


def _description(options: Options, device: str, measured: Measured, host: dict[str, float]) -> dict[str, Any]:
    memory = torch.cuda.mem_get_info()[1] if device == "cuda" else _host_memory() / measured.cores
    peaks = {p: peak_flops(HardwareConfig(), device, DTYPES[p]) / 1e12 for p in options.precisions}
    copies = [bytes / seconds for bytes, seconds in measured.kernels[1]["memory"].get("add fp32", [])]
    gathers = measured.collectives.get("all_gather", {}).get("2 of 2", [])
    return {  # required keys come last, so that a truncated file is no valid description
        "measured": measured.plain(),
        "rates": _rounded(host),
        "device": device,
        "memory_gb": round(memory / 1e9, 2),
        "gpus_per_node": _cores(device) if device == "cuda" else max(options.ranks, measured.cores),
        "peak_tflops": {p: float(f"{peak:.4g}") for p, peak in peaks.items()},
        "memory_gb_s": float(f"{max(copies) / 1e9:.3g}") if copies else None,
        "link_gb_s": float(f"{gathers[-1][0] / 2 / gathers[-1][1] / 1e9:.3g}") if gathers else None,
        "network_gb_s": None,
    }


def _rounded(rates: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{rate:.4g}") for name, rate in rates.items()}


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _conditions(share: float) -> str:
    """Describe the machine and its load, with a warning if other programs used its cores."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_model()
    load = os.getloadavg()[0]
    text = f"measured on {name}, {cpu_cores()} cores, torch {torch.__version__}; load average {load:.1f}"
    if share < BUSY:
        text += f"; BUSY: other programs took {1 - share:.0%} of a core's time, so links appear slower than they are"
    return text


def write(path: Path, body: dict[str, Any], conditions: str) -> None:
    """Write a description, and rename it into place, so that an interrupted call leaves no truncated file at `path`."""
    part = path.with_suffix(".part")
    part.write_text(f"# {conditions}.\n" + yaml.safe_dump(body, sort_keys=False, default_flow_style=None, width=118))
    part.replace(path)


def _show(body: dict[str, Any], measured: Measured, seconds: float) -> None:
    for precision, peak in body["peak_tflops"].items():
        points = measured.kernels[1]["matmul"].get(precision, [])
        rates = sorted(2 * math.prod(p[:4]) / p[4] / 1e12 for p in points)
        if rates:
            said = f"{len(rates)} shapes from {rates[0]:.2g} to {rates[-1]:.2g}"
            print(f"matmul {precision}: best {peak:.3g} TFLOP/s; {said}")
    print(f"memory: {body['memory_gb_s']} GB/s; links: {body['link_gb_s']} GB/s between two ranks")
    print("; ".join(f"{name} {rate:.3g}" for name, rate in body["rates"].items()))
    print(f"{seconds:.0f} s")
