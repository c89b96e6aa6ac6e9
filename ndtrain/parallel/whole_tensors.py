"""Whole tensors for optimizers that need them: each has one owner among the ranks that hold its shards.

The owner receives the gradient and the master weights of every rank's elements. It holds the tensor's state, computes
the update and sends the new weights back. If other ranks hold the same shards (along dp), each set of replicas does the
same work, and no message crosses between them.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from ndtrain.mesh.mesh import Mesh
from ndtrain.mesh.row_map import Held, Rows
from ndtrain.mesh.sharding import TENSOR_AXIS, FlatLayout
from ndtrain.mesh.transfer import Arriving, Transfer
from ndtrain.optim import StateSpec

Update = Callable[[str, Tensor, Tensor, dict[str, Tensor]], None]


@dataclass(frozen=True, eq=False)
class WholeTensor:
    """One tensor of the stage.

    Attributes:
        shape: the shape of the whole tensor.
        replica: the index of this rank's set of ranks, among the sets that hold the same shards.
        owner: the position of its owner among the ranks that hold its shards.
        shards: this rank's (master, grad) of the unit that the tensor is in.
        state: name -> state tensor on the owner; empty on other ranks.
    """

    name: str
    shape: tuple[int, ...]
    replica: int
    owner: int
    shards: tuple[Tensor, Tensor]
    state: dict[str, Tensor]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class _Round:
    """One tensor of each owner, so that all owners work at the same time.

    Args:
        shards: by position in the group: tensor -> the elements that the rank holds.
        replicas: tensor -> the positions of ranks whose elements an earlier rank holds too.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        position: int,
        tensors: Sequence[WholeTensor],
        shards: Sequence[Mapping[str, Sequence[Held]]],
        replicas: Mapping[str, frozenset[int]],
    ):
        held = [{t.name: of_rank[t.name] for t in tensors if t.name in of_rank} for of_rank in shards]
        counted = [{n: h for n, h in of_rank.items() if i not in replicas[n]} for i, of_rank in enumerate(held)]
        whole = [{t.name: [Held(0, Rows(0, t.numel))] for t in tensors if t.owner == i} for i in range(len(shards))]
        self._tensors, self._own = tensors, [t for t in tensors if t.owner == position]
        memory = tensors[0].shards[0].dtype, tensors[0].shards[0].device
        self._to_owner = Transfer(group, position, counted, whole, memory, width=2)
        self._to_shards = Transfer(group, position, whole, held, memory)
        self._whole: dict[str, tuple[Tensor, Tensor]] = {}

    def start(self) -> Arriving:
        """Start to send weights and gradients to the owners."""
        self._whole = {t.name: (t.shards[0].new_empty(t.numel), t.shards[1].new_empty(t.numel)) for t in self._own}
        return self._to_owner.start({t.name: t.shards for t in self._tensors}, self._whole)

    def update(self, update: Update) -> Arriving:
        """Update the tensors that this rank owns, and start to send their weights to all ranks."""
        for t in self._own:
            weight, grad = self._whole[t.name]
            update(t.name, weight.view(t.shape), grad.view(t.shape), t.state)
        weights = {name: (weight,) for name, (weight, _) in self._whole.items()}
        self._whole = {}
        return self._to_shards.start(weights, {t.name: t.shards[:1] for t in self._tensors})


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
        self.tensors: list[WholeTensor] = []
        self._rounds: list[_Round] = []
        for axes in dict.fromkeys(layout.groups.shard_axes for layout in layouts_of(mesh.rank).values()):
            members = mesh.spec.members(mesh.rank, *axes, TENSOR_AXIS)
            units = [u for u, layout in layouts_of(mesh.rank).items() if layout.groups.shard_axes == axes]
            layouts = [{u: layouts_of(rank)[u] for u in units} for rank in members]
            group, position = mesh.group(*axes, TENSOR_AXIS), members.index(mesh.rank)
            tensors = list(self._place(position, layouts, shards, spec))
            self.tensors += tensors
            self._rounds += _rounds(group, position, tensors, layouts)

    def _place(
        self,
        position: int,
        layouts: Sequence[Mapping[str, FlatLayout]],
        shards: Mapping[str, tuple[Tensor, Tensor]],
        spec: Sequence[StateSpec],
    ) -> Iterator[WholeTensor]:
        """Assign an owner to each tensor among the ranks of a group, and yield the tensors. The largest tensor is
        assigned first, and each goes to the rank that owns the fewest elements by then.

        Args:
            layouts: by position in the group: unit -> flat layout.
        """
        tensors = [(t, unit) for unit, layout in layouts[0].items() for t in layout.tensors]
        owned, owner = [0] * len(layouts), {}
        for t, _ in sorted(tensors, key=lambda item: (-item[0].numel, item[0].name)):
            owner[t.name] = owned.index(min(owned))
            owned[owner[t.name]] += t.numel
        for t, unit in tensors:
            make = lambda s, t=t: torch.zeros(s.shape_of(t.shape), dtype=s.dtype or self.master, device=self.device)
            state = {s.name: make(s) for s in spec} if owner[t.name] == position else {}
            replica = layouts[position][unit].groups.replica
            yield WholeTensor(t.name, t.shape, replica, owner[t.name], shards[unit], state)

    def update_each(self, update: Update) -> None:
        """Call `update(name, weight, grad, state)` on the owner of each tensor. Every rank of the group calls this.

        While the owners of a round compute, the tensors of the next round are in flight to their owners. The weights of
        the previous round are in flight back to the shards.
        """
        coming = self._rounds[0].start() if self._rounds else None
        leaving = None
        for i, now in enumerate(self._rounds):
            coming.wait()
            coming = self._rounds[i + 1].start() if i + 1 < len(self._rounds) else None
            sent = now.update(update)
            if leaving is not None:
                leaving.wait()
            leaving = sent
        if leaving is not None:
            leaving.wait()


def _rounds(
    group: dist.ProcessGroup | None,
    position: int,
    tensors: Sequence[WholeTensor],
    layouts: Sequence[Mapping[str, FlatLayout]],
) -> Iterator[_Round]:
    """Yield rounds in which each owner has at most one tensor. Its largest tensors come first."""
    shards: list[dict[str, list[Held]]] = []
    replicas: dict[str, set[int]] = {t.name: set() for t in tensors}
    for i, of_rank in enumerate(layouts):
        shards.append({})
        for layout in of_rank.values():
            for t, held in layout.held(*layout.own):
                shards[-1].setdefault(t.name, []).append(held)
                if t.tp_replica:
                    replicas[t.name].add(i)
    queues: list[list[WholeTensor]] = [[] for _ in layouts]
    for t in sorted(tensors, key=lambda t: (-t.numel, t.name)):
        queues[t.owner].append(t)
    frozen = {name: frozenset(positions) for name, positions in replicas.items()}
    for i in range(max(map(len, queues), default=0)):
        yield _Round(group, position, [queue[i] for queue in queues if i < len(queue)], shards, frozen)
