"""The cost of training on several islands: what they exchange in a step, the time on the link, and the host memory."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ndtrain.config import Config
from ndtrain.config.island_checks import row_grain
from ndtrain.config.schema import DILOCO
from ndtrain.islands.encoding import sent_dtype
from ndtrain.islands.epoch import Member, split_rows
from ndtrain.islands.table import element_bytes
from ndtrain.parallel.build import DTYPES
from ndtrain.plan.price import Prices
from ndtrain.program.build import UnitFacts
from ndtrain.program.step import StepProgram

_SENT = 2  # copies of the gradient shard that others may read: the last two steps
_ROOM = 3  # units that are in memory at a time, for each island that a rank reads from


def islands_of(cfg: Config) -> int:
    """Return the number of islands, 1 for a job that trains alone."""
    return max(1, cfg.islands.count)


def island_config(cfg: Config) -> Config:
    """Return the run with the rows of one island as its batch: the largest share, if all islands are equally fast."""
    count = islands_of(cfg)
    if count == 1:
        return cfg
    members = [Member(str(i), "", "", row_grain(cfg)) for i in range(count)]
    shares = split_rows(cfg.train.global_batch, members)
    own = cfg.unfrozen()
    own.train.global_batch = max(shares)
    own.freeze()
    return own


@dataclass(frozen=True)
class Sync:
    """The kind of the exchange between islands.

    Attributes:
        width: bytes of an element on the link, without the scales of the rows.
        steps: steps between two exchanges of the same elements.
        fragments: parts of the elements, which are exchanged one after another during `steps`.
        delay: steps that a fragment may take while training continues.
        master: bytes of an element of the master weights and of the sum of all islands.
        outer: True if there is an outer optimizer, with weights and a momentum of its own (`islands.sync=diloco`).
    """

    width: float
    steps: int = 1
    fragments: int = 1
    delay: int = 0
    master: int = 4
    outer: bool = False

    @classmethod
    def of(cls, cfg: Config) -> "Sync":
        """Return what the islands of a resolved configuration exchange."""
        i, master = cfg.islands, DTYPES[cfg.precision.params]
        if i.sync == DILOCO:
            width = element_bytes(sent_dtype(i.codec, master))
            return cls(width, i.inner_steps, i.fragments, i.delay, master.itemsize, outer=True)
        return cls(master.itemsize, master=master.itemsize)


@dataclass(frozen=True)
class Link:
    """The link from an island to the others.

    Attributes:
        rank_bytes_s, island_bytes_s: bytes per second of one rank, and of all ranks of an island together.
        latency_s: seconds until a byte arrives.
    """

    rank_bytes_s: float
    island_bytes_s: float
    latency_s: float

    @classmethod
    def of(cls, prices: Prices) -> "Link":
        """Return the link that the hardware's description has.

        Raises:
            ConfigError: it lists neither a link between islands nor a network between hosts.
        """
        hardware = prices.hardware
        island, latency = hardware.island_gb_s, hardware.island_latency_s
        rank = math.inf if hardware.network_gb_s is None and island else prices.network
        latency = prices.rates.network_hop_s if latency is None else latency
        return cls(rank, math.inf if island is None else 1e9 * island, latency)

    def seconds(self, rank_bytes: float, island_bytes: float) -> float:
        """Return the seconds to request and read these bytes: of the rank that reads most, and of all ranks."""
        return 2 * self.latency_s + max(rank_bytes / self.rank_bytes_s, island_bytes / self.island_bytes_s)


@dataclass(frozen=True)
class Exchange:
    """The exchange between islands, in the mean over the steps.

    Attributes:
        rank_bytes: bytes that the rank with the largest shard reads in a step.
        island_bytes: bytes that all ranks of an island read in a step.
        seconds: time on the link in a step.
        exposed_s: the part of it that training waits for.
        host_bytes: host memory of the rank with the largest shard.
    """

    rank_bytes: float
    island_bytes: float
    seconds: float
    exposed_s: float
    host_bytes: int


@dataclass(frozen=True)
class Shards:
    """The elements that the ranks of an island hold.

    Attributes:
        largest: elements of the rank that holds most.
        all: elements of all ranks together. Replicas count too, since each reads its own copy.
        largest_unit: elements of the largest unit's shard.
    """

    largest: int
    all: int
    largest_unit: int

    @classmethod
    def of(cls, program: StepProgram, ranks: int) -> "Shards":
        """Return the shards of an island with this number of ranks."""
        held = [[_shard(program.units, name) for name in rank.units] for rank in program.ranks]
        each = ranks // len(held)
        return cls(max(map(sum, held)), each * sum(map(sum, held)), max(map(max, held)))


def _shard(units: Mapping[str, UnitFacts], name: str) -> int:
    return -(-units[name].numel // units[name].shards)


def exchange_of(sync: Sync, link: Link, shards: Shards, islands: int, step_s: float) -> Exchange:
    """Return the exchange between this number of islands.

    A fragment is read from all other islands. What takes longer than `sync.delay` steps is exposed, and so is what the
    link cannot carry during the steps between two exchanges.

    Args:
        step_s: seconds of a step of an island alone.
    """
    share = (islands - 1) * sync.width / sync.fragments
    a_step = sync.fragments / sync.steps
    seconds = link.seconds(share * shards.largest, share * shards.all)
    late = max(0.0, seconds - sync.delay * step_s)
    return Exchange(
        rank_bytes=a_step * share * shards.largest,
        island_bytes=a_step * share * shards.all,
        seconds=a_step * seconds,
        exposed_s=max(a_step * late, a_step * seconds - step_s),
        host_bytes=host_bytes(sync, shards, islands),
    )


def host_bytes(sync: Sync, shards: Shards, islands: int) -> int:
    """Return the host memory that the exchange needs on the rank with the largest shard."""
    room = (islands - 1) * _ROOM * shards.largest_unit
    copies = 1.0  # the last sum
    if sync.outer:  # outer weights and momentum, the change of a fragment, and its weights if training continues
        copies += 2 + (2 if sync.delay else 1) / sync.fragments
    return int(sync.width * (_SENT * shards.largest + room) + sync.master * copies * shards.largest)
