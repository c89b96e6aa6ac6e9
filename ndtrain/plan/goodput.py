"""The goodput of a run whose hosts fail: how often to save, how many days it takes, and what they cost."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ndtrain.arguments import ArgumentError, option
from ndtrain.checkpoint.elements import checkpoint_bytes
from ndtrain.config import Config, ConfigError
from ndtrain.distributed.mesh import MeshSpec
from ndtrain.plan.failures import Replicas, Saving, Shares, daly, mtbf_of_all, with_checkpoints, with_replicas, young
from ndtrain.plan.hardware import Hardware, load_hardware
from ndtrain.plan.options import RunOptions, planned_config, write_file
from ndtrain.plan.report import si, table

HOUR, DAY = 3600.0, 86400.0
MOST_GPUS = 131072  # the curves end there, or at four times the run


def _at_least_0(key: str, text: str) -> float:
    return _number(key, text, "at least 0", lambda value: value >= 0)


def _above_0(key: str, text: str) -> float:
    return _number(key, text, "above 0", lambda value: value > 0)


def _number(key: str, text: str, which: str, fits: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and fits(value)):
        raise ArgumentError(f"{key}={text}: must be a number {which}")
    return value


def _rate(text: str, default: float | None = None) -> Any:
    return option(text, default, read=_above_0)


def _time(text: str, default: float | None = None) -> Any:
    return option(text, default, read=_at_least_0)


@dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    """Of `plan goodput`.

    Failures: Llama 3 405B had 419 unexpected interruptions in 54 days on 16,384 H100 (arXiv 2407.21783, table 5). 268
    were of GPUs: faulty GPU 148, HBM3 72, SRAM 19, system processor 17, silent data corruption 6, thermal interface and
    sensor 6. All others, software included, count as the host's here: 151 on 2,048 hosts. Hence
    16,384 x 54 x 24 / 268 and 2,048 x 54 x 24 / 151 hours. Other fleets fail more often: docs/plan_goodput.md.

    Restart: 10 minutes without loading. FT-HSDP (arXiv 2602.00277) gives 10 minutes for a whole recovery of 100,000
    GPUs; MegaScale (arXiv 2402.15627, section 6.3) less than 10 minutes to detect and diagnose, and 15 until training
    is where it was. How they divide is an assumption; it decides only how long surviving replicas stand still.

    Storage: 2 TB/s is what Llama 3's file system sustained (arXiv 2407.21783, section 3.3.1). 1 GB/s a host is this
    divided by its 2,048 hosts, so that a small cluster is not given all of it.

    Copies to host memory: about half of PCIe 4.0 x16 or a quarter of PCIe 5.0 x16 (32 and 64 GB/s), since the GPUs
    of a host copy at the same time.
    """

    step_time_s: float | None = _rate("seconds of a step; unless given, days and cost are left out")
    mtbf_gpu_h: float = _rate("hours between failures of one GPU", 79232.0)
    mtbf_host_h: float = _rate("hours between failures of one host, its GPUs' aside", 17578.0)
    detect_s: float = _time("seconds from a failure until the ranks have stopped", 180.0)
    reschedule_s: float = _time("then until new hosts are there and processes have started", 420.0)
    load_s: float | None = _time("then to load; unless given, a checkpoint from storage")
    heal_s: float | None = _time("to get a replica's state from a peer; unless given, over the network")
    storage_gb_s: float = _rate("of the storage, at most, in 10^9 bytes a second", 2000.0)
    host_storage_gb_s: float = _rate("of one host to storage", 1.0)
    copy_gb_s: float = _rate("of one GPU to host memory, for checkpoint.async_save", 15.0)
    interval_s: float | None = _rate("training between two saves; unless given, the best")
    longest_interval_h: float = _rate("training between two saves at most, however rare failures are", 24.0)
    replicas: int | None = option("replicas that may be lost singly; unless given, mesh.dp", None)
    price: float | None = _rate("of an hour of one GPU, in any currency")
    svg: str | None = option("the file to draw goodput over GPU counts to", None)


@dataclass(frozen=True)
class Cluster:
    """What fails, saves and restarts, with this many GPUs. Times are in seconds.

    Attributes:
        mtbf_s: between failures of any part.
        write_s: of a checkpoint to storage. copy_s: of it to host memory. load_s: of it from storage.
        heal_s: of a replica from a peer.
        replicas: 1: none may be lost.
    """

    gpus: int
    hosts: int
    mtbf_s: float
    write_s: float
    copy_s: float
    load_s: float
    heal_s: float
    replicas: int


@dataclass(frozen=True)
class Plan:
    """A way to live with failures. Times are in seconds.

    Attributes:
        name: "synchronous", "asynchronous" or "replica-tolerant".
        interval_s: training between two saves. young_s, daly_s: the best ones by these formulas.
    """

    name: str
    saving: Saving
    restart_s: float
    interval_s: float
    young_s: float
    daly_s: float
    shares: Shares


@dataclass(frozen=True)
class Curve:
    """One way over GPU counts."""

    name: str
    gpus: tuple[int, ...]
    plans: tuple[Plan, ...]


@dataclass(frozen=True)
class Curves:
    """What `drawings.goodput_svg` draws.

    Attributes:
        gpus: of the run itself.
    """

    title: str
    gpus: int
    curves: tuple[Curve, ...]


def run(options: Options, overrides: Sequence[str]) -> None:
    """Prints the plans, and writes the JSON and the drawing.

    Raises:
        ConfigError: there is no such run, or a file cannot be written.
    """
    hardware = load_hardware(options.hardware)
    cfg = planned_config(overrides, options, hardware)
    cluster = cluster_of(cfg, hardware, options, MeshSpec.of(cfg.mesh).world_size)
    plans = plans_of(cluster, options)
    print(as_text(cfg, hardware, options, cluster, plans))
    if options.json:
        write_file("json", options.json, as_json(cfg, options, cluster, plans))


def cluster_of(cfg: Config, hardware: Hardware, options: Options, gpus: int) -> Cluster:
    """The cluster that the run would have with so many GPUs. Its replicas keep their size.

    Raises:
        ConfigError: the ranks are no such number of equal replicas.
    """
    world, size = MeshSpec.of(cfg.mesh).world_size, checkpoint_bytes(cfg)
    replicas = options.replicas or max(1, cfg.mesh.dp)
    if world % replicas:
        raise ConfigError(f"replicas={replicas}: {world} ranks are not so many equal replicas")
    hosts = -(-gpus // hardware.gpus_per_node)
    storage = 1e9 * min(options.storage_gb_s, options.host_storage_gb_s * hosts)
    load_s = size / storage if options.load_s is None else options.load_s
    network, heal_s = hardware.network_gb_s, options.heal_s
    if heal_s is None:
        heal_s = size / (world / replicas * network * 1e9) if network else load_s
    return Cluster(
        gpus=gpus,
        hosts=hosts,
        mtbf_s=HOUR / (gpus / options.mtbf_gpu_h + hosts / options.mtbf_host_h),
        write_s=size / storage,
        copy_s=size / (gpus * options.copy_gb_s * 1e9),
        load_s=load_s,
        heal_s=heal_s,
        replicas=gpus * replicas // world,
    )


def plans_of(cluster: Cluster, options: Options) -> list[Plan]:
    """Synchronous and asynchronous saves, and lost replicas where there are two or more."""
    restart = options.detect_s + options.reschedule_s + cluster.load_s
    at_once, behind = Saving(cluster.write_s, 0.0), Saving(cluster.copy_s, cluster.write_s)
    plans = [
        _plan("synchronous", at_once, restart, cluster, options),
        _plan("asynchronous", behind, restart, cluster, options),
    ]
    if cluster.replicas > 1:
        step = options.step_time_s or 0.0
        absence = options.detect_s + options.reschedule_s + cluster.heal_s + step / 2  # it joins between two steps
        lost = Replicas(cluster.replicas, absence, options.detect_s + step / 2)
        plans.append(_plan("replica-tolerant", behind, restart, cluster, options, lost))
    return plans


def _plan(
    name: str, saving: Saving, restart: float, cluster: Cluster, options: Options, lost: Replicas | None = None
) -> Plan:
    """With the interval that is asked for or Daly's, but at least a step, and no shorter than a save takes."""
    mtbf = mtbf_of_all(lost, cluster.mtbf_s) if lost else cluster.mtbf_s
    best = daly(saving.blocking, mtbf)
    asked = options.interval_s or min(best, options.longest_interval_h * HOUR)
    interval = max(asked, saving.background, options.step_time_s or 0.0)
    if lost:
        shares = with_replicas(interval, saving, restart, lost, cluster.mtbf_s)
    else:
        shares = with_checkpoints(interval, saving, restart, mtbf)
    return Plan(name, saving, restart, interval, young(saving.blocking, mtbf), best, shares)


def curves_of(cfg: Config, hardware: Hardware, options: Options) -> Curves:
    """The goodput from one host on, by powers of two."""
    world, gpus = MeshSpec.of(cfg.mesh).world_size, hardware.gpus_per_node
    points: dict[str, list[tuple[int, Plan]]] = {}
    while gpus <= max(MOST_GPUS, 4 * world):
        for plan in plans_of(cluster_of(cfg, hardware, options, gpus), options):
            points.setdefault(plan.name, []).append((gpus, plan))
        gpus *= 2
    curves = [Curve(name, tuple(g for g, _ in of), tuple(p for _, p in of)) for name, of in points.items()]
    return Curves(f"Goodput of {cfg.run.name} on {hardware.name}", world, tuple(curves))


# ------------------------------------------------------------------------------------------------------------- output


def as_json(cfg: Config, options: Options, cluster: Cluster, plans: Sequence[Plan]) -> str:
    """Everything, in seconds and shares of 1."""
    plan = lambda p: asdict(p) | _bill(cfg, options, cluster, p)
    body = {"options": asdict(options), "checkpoint_bytes": checkpoint_bytes(cfg), "cluster": asdict(cluster)}
    return json.dumps(body | {"plans": [plan(p) for p in plans]}, indent=1)


def as_text(cfg: Config, hardware: Hardware, options: Options, cluster: Cluster, plans: Sequence[Plan]) -> str:
    """A table for people."""
    size, restart = checkpoint_bytes(cfg), plans[0].restart_s
    tokens = cfg.train.steps * cfg.train.global_batch * cfg.train.seq_len
    own = "asynchronous" if cfg.checkpoint.async_save else "synchronous"
    lines = [
        f"{cluster.gpus} ranks of {hardware.name} on {cluster.hosts} hosts: a failure every {duration(cluster.mtbf_s)}",
        f"a checkpoint: {si(size, 'B')}, {duration(cluster.write_s)} to storage, "
        f"{duration(cluster.copy_s)} to host memory",
        f"a restart: {duration(restart)}: detect {duration(options.detect_s)}, reschedule "
        f"{duration(options.reschedule_s)}, load {duration(cluster.load_s)}",
        f"the run: {cfg.train.steps} steps, {si(tokens, 'tokens')}; its saves are {own} "
        f"(checkpoint.async_save={str(cfg.checkpoint.async_save).lower()})",
    ]
    rows = [["", *(p.name for p in plans)]]
    cells = [_cells(cfg, options, cluster, p) for p in plans]
    rows += [[name, *(c[name] for c in cells)] for name in cells[0]]
    return "\n\n".join(["\n".join(lines), table(rows), *_notes(options, cluster)])


def _cells(cfg: Config, options: Options, cluster: Cluster, p: Plan) -> dict[str, str]:
    shares = {"goodput": p.shares.training, "saving": p.shares.saving, "restarting": p.shares.restarting}
    shares |= {"lost work": p.shares.lost, "absent replicas": p.shares.absent}
    bill = _bill(cfg, options, cluster, p)
    cells = {"save every": duration(p.interval_s), "  Young": duration(p.young_s), "  Daly": duration(p.daly_s)}
    if options.step_time_s:
        cells["checkpoint.every"] = f"{bill['checkpoint_every']}"
    cells |= {name: f"{100 * share:.2f} %" for name, share in shares.items()}
    if options.step_time_s:
        cells |= {"days": f"{bill['days']:.2f}", "GPU hours": si(bill["gpu_hours"], "")}
    if "cost" in bill:
        cells["cost"] = si(bill["cost"], "")
    return cells


def _bill(cfg: Config, options: Options, cluster: Cluster, p: Plan) -> dict[str, float]:
    """Days and cost of the whole run, where the time of a step is known."""
    if not options.step_time_s:
        return {}
    days = cfg.train.steps * options.step_time_s / p.shares.training / DAY if p.shares.training else math.inf
    hours = 24 * days * cluster.gpus
    bill = {"checkpoint_every": max(1, round(p.interval_s / options.step_time_s)), "days": days, "gpu_hours": hours}
    return bill | ({"cost": hours * options.price} if options.price else {})


def _notes(options: Options, cluster: Cluster) -> list[str]:
    notes = []
    if cluster.replicas > 1:
        notes.append(f"replica-tolerant: {cluster.replicas} replicas; ndtrain does not train on without one yet")
    if not options.step_time_s:
        notes.append("days and cost: give step_time_s=SECONDS")
    return notes


def duration(seconds: float) -> str:
    """With three digits, in the largest unit of which there are two: 12.3 min."""
    units = (("years", 365 * DAY), ("days", DAY), ("h", HOUR), ("min", 60.0), ("s", 1.0))
    unit, size = next((u for u in units if seconds >= 2 * u[1]), units[-1])
    return f"{seconds / size:.3g} {unit}"
