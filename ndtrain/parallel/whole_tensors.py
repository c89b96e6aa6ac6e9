"""Whole tensors for optimizers that need them: each has one owner among the ranks that hold its shards.

The owner receives the gradient and the master weights of every rank's elements. It holds the tensor's state, computes
the update and sends the new weights back. Where other ranks hold the same shards (along dp), each set of replicas does
the same work, and no message crosses between them.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from ndtrain.distributed.collectives import receive, send
from ndtrain.distributed.mesh import Mesh
from ndtrain.distributed.row_map import Run
from ndtrain.distributed.sharding import TENSOR_AXIS, FlatLayout
from ndtrain.optim import StateSpec


@dataclass(frozen=True)
class Holding:
    """The elements of one tensor in one rank's shard of a unit.

    Attributes:
        runs: their positions; `local_start` is an offset in the shard.
        counted: whether this rank sends the elements to the owner. Of tp replicas only the first one does.
    """

    runs: tuple[Run, ...]
    counted: bool

    @property
    def numel(self) -> int:
        return sum(run.length for run in self.runs)


NO_PART = Holding((), counted=False)


@dataclass(frozen=True, eq=False)
class WholeTensor:
    """One tensor of the stage.

    Attributes:
        shape: of the whole tensor.
        group: the ranks that hold its shards, along the axes that split its unit and along tp.
        position: this rank's in the group.
        replica: which of the sets of ranks with the same shards this rank belongs to.
        owner: the position of its owner in the group.
        holdings: by position in the group.
        shards: this rank's (master, grad) of the unit that it lies in.
        state: name -> state tensor on the owner; empty on other ranks.
    """

    name: str
    shape: tuple[int, ...]
    group: dist.ProcessGroup | None
    position: int
    replica: int
    owner: int
    holdings: Sequence[Holding]
    shards: tuple[Tensor, Tensor]
    state: dict[str, Tensor]


class WholeTensors:
    """All tensors of a rank's stages.

    Args:
        layouts_of: rank -> unit -> the flat layout of the stage as that rank holds it.
        shards: unit -> this rank's (master, grad).
        spec: the optimizer's state.
        master: dtype of weights and gradients.
    """

    def __init__(
        self,
        mesh: Mesh,
        layouts_of: Callable[[int], Mapping[str, FlatLayout]],
        shards: Mapping[str, tuple[Tensor, Tensor]],
        spec: Sequence[StateSpec],
        master: torch.dtype,
    ):
        self.master, self.device = master, mesh.device
        layouts_of = cache(layouts_of)
        self.tensors = []
        for axes in dict.fromkeys(layout.groups.shard_axes for layout in layouts_of(mesh.rank).values()):
            members = mesh.spec.members(mesh.rank, *axes, TENSOR_AXIS)
            units = [u for u, layout in layouts_of(mesh.rank).items() if layout.groups.shard_axes == axes]
            layouts = [{u: layouts_of(rank)[u] for u in units} for rank in members]
            group, position = mesh.group(*axes, TENSOR_AXIS), members.index(mesh.rank)
            self.tensors += self._place(group, position, layouts, shards, spec)

    def _place(
        self,
        group: dist.ProcessGroup | None,
        position: int,
        layouts: Sequence[Mapping[str, FlatLayout]],
        shards: Mapping[str, tuple[Tensor, Tensor]],
        spec: Sequence[StateSpec],
    ) -> Iterator[WholeTensor]:
        """Assigns the owners among the ranks of a group, the largest tensor first and each to the rank that owns the
        fewest elements so far.

        Args:
            layouts: by position in the group: unit -> flat layout.
        """
        tensors = [(t, unit) for unit, layout in layouts[0].items() for t in layout.tensors]
        owned, owner = [0] * len(layouts), {}
        for t, _ in sorted(tensors, key=lambda item: (-item[0].numel, item[0].name)):
            owner[t.name] = owned.index(min(owned))
            owned[owner[t.name]] += t.numel
        of_unit = {unit: [_holdings(layout[unit]) for layout in layouts] for unit in layouts[0]}
        for t, unit in tensors:
            holdings = [of_rank.get(t.name, NO_PART) for of_rank in of_unit[unit]]
            make = lambda s, t=t: torch.zeros(s.shape_of(t.shape), dtype=s.dtype or self.master, device=self.device)
            state = {s.name: make(s) for s in spec} if owner[t.name] == position else {}
            replica = layouts[position][unit].groups.replica
            yield WholeTensor(t.name, t.shape, group, position, replica, owner[t.name], holdings, shards[unit], state)

    def update_each(self, update: Callable[[str, Tensor, Tensor, dict[str, Tensor]], None]) -> None:
        """Calls `update(name, weight, grad, state)` on the owner of each tensor. Every rank of the group calls this."""
        for t in self.tensors:
            whole = self._gather(t)
            if whole is not None:
                update(t.name, whole[0].view(t.shape), whole[1].view(t.shape), t.state)
            self._scatter(t, None if whole is None else whole[0])

    def _gather(self, t: WholeTensor) -> Tensor | None:
        """(weight, gradient) [2, numel] on the owner, None elsewhere."""
        mine = t.holdings[t.position]
        if t.position != t.owner:
            if mine.counted and mine.numel:
                message = torch.stack([_packed(x, mine) for x in t.shards])
                send(message, t.group, t.owner).wait()
            return None
        whole = torch.empty(2, math.prod(t.shape), dtype=self.master, device=self.device)
        for position, holding in enumerate(t.holdings):
            if not holding.counted or not holding.numel:
                continue
            if position == t.position:
                message = torch.stack([_packed(x, holding) for x in t.shards])
            else:
                message = whole.new_empty(2, holding.numel)
                receive(message, t.group, position).wait()
            at = 0
            for run in holding.runs:
                whole[:, run.global_start : run.global_start + run.length] = message[:, at : at + run.length]
                at += run.length
        return whole

    def _scatter(self, t: WholeTensor, weight: Tensor | None) -> None:
        """Sends the owner's weight to every rank, which writes its elements into its shard."""
        mine = t.holdings[t.position]
        if t.position != t.owner:
            if mine.numel:
                message = torch.empty(mine.numel, dtype=self.master, device=self.device)
                receive(message, t.group, t.owner).wait()
                _unpack(message, t.shards[0], mine)
            return
        for position, holding in enumerate(t.holdings):
            if not holding.numel:
                continue
            spans = [weight[run.global_start : run.global_start + run.length] for run in holding.runs]
            message = torch.cat(spans)
            if position == t.position:
                _unpack(message, t.shards[0], holding)
            else:
                send(message, t.group, position).wait()


def _holdings(layout: FlatLayout) -> dict[str, Holding]:
    """Of each tensor that a rank holds a part of."""
    return {t.name: Holding(tuple(runs), counted=t.tp_replica == 0) for t, runs in layout.runs(*layout.own)}


def _packed(shard: Tensor, holding: Holding) -> Tensor:
    return torch.cat([shard[run.local_start : run.local_start + run.length] for run in holding.runs])


def _unpack(message: Tensor, shard: Tensor, holding: Holding) -> None:
    at = 0
    for run in holding.runs:
        shard[run.local_start : run.local_start + run.length] = message[at : at + run.length]
        at += run.length
