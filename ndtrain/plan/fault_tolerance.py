"""Failures of a run on a cluster: how often they occur, what saves and restarts cost, and the best plan for them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ndtrain.arguments import ArgumentError, option
from ndtrain.checkpoint.elements import checkpoint_bytes
from ndtrain.config import Config, ConfigError
from ndtrain.mesh.mesh import MeshSpec
from ndtrain.parallel.build import state_plan
from ndtrain.plan.failures import Replicas, Saving, Shares, daly, mtbf_of_all, with_checkpoints, with_replicas, young
from ndtrain.plan.hardware import Hardware

HOUR, DAY = 3600.0, 86400.0
MOST_GPUS = 131072  # the curves end here


def _at_least_0(key: str, text: str) -> float:
    return _number(key, text, "at least 0", lambda value: value >= 0)


def above_0(key: str, text: str) -> float:
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
    return option(text, default, read=above_0)


def _time(text: str, default: float | None = None) -> Any:
    return option(text, default, read=_at_least_0)


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """How often parts fail, and how long saves and restarts take.

    Failures: Llama 3 405B had 419 unexpected interruptions in 54 days on 16,384 H100 (arXiv 2407.21783, table 5). 268
    were GPU failures: faulty GPU 148, HBM3 72, SRAM 19, system processor 17, silent data corruption 6, thermal
    interface and sensor 6. All others, software included, count as host failures here: 151 on 2,048 hosts. The mean
    times between failures are therefore 16,384 x 54 x 24 / 268 and 2,048 x 54 x 24 / 151 hours. Other fleets fail more
    often: docs/plan.md.

    Restart: 10 minutes without loading. FT-HSDP (arXiv 2602.00277) reports 10 minutes for a whole recovery of 100,000
    GPUs. MegaScale (arXiv 2402.15627, section 6.3) reports less than 10 minutes to detect and diagnose, and 15 minutes
    to regain the lost progress. The split into detection and rescheduling is an assumption. It only affects how long
    surviving replicas stall.

    Storage: Llama 3's file system sustained 2 TB/s (arXiv 2407.21783, section 3.3.1). 1 GB/s per host is this rate
    divided by its 2,048 hosts, so that a small cluster does not get all of it.

    Copies to host memory: about half of PCIe 4.0 x16 or a quarter of PCIe 5.0 x16 (32 and 64 GB/s), since the GPUs
    of a host copy at the same time.
    """

    mtbf_gpu_h: float = _rate("hours between failures of one GPU", 79232.0)
    mtbf_host_h: float = _rate("hours between failures of one host, not counting its GPUs", 17578.0)
    detect_s: float = _time("seconds from a failure until the ranks have stopped", 180.0)
    reschedule_s: float = _time("seconds from then until new hosts are available and processes have started", 420.0)
    load_s: float | None = _time("seconds to load the state; default: the time to load a checkpoint from storage")
    heal_s: float | None = _time("seconds to get a replica's state from a peer; default: the time over the network")
    storage_gb_s: float = _rate("total bandwidth of the storage, in 10^9 bytes/s", 2000.0)
    host_storage_gb_s: float = _rate("bandwidth from one host to storage, in 10^9 bytes/s", 1.0)
    copy_gb_s: float = _rate("bandwidth from one GPU to host memory, in 10^9 bytes/s, for checkpoint.async_save", 15.0)
    interval_s: float | None = _rate("seconds of training between two saves; default: the best interval")
    longest_interval_h: float = _rate("longest training between two saves, in hours, even if failures are rare", 24.0)
    replicas: int | None = option("replicas that can be lost one at a time; default: mesh.dp", None)


@dataclass(frozen=True)
class Cluster:
    """A cluster of this many GPUs, and its times of failures, saves and restarts in seconds.

    Attributes:
        mtbf_s: mean time between failures of any part.
        write_s: time to write a checkpoint to storage.
        copy_s: time to copy a checkpoint to host memory.
        load_s: time to load a checkpoint from storage.
        heal_s: time to restore a replica's state from a peer.
        replicas: number of replicas; 1: none may be lost.
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
    """A way to handle failures. Times are in seconds.

    Attributes:
        name: "synchronous", "asynchronous" or "replica-tolerant".
        interval_s: training time between two saves.
        young_s, daly_s: the best interval by these formulas.
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
    """One kind of plan over GPU counts."""

    name: str
    gpus: tuple[int, ...]
    plans: tuple[Plan, ...]


@dataclass(frozen=True)
class Curves:
    """The curves that `drawings.goodput_svg` draws.

    Attributes:
        gpus: GPU count of the run itself.
    """

    title: str
    gpus: int
    curves: tuple[Curve, ...]


def cluster_of(cfg: Config, hardware: Hardware, assumed: Assumptions, gpus: int) -> Cluster:
    """Return the cluster that the run would have with `gpus` GPUs. Its replicas keep their size.

    Raises:
        ConfigError: the ranks cannot be divided into equal replicas.
    """
    world, size = MeshSpec.of(cfg.mesh).world_size, checkpoint_bytes(cfg.model, state_plan(cfg))
    replicas = assumed.replicas or max(1, cfg.mesh.dp)
    if world % replicas:
        raise ConfigError(f"replicas={replicas}: {world} ranks cannot be divided into this number of equal replicas")
    hosts = -(-gpus // hardware.gpus_per_node)
    storage = 1e9 * min(assumed.storage_gb_s, assumed.host_storage_gb_s * hosts)
    load_s = size / storage if assumed.load_s is None else assumed.load_s
    network, heal_s = hardware.network_gb_s, assumed.heal_s
    if heal_s is None:
        heal_s = size / (world / replicas * network * 1e9) if network else load_s
    return Cluster(
        gpus=gpus,
        hosts=hosts,
        mtbf_s=HOUR / (gpus / assumed.mtbf_gpu_h + hosts / assumed.mtbf_host_h),
        write_s=size / storage,
        copy_s=size / (gpus * assumed.copy_gb_s * 1e9),
        load_s=load_s,
        heal_s=heal_s,
        replicas=gpus * replicas // world,
    )


def plans_of(cluster: Cluster, assumed: Assumptions, step_s: float) -> list[Plan]:
    """Return plans with synchronous and asynchronous saves, and a replica-tolerant plan if there are several replicas.

    Args:
        step_s: seconds of a step.
    """
    restart = assumed.detect_s + assumed.reschedule_s + cluster.load_s
    at_once, behind = Saving(cluster.write_s, 0.0), Saving(cluster.copy_s, cluster.write_s)
    plan = partial(_plan, cluster, assumed, step_s, restart)
    plans = [plan("synchronous", at_once), plan("asynchronous", behind)]
    if cluster.replicas > 1:
        absence = assumed.detect_s + assumed.reschedule_s + cluster.heal_s + step_s / 2  # rejoins between two steps
        stall = assumed.detect_s + step_s / 2  # on average half a step is repeated
        plans.append(plan("replica-tolerant", behind, Replicas(cluster.replicas, absence, stall)))
    return plans


def _plan(
    cluster: Cluster,
    assumed: Assumptions,
    step_s: float,
    restart: float,
    name: str,
    saving: Saving,
    lost: Replicas | None = None,
) -> Plan:
    """Return a plan with the interval in `assumed` or else Daly's, but at least a step and a save's background part."""
    mtbf = mtbf_of_all(lost, cluster.mtbf_s) if lost else cluster.mtbf_s
    best = daly(saving.blocking, mtbf)
    asked = assumed.interval_s or min(best, assumed.longest_interval_h * HOUR)
    interval = max(asked, saving.background, step_s)
    if lost:
        shares = with_replicas(interval, saving, restart, lost, cluster.mtbf_s)
    else:
        shares = with_checkpoints(interval, saving, restart, mtbf)
    return Plan(name, saving, restart, interval, young(saving.blocking, mtbf), best, shares)


def curves_of(cfg: Config, hardware: Hardware, assumed: Assumptions, step_s: float) -> Curves:
    """Return the goodput over GPU counts: the run's count, halved and doubled. Halving stops at a host, and at a mesh
    without dp and fsdp; doubling stops at `MOST_GPUS`."""
    world = MeshSpec.of(cfg.mesh).world_size
    least = max(hardware.gpus_per_node, cfg.mesh.pp * cfg.mesh.cp * cfg.mesh.tp)
    halves = range(int(math.log2(max(1, world // least))) + 1)
    counts = sorted({world >> k for k in halves} | {world << k for k in range(20) if world << k <= MOST_GPUS})
    points: dict[str, list[tuple[int, Plan]]] = {}
    for gpus in counts:
        for plan in plans_of(cluster_of(cfg, hardware, assumed, gpus), assumed, step_s):
            points.setdefault(plan.name, []).append((gpus, plan))
    curves = [Curve(name, tuple(g for g, _ in of), tuple(p for _, p in of)) for name, of in points.items()]
    return Curves(f"Goodput of {cfg.run.name} on {hardware.name}", world, tuple(curves))
