"""The device mesh: named axes over ranks, as arithmetic (`MeshSpec`) and as process groups (`Mesh`).

An **axis** is one of pp, dp, fsdp, cp, tp. A **coord** is a position on one axis. Ranks are laid out row-major in
`order`, outer to inner, so the ranks along the last axis are neighbours.

**ep** is not a sixth axis. It folds over the ranks of dp, fsdp and cp, as in "MoE parallel folding" (Liu et al., 2025,
arXiv:2504.14960). ep takes a factor of each of these axes, the innermost axis first. The product of the factors is its
size. A function that takes the names of axes also accepts "ep", and "fsdp/ep" for the factor of fsdp that ep leaves
over.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ndtrain.config import DATA_AXES, MeshConfig
from ndtrain.device.kind import kind_of
from ndtrain.mesh.flight_recorder import RECORDER
from ndtrain.mesh.gloo import GLOO, gloo_group_of_all_ranks, sharing_a_thread

EP = "ep"


def beside_ep(axis: str) -> str:
    """Return the name of the factor of a data axis that ep leaves over."""
    return f"{axis}/{EP}"


class Part(NamedTuple):
    """A factor of an axis: the one that ep takes, or the one that ep leaves over.

    Attributes:
        axis: the axis.
        name: "ep", or `beside_ep(axis)` for the factor that ep leaves over. If ep cannot fold over the axis, its only
            part has the name of the axis.
        stride: ranks from one coord to the next.
    """

    axis: str
    name: str
    size: int
    stride: int


@dataclass(frozen=True)
class MeshSpec:
    """The axes of a mesh and their sizes. It needs no processes.

    Attributes:
        order: axis names, outer to inner.
        sizes: the size of each axis.
        ep: the number of ranks that ep folds over; it divides dp x fsdp x cp.
    """

    order: tuple[str, ...]
    sizes: tuple[int, ...]
    ep: int = 1

    @classmethod
    def of(cls, cfg: MeshConfig) -> "MeshSpec":
        return cls(tuple(cfg.order), tuple(getattr(cfg, axis) for axis in cfg.order), cfg.ep)

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The parts of all axes, outer to inner. The factor of an axis that ep takes is inside the factor that it
        leaves over, so the ranks along ep are near neighbours."""
        parts, stride, ep = [], 1, self.ep
        for axis, size in zip(reversed(self.order), reversed(self.sizes), strict=True):
            if axis in DATA_AXES:
                taken = math.gcd(ep, size)
                parts += [Part(axis, EP, taken, stride), Part(axis, beside_ep(axis), size // taken, stride * taken)]
                ep //= taken
            else:
                parts.append(Part(axis, axis, size, stride))
            stride *= size
        return tuple(reversed(parts))

    def along(self, *axes: str) -> list[Part]:
        """Return the parts that make up some axes, outer to inner.

        Raises:
            ValueError: an axis does not exist.
        """
        chosen = [p for p in self.parts if p.axis in axes or p.name in axes]
        if unknown := set(axes) - {p.axis for p in chosen} - {p.name for p in chosen}:
            raise ValueError(f"no such axis: {', '.join(sorted(unknown))}")
        return chosen

    def size(self, *axes: str) -> int:
        """Return the number of ranks along `axes` together."""
        return math.prod(p.size for p in self.along(*axes))

    def coords(self, rank: int) -> dict[str, int]:
        """Return the coords of a global rank: axis -> coord."""
        coords = {}
        for axis, size in zip(reversed(self.order), reversed(self.sizes), strict=True):
            rank, coords[axis] = divmod(rank, size)
        return {a: coords[a] for a in self.order}

    def where(self, rank: int) -> str:
        """Return a global rank's coords as text, "dp=1 tp=0". Axes of one rank are left out."""
        return " ".join(f"{axis}={at}" for axis, at in self.coords(rank).items() if self.size(axis) > 1)

    def rank(self, coords: dict[str, int]) -> int:
        """Return the global rank at `coords`. This is the inverse of `coords()`."""
        rank = 0
        for axis, size in zip(self.order, self.sizes, strict=True):
            rank = rank * size + coords[axis]
        return rank

    def index(self, rank: int, *axes: str) -> int:
        """Return the position of `rank` among the ranks that differ from it only along `axes`, in mesh order."""
        position = 0
        for part in self.along(*axes):
            position = position * part.size + rank // part.stride % part.size
        return position

    def groups(self, *axes: str) -> list[list[int]]:
        """Return all groups of ranks that differ only along `axes`. The ranks of a group are ordered by `index`."""
        inner = self.along(*axes)
        firsts = _offsets([p for p in self.parts if p not in inner])
        return [[first + offset for offset in _offsets(inner)] for first in firsts]

    def members(self, rank: int, *axes: str) -> list[int]:
        """Return the group of `groups(*axes)` that `rank` belongs to."""
        inner = self.along(*axes)
        first = rank - sum(rank // p.stride % p.size * p.stride for p in inner)
        return [first + offset for offset in _offsets(inner)]

    def beside_ep(self, axis: str) -> str:
        """Return the name of the factor of an axis that ep leaves over. It is the axis itself if ep takes no factor of
        it."""
        return axis if self.size(axis) == self.size(beside_ep(axis)) else beside_ep(axis)


def _offsets(parts: Iterable[Part]) -> list[int]:
    """Return the distance of each rank along some parts from the first of these ranks, in mesh order."""
    return [sum(steps) for steps in product(*(range(0, p.size * p.stride, p.stride) for p in parts))]


class Link(NamedTuple):
    """One rank's end of the messages between two ranks.

    Attributes:
        group: the process group of the messages.
        peer: the other rank, as a rank of that group.
    """

    group: dist.ProcessGroup
    peer: int


Pair = tuple[int, int]  # (source, target), coords on one axis


class Mesh:
    """A `MeshSpec` seen from one rank, with process groups. A group of one rank is `None`.

    A group is created on first use. Creation is collective: every rank must request the same groups in the same order.

    Args:
        in_order: True if the operations of a group run one after another in launch order, as on NCCL. Operations that
            must not wait for each other then get groups of their own. On gloo the operations of a group do not wait for
            each other, so one group serves all. None: as on the device's backend.
    """

    def __init__(self, spec: MeshSpec, rank: int, device: torch.device, in_order: bool | None = None):
        if device.type == "cuda" and device.index is None:  # our threads need to know the index
            device = torch.device("cuda", torch.cuda.current_device())
        self.spec, self.rank, self.device = spec, rank, device
        self.coords = spec.coords(rank)
        self.in_order = kind_of(device) == "cuda" if in_order is None else in_order
        self._world: dist.ProcessGroup | None = None
        self._groups: dict[tuple[tuple[Part, ...], str], dist.ProcessGroup | None] = {}
        self._links: dict[tuple[str, Pair], dist.ProcessGroup] = {}  # the links of this rank
        self._made: set[tuple[str, Pair]] = set()  # the links of all ranks

    def size(self, *axes: str) -> int:
        """Return the number of ranks along `axes` together."""
        return self.spec.size(*axes)

    def index(self, *axes: str) -> int:
        """Return this rank's position along `axes` together."""
        return self.spec.index(self.rank, *axes)

    def group(self, *axes: str, lane: str = "") -> dist.ProcessGroup | None:
        """Return the process group of the ranks that differ from this rank only along `axes`, or None for one rank.

        Args:
            lane: the name of a second group of the same ranks. Its operations do not wait behind the operations of the
                first group.
        """
        wide, lane = tuple(p for p in self.spec.along(*axes) if p.size > 1), lane * self.in_order
        if (wide, lane) not in self._groups:
            self._groups[wide, lane] = self._make(axes, lane) if wide else None
        return self._groups[wide, lane]

    def subgroup(self, axis: str, n: int) -> dist.ProcessGroup | None:
        """Return the process group of the `n` consecutive ranks along `axis` that this rank is among. None for n = 1.
        Every rank must request the same groups in the same order."""
        if n == self.spec.size(axis):
            return self.group(axis)
        if n == 1:
            return None
        blocks = [ranks[i : i + n] for ranks in self.spec.groups(axis) for i in range(0, len(ranks), n)]
        return self._new_groups(axis, blocks)

    def links(self, axis: str, pairs: Iterable[Pair]) -> dict[Pair, Link]:
        """Return this rank's end of the messages from source to target, for each of the `pairs` that it is part of.
        Every rank must request the same pairs.

        If operations run in launch order, each pair has a group of its own. A message then never waits for the message
        of another pair. The groups of pairs without a common rank are created together.
        """
        pairs, here = sorted(set(pairs)), self.coords[axis]
        if self.in_order:
            self._make_links(axis, [pair for pair in pairs if (axis, pair) not in self._made])
        whole = None if self.in_order or not pairs else self.group(axis)
        others = {pair: sum(pair) - here for pair in pairs if here in pair}
        if whole:
            return {pair: Link(whole, other) for pair, other in others.items()}
        return {pair: Link(self._links[axis, pair], int(other > here)) for pair, other in others.items()}

    def _make_links(self, axis: str, pairs: list[Pair]) -> None:
        lines = self.spec.groups(axis) if pairs else []
        for together in disjoint(pairs):
            group = self._new_groups(axis, [sorted((line[a], line[b])) for line in lines for a, b in together])
            self._links |= {(axis, pair): group for pair in together if group and self.coords[axis] in pair}
        self._made |= {(axis, pair) for pair in pairs}

    def device_mesh(self, *axes: str) -> DeviceMesh:
        """Return PyTorch's DeviceMesh of this rank over `axes`, on the groups of this mesh. Each axis must have more
        than one rank."""
        ranks = torch.tensor(self.spec.members(self.rank, *axes)).view([self.spec.size(a) for a in axes])
        groups = [group for axis in axes if (group := self.group(axis))]
        return DeviceMesh.from_group(groups, self.device.type, mesh=ranks, mesh_dim_names=axes)

    def _named(self, name: str, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
        """Give the group the timeout of the world, register its name with the flight recorder, and return it."""
        assert group is not None, "this rank is one of it"
        self._set_timeout(group)
        RECORDER.name_group(group, name, dist.get_process_group_ranks(group))
        return group

    def _set_timeout(self, group: dist.ProcessGroup) -> None:
        """Give a group the timeout of the world. PyTorch's default for a new NCCL group is 10 minutes. It would end a
        run before the hang watchdog does, and without its diagnosis. On the meta device nothing waits."""
        if self.device.type == "meta":
            return
        world = dist.distributed_c10d._get_default_group()._get_backend(self.device)
        if world.options is not None:  # PyTorch's fake process group has none: nothing waits there
            dist.distributed_c10d._set_pg_timeout(world.options._timeout, group)

    @cached_property
    def background(self) -> dist.ProcessGroup | None:
        """A gloo group of all ranks, for all-reduces from a background thread (tensors on the CPU). None for one rank.

        Its first use creates it, so every rank must reach that first use in the same order. Its ranks connect then, for
        all-reduces alone. Later the store of their addresses may be lost: it ends with torchrun, and the run is saved.
        Anything else may be sent only at the start of the run.
        """
        if self.spec.world_size == 1:
            return None
        group = gloo_group_of_all_ranks()
        self._set_timeout(group)
        if self.device.type != "meta":
            dist.all_reduce(torch.zeros(1), group=group)
        return group

    @property
    def world(self) -> dist.ProcessGroup | None:
        """The process group of all ranks. None for one rank. It is for collectives only: see `connecting_on_use`."""
        if self._shares_world:
            return self.group(*self.spec.order)
        if self.spec.world_size > 1 and self._world is None:
            self._world = self._named(self._name(self.spec.order, "world"), dist.group.WORLD)
        return self._world

    @property
    def _shares_world(self) -> bool:
        """True if axes of all ranks use the world's group: if its ranks do not only connect on use, as on gloo."""
        return self.in_order or not dist.is_initialized() or dist.get_backend() != GLOO

    def _make(self, axes: tuple[str, ...], lane: str) -> dist.ProcessGroup | None:
        name = self._name(axes, lane)
        if self.spec.size(*axes) == self.spec.world_size and not lane and self._shares_world:
            return self._named(name, dist.group.WORLD)
        return self._new_groups(name, self.spec.groups(*axes))

    def _name(self, axes: Iterable[str], lane: str) -> str:
        """Return the name of a group: its axes of more than one rank, outer to inner, and its lane."""
        strides = {a: max(p.stride for p in self.spec.along(a)) for a in axes if self.spec.size(a) > 1}
        return " ".join(filter(None, ("+".join(sorted(strides, key=lambda a: -strides[a])), lane)))

    def _new_groups(self, name: str, blocks: list[list[int]]) -> dist.ProcessGroup | None:
        """Create a process group for each list of ranks. The lists have no rank in common. Return this rank's group, or
        None if it is in no list. Every group but the world's and `background` is created here.

        On gloo only the ranks of a group take part in its creation. NCCL splits the world's communicator once for all
        lists. (`new_group` would split it once for each list.) A rank that is in no list gets a group of itself alone.
        This keeps the names of groups the same on all ranks: PyTorch puts the number of groups that the rank has into
        the name of a new one. Ranks with different names for a group wait for each other forever.
        """
        world = dist.group.WORLD
        alone = {*range(self.spec.world_size)}.difference(*blocks)
        if world is not None and world.bound_device_id is not None:
            group = dist.split_group(
                split_ranks=[*blocks, *([rank] for rank in sorted(alone))], pg_options=nccl_options()
            )
        else:
            own = next((ranks for ranks in blocks if self.rank in ranks), [self.rank])
            with sharing_a_thread():
                group = dist.new_group(own, use_local_synchronization=True)
        return None if self.rank in alone else self._named(name, group)


def disjoint(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """Split the pairs into few lists in which no two pairs have a common rank."""
    lists: list[list[Pair]] = []
    for pair in pairs:
        free = (at for at in lists if not {*pair} & {c for other in at for c in other})
        if (at := next(free, None)) is None:
            lists.append(at := [])
        at.append(pair)
    return lists


def nccl_options() -> Any:
    """Return the options of an NCCL group. Its kernels run on a stream of high priority, so that they start during a
    matmul that fills the GPU, and not after it."""
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
