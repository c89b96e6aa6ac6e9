"""The owners of whole tensors, and the order in which they work.

Every tensor has one owner among all ranks that hold a part of it. These ranks differ along tp, and along the axes that
shard or replicate the unit of the tensor. The plan follows from the layouts, so the ranks agree without a message.
"""

import math
from collections.abc import Callable, Mapping
from heapq import heapify, heapreplace
from typing import NamedTuple

from ndtrain.mesh.mesh import MeshSpec
from ndtrain.mesh.sharding import TENSOR_AXIS, FlatLayout, TensorLayout, Tensors, UnitGroups
from ndtrain.optim.optimizer import Shape

Cost = Callable[[TensorLayout], float]

# elements of a batch of several tensors: enough for efficient products, and little memory compared with a unit
BATCH = 1 << 24


class Batch(NamedTuple):
    """Tensors of one shape that their owner updates together: several small ones, or one of any size.

    Attributes:
        rows: the number of rows of one head; 1 if the tensors are not divided into heads.
        cost: the cost of updating them.
    """

    shape: Shape
    rows: int
    names: tuple[str, ...]
    cost: float

    @property
    def numel(self) -> int:
        return len(self.names) * math.prod(self.shape)


class Round(NamedTuple):
    """At most one batch of each owner, so that all owners work at the same time.

    Attributes:
        axes: the axes of the ranks that hold parts of the tensors.
        batches: the position of an owner among these ranks -> its batch.
    """

    axes: tuple[str, ...]
    batches: dict[int, Batch]

    @property
    def numel(self) -> int:
        """The number of elements of all batches."""
        return sum(batch.numel for batch in self.batches.values())


def plan_rounds(
    spec: MeshSpec, rank: int, layouts: Mapping[str, FlatLayout], whole: Tensors, cost: Cost
) -> list[Round]:
    """Return the rounds of the ranks that hold parts of a rank's tensors.

    The most expensive tensor is assigned first, and each goes to the rank whose tensors are the cheapest by then. The
    tensors of experts are shared by fewer ranks and are assigned before the others. Ranks that hold other experts have
    the same number of tensors of each shape, so all groups of ranks have the same costs by position.

    Args:
        layouts: the rank's units.
        whole: the tensors that have an owner.
        cost: the cost of updating a tensor.
    """
    of_axes: dict[tuple[str, ...], list[TensorLayout]] = {}
    for layout in layouts.values():
        if tensors := [t for t in layout.tensors if whole.has(t.hidden)]:
            of_axes.setdefault(holder_axes(layout.groups), []).extend(tensors)
    rounds: list[Round] = []
    spent: list[tuple[tuple[str, ...], list[float]]] = []  # axes -> cost by position
    for axes, tensors in sorted(of_axes.items(), key=lambda item: spec.size(*item[0])):
        members = spec.members(rank, *axes)
        before = [sum(costs[spec.index(member, *at)] for at, costs in spent) for member in members]
        owner, costs = _assign(tensors, before, cost)
        spent.append((axes, [after - was for after, was in zip(costs, before, strict=True)]))
        rounds += _rounds(axes, tensors, owner, cost)
    return rounds


def holder_axes(groups: UnitGroups) -> tuple[str, ...]:
    """Return the axes of the ranks that hold parts of the tensors of a unit."""
    return *groups.shard_axes, *groups.replica_axes, TENSOR_AXIS


def _assign(tensors: list[TensorLayout], costs: list[float], cost: Cost) -> tuple[dict[str, int], list[float]]:
    """Return tensor -> position of its owner, and the costs of all owners.

    Args:
        costs: the costs by position before the assignment.
    """
    heap = [(c, i) for i, c in enumerate(costs)]
    heapify(heap)
    owner = {}
    for t in sorted(tensors, key=lambda t: (-cost(t), t.name)):
        spent, position = heap[0]
        owner[t.name] = position
        heapreplace(heap, (spent + cost(t), position))
    return owner, [spent for spent, _ in sorted(heap, key=lambda item: item[1])]


def _rounds(axes: tuple[str, ...], tensors: list[TensorLayout], owner: Mapping[str, int], cost: Cost) -> list[Round]:
    """Return rounds in which the most expensive tensors come first."""
    queues: dict[int, list[Batch]] = {}
    for t in sorted(tensors, key=lambda t: (-cost(t), t.shape, t.dims[0].width, t.name)):
        queue = queues.setdefault(owner[t.name], [])
        last = queue[-1] if queue else None
        alike = last is not None and (last.shape, last.rows) == (t.shape, t.dims[0].width)
        if last is not None and alike and last.numel + t.numel <= BATCH:
            queue[-1] = last._replace(names=(*last.names, t.name), cost=last.cost + cost(t))
        else:
            queue.append(Batch(t.shape, t.dims[0].width, (t.name,), cost(t)))
    number = max(map(len, queues.values()), default=0)
    return [Round(axes, {i: queue[k] for i, queue in queues.items() if k < len(queue)}) for k in range(number)]
