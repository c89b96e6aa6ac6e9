"""The device mesh: named axes over ranks, as arithmetic (`MeshSpec`) and as process groups (`Mesh`).

An **axis** is one of pp, dp, fsdp, cp, tp. A **coord** is a position on one axis. Ranks are laid out row-major in
`order`, outer to inner, so the ranks along the last axis are neighbours.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ndtrain.config import AXES, MeshConfig
from ndtrain.distributed.flight_recorder import RECORDER


@dataclass(frozen=True)
class MeshSpec:
    """The axes of a mesh and their sizes. It needs no processes.

    Attributes:
        order: axis names, outer to inner.
        sizes: the size of each.
    """

    order: tuple[str, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, cfg: MeshConfig) -> "MeshSpec":
        return cls(tuple(cfg.order), tuple(getattr(cfg, axis) for axis in cfg.order))

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes)

    def size(self, *axes: str) -> int:
        """Number of ranks along `axes` together."""
        return math.prod(self.sizes[self.order.index(a)] for a in axes)

    def coords(self, rank: int) -> dict[str, int]:
        """Axis -> coord of a global rank."""
        coords = {}
        for axis, size in zip(reversed(self.order), reversed(self.sizes), strict=True):
            rank, coords[axis] = divmod(rank, size)
        return {a: coords[a] for a in self.order}

    def where(self, rank: int) -> str:
        """A global rank's coords as text, "dp=1 tp=0". Axes of one rank are left out."""
        return " ".join(f"{axis}={at}" for axis, at in self.coords(rank).items() if self.size(axis) > 1)

    def rank(self, coords: dict[str, int]) -> int:
        """Global rank at `coords`, the inverse of `coords()`."""
        rank = 0
        for axis, size in zip(self.order, self.sizes, strict=True):
            rank = rank * size + coords[axis]
        return rank

    def index(self, rank: int, *axes: str) -> int:
        """Position of `rank` among the ranks that differ from it only along `axes`, in mesh order."""
        coords, position = self.coords(rank), 0
        for axis in self._ordered(axes):
            position = position * self.size(axis) + coords[axis]
        return position

    def groups(self, *axes: str) -> list[list[int]]:
        """All groups of ranks that differ only along `axes`. The ranks of a group are ordered by `index`."""
        inner = self._ordered(axes)
        outer = [a for a in self.order if a not in inner]
        ranges = lambda names: product(*(range(self.size(a)) for a in names))
        return [
            [self.rank(dict(zip(outer, o, strict=True)) | dict(zip(inner, i, strict=True))) for i in ranges(inner)]
            for o in ranges(outer)
        ]

    def members(self, rank: int, *axes: str) -> list[int]:
        """The group of `groups(*axes)` that `rank` belongs to."""
        coords, inner = self.coords(rank), self._ordered(axes)
        places = product(*(range(self.size(a)) for a in inner))
        return [self.rank(coords | dict(zip(inner, place, strict=True))) for place in places]

    def _ordered(self, axes: tuple[str, ...]) -> list[str]:
        return [a for a in self.order if a in axes]


class Mesh:
    """A `MeshSpec` seen from one rank, with process groups. A group of one rank is `None`.

    A group is created on first use. Creation is collective: every rank must ask for the same groups in the same order.
    """

    def __init__(self, spec: MeshSpec, rank: int, device: torch.device):
        self.spec, self.rank, self.device = spec, rank, device
        self.coords = spec.coords(rank)
        self._groups: dict[tuple[str, ...], dist.ProcessGroup | None] = {}

    @cached_property
    def _device_mesh(self) -> DeviceMesh:
        ranks = torch.arange(self.spec.world_size).view(self.spec.sizes)
        return DeviceMesh(self.device.type, ranks, mesh_dim_names=self.spec.order)

    def size(self, *axes: str) -> int:
        """Number of ranks along `axes` together."""
        return self.spec.size(*axes)

    def index(self, *axes: str) -> int:
        """This rank's position along `axes` together."""
        return self.spec.index(self.rank, *axes)

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """The process group of the ranks that differ from this one only along `axes`. None for one rank."""
        wide = tuple(a for a in self.spec.order if a in axes and self.spec.size(a) > 1)
        if wide not in self._groups:
            self._groups[wide] = self._named("+".join(wide), self._make(wide))
        return self._groups[wide]

    def subgroup(self, axis: str, n: int) -> dist.ProcessGroup | None:
        """The process group of this rank among those of `n` consecutive ranks along `axis`. None for n = 1. Every rank
        must ask for the same groups in the same order."""
        if n == self.spec.size(axis):
            return self.group(axis)
        if n == 1:
            return None
        blocks = [ranks[i : i + n] for ranks in self.spec.groups(axis) for i in range(0, len(ranks), n)]
        return self._named(axis, dist.new_subgroups_by_enumeration(blocks)[0])

    def second_group(self, axis: str) -> dist.ProcessGroup | None:
        """A second process group of the ranks of `group(axis)`, for example for the other direction of pp. None for one
        rank. Every rank must ask in the same order."""
        if self.spec.size(axis) == 1:
            return None
        return self._named(axis, dist.new_subgroups_by_enumeration(self.spec.groups(axis))[0])

    def _named(self, axis: str, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
        """The group, with the world's timeout, after telling the flight recorder its name."""
        if group is not None:
            self._set_timeout(group)
            RECORDER.name_group(group, axis, dist.get_process_group_ranks(group))
        return group

    def _set_timeout(self, group: dist.ProcessGroup) -> None:
        """Gives a group the timeout of the world. PyTorch gives a new one 10 minutes on NCCL, so it would end a run
        before the hang watchdog does, and without its diagnosis."""
        world = dist.distributed_c10d._get_default_group()._get_backend(self.device)
        dist.distributed_c10d._set_pg_timeout(world.options._timeout, group)

    @cached_property
    def background(self) -> dist.ProcessGroup | None:
        """A gloo group of all ranks, for communication from a background thread (tensors on the CPU). None for one
        rank. Every rank must reach its first use in the same order."""
        if self.spec.world_size == 1:
            return None
        group = dist.new_group(backend="gloo")
        self._set_timeout(group)
        return group

    def _make(self, axes: tuple[str, ...]) -> dist.ProcessGroup | None:
        if not axes:
            return None
        if len(axes) == 1:
            return self._device_mesh.get_group(axes[0])
        if self.spec.size(*axes) == self.spec.world_size:
            return dist.group.WORLD
        return self._device_mesh[axes]._flatten("_".join(axes)).get_group()

    @property
    def world(self) -> dist.ProcessGroup | None:
        """The process group of all ranks. None for one rank."""
        return self.group(*AXES)
