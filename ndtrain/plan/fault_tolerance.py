"""Failures of a run on a cluster: how often they occur, what saves and restarts cost, and the best plan for them."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ndtrain.arguments import option
from ndtrain.checkpoint.elements import checkpoint_bytes
from ndtrain.config import Config, ConfigError
from ndtrain.mesh.mesh import MeshSpec
from ndtrain.parallel.build import state_plan
from ndtrain.plan.failures import (
    NEVER,
    Replicas,
    Saving,
    Shares,
    chance_without_quorum,
    daly,
    mtbf_of_all,
    with_checkpoints,
    with_replicas,
    young,
)
from ndtrain.plan.hardware import Hardware
from ndtrain.plan.islands import Sync, islands_of
from ndtrain.plan.options import above_0, at_least_0

HOUR, DAY = 3600.0, 86400.0
MOST_GPUS = 131072  # the curves end here


def _rate(text: str, default: float | None = None) -> Any:
    return option(text, default, read=above_0)


def _time(text: str, default: float | None = None) -> Any:
    return option(text, default, read=at_least_0)


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

    Islands: the others take a silent island for lost after `islands.timeout_s`. If its process has ended they know at
    once, so this is the longest time. An island restarts as a whole job does, but reads its state from a peer.

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
    takeover_s: float | None = _time(
        "seconds until the other islands take over the rows of a lost one; default: islands.timeout_s"
    )
    island_restart_s: float | None = _time(
        "seconds from an island's failure until its processes have started again; default: detect_s + reschedule_s"
    )


@dataclass(frozen=True)
class Cluster:
    """A cluster of this many GPUs, and its times of failures, saves and restarts in seconds.

    Attributes:
        mtbf_s: mean time between failures of any part.
        write_s: time to write a checkpoint to storage.
        copy_s: time to copy a checkpoint to host memory.
        load_s: time to load a checkpoint from storage.
        heal_s: time to restore a replica's state from a peer.
        replicas: number of replicas or islands; 1: none may be lost.
        islands: how islands go on without a lost one; None: the run is one job.
    """

    gpus: int
    hosts: int
    mtbf_s: float
    write_s: float
    copy_s: float
    load_s: float
    heal_s: float
    replicas: int
    islands: "IslandLoss | None" = None


@dataclass(frozen=True)
class IslandLoss:
    """The loss of an island. Times are in seconds.

    Attributes:
        takeover_s: until the others go on without it.
        hidden_steps: steps for which the others train on before they need what a lost island has sent.
        restart_s: until its processes have started again.
        lost_steps: steps of its work that count for nothing, on average.
        unproven: share of failures after which the second of two islands may not go on alone. The first host of the
            lost island does not answer then.
    """

    takeover_s: float
    hidden_steps: float
    restart_s: float
    lost_steps: float
    unproven: float


@dataclass(frozen=True)
class Plan:
    """A way to handle failures. Times are in seconds.

    Attributes:
        name: "synchronous", "asynchronous", "replica-tolerant" or "islands".
        interval_s: training time between two saves.
        young_s, daly_s: the best interval by these formulas.
        all_lost_s: mean time until all replicas or islands are lost; None: the plan survives no failure.
        no_quorum_s: mean time until a failure after which the other islands may not go on; None: no islands.
    """

    name: str
    saving: Saving
    restart_s: float
    interval_s: float
    young_s: float
    daly_s: float
    shares: Shares
    all_lost_s: float | None = None
    no_quorum_s: float | None = None


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
    """Return the cluster that the run would have with `gpus` GPUs. Its replicas and islands keep their size.

    Raises:
        ConfigError: the ranks cannot be divided into equal replicas.
    """
    world, size = ranks_of(cfg), checkpoint_bytes(cfg.model, state_plan(cfg))
    count = islands_of(cfg)
    replicas = count if count > 1 else assumed.replicas or max(1, cfg.mesh.dp)
    if world % replicas:
        raise ConfigError(f"replicas={replicas}: {world} ranks cannot be divided into this number of equal replicas")
    each = world // replicas
    hosts = -(-gpus // hardware.gpus_per_node)
    storage = 1e9 * min(assumed.storage_gb_s, assumed.host_storage_gb_s * hosts)
    load_s = size / storage if assumed.load_s is None else assumed.load_s
    network, heal_s = hardware.network_gb_s, assumed.heal_s
    if heal_s is None:
        limits = [each * network] if network else []
        limits += [hardware.island_gb_s] if hardware.island_gb_s and count > 1 else []
        heal_s = size / (min(limits) * 1e9) if limits else load_s
    return Cluster(
        gpus=gpus,
        hosts=hosts,
        mtbf_s=HOUR / (gpus / assumed.mtbf_gpu_h + hosts / assumed.mtbf_host_h),
        write_s=size / storage,
        copy_s=size / (gpus * assumed.copy_gb_s * 1e9),
        load_s=load_s,
        heal_s=heal_s,
        replicas=gpus // each,
        islands=_island_loss(cfg, hardware, assumed, each, gpus // each) if count > 1 else None,
    )


def ranks_of(cfg: Config) -> int:
    """Return the number of ranks of all islands."""
    return islands_of(cfg) * MeshSpec.of(cfg.mesh).world_size


def _island_loss(cfg: Config, hardware: Hardware, assumed: Assumptions, ranks: int, count: int) -> IslandLoss:
    hosts = -(-ranks // hardware.gpus_per_node)
    rate = ranks / assumed.mtbf_gpu_h + hosts / assumed.mtbf_host_h
    takeover, restart = assumed.takeover_s, assumed.island_restart_s
    sync = Sync.of(cfg)
    return IslandLoss(
        takeover_s=cfg.islands.timeout_s if takeover is None else takeover,
        hidden_steps=sync.delay,
        restart_s=assumed.detect_s + assumed.reschedule_s if restart is None else restart,
        lost_steps=sync.steps / 2,
        unproven=1 / assumed.mtbf_host_h / rate if count == 2 else 0.0,
    )


def plans_of(cluster: Cluster, assumed: Assumptions, step_s: float) -> list[Plan]:
    """Return plans with synchronous and asynchronous saves, and one that survives the loss of a replica or an island.

    Args:
        step_s: seconds of a step.
    """
    restart = assumed.detect_s + assumed.reschedule_s + cluster.load_s
    at_once, behind = Saving(cluster.write_s, 0.0), Saving(cluster.copy_s, cluster.write_s)
    plan = partial(_plan, cluster, assumed, step_s, restart)
    plans = [plan("synchronous", at_once), plan("asynchronous", behind)]
    if cluster.replicas > 1 and cluster.islands:
        made = plan("islands", behind, _islands(cluster, cluster.islands, step_s))
        waits = max(_without_quorum(cluster, cluster.islands), cluster.mtbf_s / NEVER)
        plans.append(replace(made, no_quorum_s=cluster.mtbf_s / waits))
    elif cluster.replicas > 1:
        absence = assumed.detect_s + assumed.reschedule_s + cluster.heal_s + step_s / 2  # rejoins between two steps
        stall = assumed.detect_s + step_s / 2  # on average half a step is repeated
        plans.append(plan("replica-tolerant", behind, Replicas(cluster.replicas, absence, stall)))
    return plans


def _islands(cluster: Cluster, loss: IslandLoss, step_s: float) -> Replicas:
    """Return how islands are lost and return.

    A returning island waits for the next step, and reads its state during that step or longer, without rows of its own.
    """
    rejoin = step_s / 2 + max(step_s, cluster.heal_s)
    absence = loss.restart_s + rejoin + loss.lost_steps * step_s
    waiting = max(0.0, loss.takeover_s - loss.hidden_steps * step_s)
    stall = waiting + _without_quorum(cluster, loss) * absence
    return Replicas(cluster.replicas, absence, stall)


def _without_quorum(cluster: Cluster, loss: IslandLoss) -> float:
    """Return the share of failures after which the others wait for a lost island."""
    chance = chance_without_quorum(cluster.replicas, loss.takeover_s, cluster.replicas * cluster.mtbf_s)
    return min(1.0, loss.unproven + chance)


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
    return Plan(name, saving, restart, interval, young(saving.blocking, mtbf), best, shares, mtbf if lost else None)


def curves_of(cfg: Config, hardware: Hardware, assumed: Assumptions, step_s: float) -> Curves:
    """Return the goodput over GPU counts: the run's count, halved and doubled. Halving stops at a host, and at a mesh
    without dp and fsdp; doubling stops at `MOST_GPUS`."""
    world = ranks_of(cfg)
    least = max(hardware.gpus_per_node, cfg.mesh.pp * cfg.mesh.cp * cfg.mesh.tp)
    halves = range(int(math.log2(max(1, world // least))) + 1)
    counts = sorted({world >> k for k in halves} | {world << k for k in range(20) if world << k <= MOST_GPUS})
    points: dict[str, list[tuple[int, Plan]]] = {}
    for gpus in counts:
        for plan in plans_of(cluster_of(cfg, hardware, assumed, gpus), assumed, step_s):
            points.setdefault(plan.name, []).append((gpus, plan))
    curves = [Curve(name, tuple(g for g, _ in of), tuple(p for _, p in of)) for name, of in points.items()]
    return Curves(f"Goodput of {cfg.run.name} on {hardware.name}", world, tuple(curves))
