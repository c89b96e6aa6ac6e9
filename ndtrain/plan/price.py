"""Prices kernels and collectives on described hardware, in seconds.

Every figure that no data sheet lists is a constant of `Rates`: the same for all models, meshes and GPUs.
"""

from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache

from ndtrain.arguments import near
from ndtrain.config import Config, ConfigError
from ndtrain.mesh.mesh import MeshSpec
from ndtrain.plan.events import Kernel
from ndtrain.plan.hardware import Hardware

# PyTorch's flash kernel is FlashAttention-2. On Hopper, FlashAttention-3 and cuDNN's kernel are 1.5 to 2 times as fast
# (Shah et al., 2024, arXiv:2407.08608).
FLASH2_ON_HOPPER = 1.75
GROUPED, TILE = "_grouped_mm", 128  # the operator of grouped matmuls, and the rows in a tile of its GPU kernels


@dataclass(frozen=True)
class Rates:
    """The performance of real machines relative to their data sheets.

    Efficiencies are shares of a peak or of a bandwidth. The defaults are fitted to 457 published runs from ten sources:
    docs/plan_accuracy.md has the errors. `step_s` and `launch_s` are ndtrain's own. `PUBLISHED` has the values for the
    published trainers.

    Attributes:
        matmul: efficiency of a large matmul.
        attention: efficiency of the attention kernel, forward and backward. Only visible pairs count. GPUs with fp8
            reach less of their peak by the factor `FLASH2_ON_HOPPER`.
        sustained: share of the listed peak that GPUs with fp8 (Hopper and later) sustain under their power limit.
        memory: efficiency of memory-bound kernels.
        kernel_s: device time of every kernel in addition to its work: start and tail.
        launch_s: host time of a launch.
        link, network: efficiency of collectives within a host and across hosts.
        link_hop_s, network_hop_s: latency of one hop of a ring.
        interference: extra time of compute that overlaps with a collective, as a share of the collective's time.
        late_s: time from a collective's end until a waiting rank continues: ranks arrive at different times, and a
            waiting thread wakes up late. `plan calibrate` measures it.
        imbalance: rows of the rank whose experts get most, divided by the mean. The matmuls of these experts and the
            exchange of rows take longer by this factor, and the rows take more memory.
        step_s: time of every step in addition to its program.
        slower: factor on the step time that remains after all other rates. `plan tune` measures it.
        memory_factor: allocated memory divided by the bytes of a step's tensors. It covers fixed block sizes and
            fragmentation. It does not apply to state, which is allocated once.
        memory_gb: memory of the CUDA context and of NCCL's buffers.
    """

    matmul: float = 0.724
    attention: float = 0.605
    sustained: float = 0.951
    memory: float = 0.944
    kernel_s: float = 6.55e-6
    launch_s: float = 15e-6
    link: float = 0.527
    network: float = 0.580
    link_hop_s: float = 1e-6  # not fitted
    network_hop_s: float = 5e-6  # not fitted
    interference: float = 0.196
    late_s: float = 0.0  # not fitted
    imbalance: float = 1.0  # not fitted: routing is assumed to be balanced
    step_s: float = 0.013  # time without a kernel in a step of an 8B model on one H200: docs/results.md
    slower: float = 1.0
    memory_factor: float = 1.073
    memory_gb: float = 1.58


# Rates that are added, so they may be 0 on a machine. The other rates are factors.
ADDED = ("kernel_s", "launch_s", "link_hop_s", "network_hop_s", "interference", "late_s", "step_s", "memory_gb")

# Rates of other trainers: their data and logs do not overlap with the step, and their hosts take longer per operator.
PUBLISHED = Rates(step_s=0.110, launch_s=44e-6)


def rates_of(hardware: Hardware, rates: Rates | None = None) -> Rates:
    """Return the rates, overridden by the rates measured in the hardware's description.

    Raises:
        ConfigError: the description has an unknown rate, or a factor of 0.
    """
    known = [f.name for f in fields(Rates)]
    if strange := [name for name in hardware.rates if name not in known]:
        raise ConfigError(
            f"hardware={hardware.name}: rates.{strange[0]}: no such rate; {near(strange[0], known)}known: "
            f"{', '.join(known)}"
        )
    if zero := [name for name, rate in hardware.rates.items() if not rate and name not in ADDED]:
        raise ConfigError(f"hardware={hardware.name}: rates.{zero[0]}=0: must be a positive number")
    return replace(rates or Rates(), **hardware.rates)


def rates_for(rates: Rates, cfg: Config) -> Rates:
    """Return the rates of a run. With `moe.capacity` there is no imbalance: buffer sizes do not depend on routing."""
    return rates if cfg.moe.capacity is None else replace(rates, imbalance=1.0)


@dataclass(frozen=True)
class GroupShape:
    """The size of a process group, and the number of hosts that it spans.

    Attributes:
        ranks: number of ranks.
        hosts: number of hosts that these ranks are on.
    """

    ranks: int
    hosts: int


@lru_cache(maxsize=4096)
def _group_shape(mesh: MeshSpec, axes: tuple[str, ...], gpus_per_node: int) -> GroupShape:
    members = mesh.members(0, *axes)
    return GroupShape(len(members), len({rank // gpus_per_node for rank in members}))


class Prices:
    """Prices work on one kind of hardware, in seconds.

    If times are measured on the hardware, they are used. The formulas then only price communication between hosts.

    Args:
        mesh: determines which ranks communicate along which axes.
        own_core: if the ranks share measured cores, price kernels as if each running rank had a core of its own.

    Attributes:
        launch_s: host time of a kernel's launch, during which the device may work. On a CPU the host is the device, and
            this time is part of the kernel's time.
        ranks_a_core: number of ranks that share a core, if cores are measured; otherwise 1.
        late_s: the rate of the same name. It is 0 if ranks share measured cores: their collectives were measured while
            ranks waited for a core.
    """

    def __init__(self, hardware: Hardware, rates: Rates, mesh: MeshSpec, own_core: bool = False):
        self.hardware, self.rates, self.mesh, self._measured = hardware, rates, mesh, hardware.measured
        self._on_host = min(mesh.world_size, hardware.gpus_per_node)
        cores = self._measured.cores if self._measured else self._on_host
        self._computing = min(self._on_host, cores) if own_core else self._on_host
        self.ranks_a_core = max(1.0, self._computing / cores)
        self.late_s = rates.late_s if self._on_host <= cores else 0.0
        own_host = hardware.device == "cuda"
        self.launch_s = rates.launch_s if own_host else 0.0
        self._fixed = 0.0 if own_host else rates.launch_s * self.ranks_a_core
        if not self._measured:
            self._fixed += rates.kernel_s

    # ------------------------------------------------------------------------------------------------------ kernels

    def kernel(self, k: Kernel) -> float:
        """Return the seconds on the device: the longer of arithmetic and memory traffic, plus the fixed part.

        Raises:
            ConfigError: the description of the hardware lacks a rate that is needed.
        """
        if self._measured:
            return self._measured.kernel(k, self._computing) + self._fixed
        return max(self.arithmetic(k), k.bytes / self._memory) + self._fixed

    def arithmetic(self, k: Kernel) -> float:
        """Return the seconds of the kernel's FLOPs alone, or 0 if the kernel is bound by memory."""
        efficiency = {"matmul": self.rates.matmul, "attention": self.rates.attention}.get(k.kind)
        if not efficiency:
            return 0.0
        held = self.rates.sustained if "fp8" in self.hardware.peak_tflops else 1.0
        if k.kind == "attention" and "fp8" in self.hardware.peak_tflops:
            held /= FLASH2_ON_HOPPER
        if k.op == GROUPED:  # the last tile of each group is half full on average
            held *= k.shape[1] / (k.shape[1] + TILE / 2)
        return k.flops / (efficiency * held * peak_flops(self.hardware, k.dtype))

    @cached_property
    def _memory(self) -> float:
        return self.rates.memory * listed(self.hardware, "memory_gb_s")

    # -------------------------------------------------------------------------------------------------- collectives

    def collective(self, axis: str, op: str, nbytes: int) -> float:
        """Return the seconds of a collective of `nbytes` (as in `events.Collective`) along axes such as "fsdp+cp".

        Gathers and reductions go around a ring. If the ring crosses hosts, the ranks of the group on one host share its
        traffic to the next host among their network adapters. Each hop has a latency, within a host and between hosts.
        An all-reduce goes around the ring twice, or up and down a tree if that has less latency.
        """
        group = self.group(*axis.split("+"))
        if group.ranks == 1:
            return 0.0
        if self._measured and group.hosts == 1:
            return self._measured.collective(op, nbytes, group.ranks, self._on_host)
        if op == "send_recv":
            return self._message(nbytes, group.hosts > 1)
        if op == "all_to_all":
            return self._all_to_all(nbytes, group)
        turns = 2 if op == "all_reduce" else 1
        hops = turns * self._hops(group.ranks - group.hosts, group.hosts - 1)
        if op == "all_reduce":
            hops = min(hops, 2 * self._hops(_doublings(group.ranks // group.hosts), _doublings(group.hosts)))
        return hops + turns * nbytes * (group.ranks - 1) / group.ranks / self._ring(group)

    def message(self, axis: str, nbytes: int) -> float:
        """Return the seconds of a message to the next rank of an axis."""
        across = self.group(axis).hosts > 1
        if self._measured and not across:
            return self._measured.collective("send_recv", nbytes, 2, self._on_host)
        return self._message(nbytes, across)

    def group(self, *axes: str) -> GroupShape:
        """Return the shape of the first rank's group along these axes."""
        return _group_shape(self.mesh, axes, self.hardware.gpus_per_node)

    def _ring(self, group: GroupShape) -> float:
        """Return the bytes per second that pass each rank."""
        within = self._link if group.ranks > group.hosts else float("inf")
        if group.hosts == 1:
            return within
        return min(within, self.network * group.ranks / group.hosts)

    def _all_to_all(self, nbytes: int, group: GroupShape) -> float:
        """Return the seconds of an all-to-all. Each rank sends an equal part to every other rank.

        Messages within the host overlap with messages to other hosts.
        """
        on_host = group.ranks // group.hosts
        part = nbytes / group.ranks
        inside = self._hops(on_host - 1, 0) + (part * (on_host - 1) / self._link if on_host > 1 else 0.0)
        if group.hosts == 1:
            return inside
        return max(inside, self._hops(0, 1) + part * (group.ranks - on_host) / self.network)

    def _message(self, nbytes: int, across: bool) -> float:
        return self._hops(0, 1) + nbytes / self.network if across else self._hops(1, 0) + nbytes / self._link

    def _hops(self, within: int, across: int) -> float:
        return within * self.rates.link_hop_s + across * self.rates.network_hop_s

    @cached_property
    def _link(self) -> float:
        return self.rates.link * listed(self.hardware, "link_gb_s")

    @cached_property
    def network(self) -> float:
        """Bytes per second from one device to other hosts. Raises ConfigError if the description lists no network."""
        return self.rates.network * listed(self.hardware, "network_gb_s")


def peak_flops(hardware: Hardware, dtype: str) -> float:
    """Return the FLOP/s of matmuls of this dtype, as listed in the description. Without an fp8 peak, fp8 uses bf16.

    Raises:
        ConfigError: the description has no such peak.
    """
    peaks = hardware.peak_tflops
    if dtype == "fp8" and "fp8" not in peaks:
        dtype = "bf16"
    if dtype not in peaks:
        raise ConfigError(
            f"hardware={hardware.name}: peak_tflops.{dtype} is missing: add it to your own description, or measure "
            "it with `ndtrain plan calibrate`"
        )
    return 1e12 * peaks[dtype]


def listed(hardware: Hardware, key: str) -> float:
    """Return a bandwidth of the description, in bytes per second.

    Raises:
        ConfigError: the bandwidth is null.
    """
    rate = getattr(hardware, key)
    if rate is None:
        raise ConfigError(
            f"hardware={hardware.name}: {key} is missing: add it to your own description, or measure it with "
            "`ndtrain plan calibrate`"
        )
    return 1e9 * rate


def _doublings(n: int) -> int:
    """Return the depth of a binary tree with n leaves."""
    return (n - 1).bit_length()
