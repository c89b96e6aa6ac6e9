"""Whole tensors for optimizers that need them: each has one owner among the ranks that hold its shards.

The owner receives the gradient and the master weights of every rank's elements. It holds the tensor's state, computes
the update and sends the new weights back. Ranks along dp hold the same shards, so each dp coordinate does the same work
and no message crosses dp.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ndtrain.distributed.collectives import receive, send
from ndtrain.distributed.mesh import Mesh
from ndtrain.distributed.sharding import FlatLayout, Run
from ndtrain.optim import StateSpec

MODEL_SHARD_AXES = ("fsdp", "cp", "tp")  # each stage is sharded over the ranks along these axes


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


@dataclass(frozen=True, eq=False)
class WholeTensor:
    """One tensor of the stage.

    Attributes:
        shape: of the whole tensor.
        owner: the position of its owner in the group.
        holdings: by position in the group.
        shards: this rank's (master, grad) of the unit that it lies in.
        state: name -> state tensor on the owner; empty on other ranks.
    """

    name: str
    shape: tuple[int, ...]
    owner: int
    holdings: Sequence[Holding]
    shards: tuple[Tensor, Tensor]
    state: dict[str, Tensor]


class WholeTensors:
    """All tensors of a rank's stages.

    Args:
        layouts: by position in the group: unit -> flat layout.
        shards: unit -> this rank's (master, grad).
        spec: the optimizer's state.
        master: dtype of weights and gradients.
    """

    def __init__(
        self,
        mesh: Mesh,
        layouts: Sequence[Mapping[str, FlatLayout]],
        indices: Sequence[int],
        shards: Mapping[str, tuple[Tensor, Tensor]],
        spec: Sequence[StateSpec],
        master: torch.dtype,
    ):
        self.group: dist.ProcessGroup | None = mesh.group(*MODEL_SHARD_AXES)
        self.position, self.master, self.device = mesh.index(*MODEL_SHARD_AXES), master, mesh.device
        self.tensors = list(self._place(layouts, indices, shards, spec))

    def _place(
        self,
        layouts: Sequence[Mapping[str, FlatLayout]],
        indices: Sequence[int],
        shards: Mapping[str, tuple[Tensor, Tensor]],
        spec: Sequence[StateSpec],
    ) -> Iterator[WholeTensor]:
        """Assigns the owners, the largest tensor first and each to the rank that owns the fewest elements so far."""
        tensors = [(t, unit) for unit, layout in layouts[0].items() for t in layout.tensors]
        owned, owner = [0] * len(layouts), {}
        for t, _ in sorted(tensors, key=lambda item: (-item[0].numel, item[0].name)):
            owner[t.name] = owned.index(min(owned))
            owned[owner[t.name]] += t.numel
        for t, unit in tensors:
            holdings = [_holding(layout[unit], index, t.name) for layout, index in zip(layouts, indices, strict=True)]
            mine = owner[t.name] == self.position
            make = lambda s, t=t: torch.zeros(s.shape_of(t.shape), dtype=s.dtype or self.master, device=self.device)
            state = {s.name: make(s) for s in spec} if mine else {}
            yield WholeTensor(t.name, t.shape, owner[t.name], holdings, shards[unit], state)

    def update_each(self, update: Callable[[Tensor, Tensor, dict[str, Tensor]], None]) -> None:
        """Calls `update(weight, grad, state)` on the owner of each tensor. Every rank of the group calls this."""
        for t in self.tensors:
            whole = self._gather(t)
            if whole is not None:
                update(whole[0].view(t.shape), whole[1].view(t.shape), t.state)
            self._scatter(t, None if whole is None else whole[0])

    def _gather(self, t: WholeTensor) -> Tensor | None:
        """(weight, gradient) [2, numel] on the owner, None elsewhere."""
        mine = t.holdings[self.position]
        if self.position != t.owner:
            if mine.counted and mine.numel:
                message = torch.stack([_packed(x, mine) for x in t.shards])
                send(message, self.group, t.owner).wait()
            return None
        whole = torch.empty(2, math.prod(t.shape), dtype=self.master, device=self.device)
        for position, holding in enumerate(t.holdings):
            if not holding.counted or not holding.numel:
                continue
            if position == self.position:
                message = torch.stack([_packed(x, holding) for x in t.shards])
            else:
                message = whole.new_empty(2, holding.numel)
                receive(message, self.group, position).wait()
            at = 0
            for run in holding.runs:
                whole[:, run.global_start : run.global_start + run.length] = message[:, at : at + run.length]
                at += run.length
        return whole

    def _scatter(self, t: WholeTensor, weight: Tensor | None) -> None:
        """Sends the owner's weight to every rank, which writes its elements into its shard."""
        mine = t.holdings[self.position]
        if self.position != t.owner:
            if mine.numel:
                message = torch.empty(mine.numel, dtype=self.master, device=self.device)
                receive(message, self.group, t.owner).wait()
                _unpack(message, t.shards[0], mine)
            return
        for position, holding in enumerate(t.holdings):
            if not holding.numel:
                continue
            spans = [weight[run.global_start : run.global_start + run.length] for run in holding.runs]
            message = torch.cat(spans)
            if position == self.position:
                _unpack(message, t.shards[0], holding)
            else:
                send(message, self.group, position).wait()


def _holding(layout: FlatLayout, index: int, name: str) -> Holding:
    for tensor, runs in layout.runs(*layout.bounds(index)):
        if tensor.name == name:
            return Holding(tuple(runs), counted=tensor.tp_replica == 0)
    return Holding((), counted=False)


def _packed(shard: Tensor, holding: Holding) -> Tensor:
    return torch.cat([shard[run.local_start : run.local_start + run.length] for run in holding.runs])


def _unpack(message: Tensor, shard: Tensor, holding: Holding) -> None:
    at = 0
    for run in holding.runs:
        shard[run.local_start : run.local_start + run.length] = message[at : at + run.length]
        at += run.length
