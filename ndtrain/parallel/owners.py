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


class Work(NamedTuple):
    """The work of owners.

    Attributes:
        whole: the tensors that have an owner.
        cost: the cost of updating a tensor.
        workspace: (number of tensors, their shape, `Batch.rows`) -> `Batch.workspace`.
    """

    whole: Tensors
    cost: Callable[[TensorLayout], float]
    workspace: Callable[[int, Shape, int], int]


# elements of a batch of several tensors: enough for efficient products, and little memory compared with a unit
BATCH = 1 << 24


class Batch(NamedTuple):
    """Tensors of one shape that their owner updates together: several small ones, or one of any size.

    Attributes:
        rows: the number of rows of one head; 1 if the tensors are not divided into heads.
        cost: the cost of updating them.
        workspace: bytes of memory that computing their directions needs, directions included.
    """

    shape: Shape
    rows: int
    names: tuple[str, ...]
    cost: float
    workspace: int = 0

    @property
    def numel(self) -> int:
        return len(self.names) * math.prod(self.shape)


class Round(NamedTuple):
    """At most one batch of each owner, so that all owners work at the same time.

    Attributes:
        axes: the axes of the ranks that hold parts of the tensors.
        ranks: the number of these ranks.
        replicas: the number of them that hold the same shards.
        batches: the position of an owner among these ranks -> its batch.
    """

    axes: tuple[str, ...]
    ranks: int
    replicas: int
    batches: dict[int, Batch]

    @property
    def numel(self) -> int:
        """The number of elements of all batches."""
        return sum(batch.numel for batch in self.batches.values())

    @property
    def largest(self) -> Batch:
        """The batch that needs the most memory."""
        return max(self.batches.values(), key=lambda batch: (batch.workspace, batch.numel))


def plan_rounds(spec: MeshSpec, rank: int, layouts: Mapping[str, FlatLayout], work: Work) -> list[Round]:
    """Return the rounds of the ranks that hold parts of a rank's tensors.

    The most expensive tensor is assigned first, and each goes to the rank whose tensors are the cheapest by then. The
    tensors of experts are shared by fewer ranks and are assigned before the others. Ranks that hold other experts have
    the same number of tensors of each shape, so all groups of ranks have the same costs by position.

    Args:
        layouts: the rank's units.
    """
    of_axes: dict[tuple[str, ...], list[TensorLayout]] = {}
    replicas: dict[tuple[str, ...], int] = {}
    for layout in layouts.values():
        if tensors := [t for t in layout.tensors if work.whole.has(t.hidden)]:
            axes = holder_axes(layout.groups)
            of_axes.setdefault(axes, []).extend(tensors)
            replicas[axes] = layout.groups.replicas
    rounds: list[Round] = []
    spent: list[tuple[tuple[str, ...], list[float]]] = []  # axes -> cost by position
    for axes, tensors in sorted(of_axes.items(), key=lambda item: spec.size(*item[0])):
        members = spec.members(rank, *axes)
        before = [sum(costs[spec.index(member, *at)] for at, costs in spent) for member in members]
        owner, costs = _assign(tensors, before, work.cost)
        spent.append((axes, [after - was for after, was in zip(costs, before, strict=True)]))
        batches = _batches(tensors, owner, work)
        rounds += [Round(axes, len(members), replicas[axes], of_round) for of_round in batches]
    return rounds


def holder_axes(groups: UnitGroups) -> tuple[str, ...]:
    """Return the axes of the ranks that hold parts of the tensors of a unit."""
    return *groups.shard_axes, *groups.replica_axes, TENSOR_AXIS


def _assign(
    tensors: list[TensorLayout], costs: list[float], cost: Callable[[TensorLayout], float]
) -> tuple[dict[str, int], list[float]]:
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


def _batches(tensors: list[TensorLayout], owner: Mapping[str, int], work: Work) -> list[dict[int, Batch]]:
    """Return the batches of each round by the position of their owner. The most expensive tensors come first."""
    cost = work.cost
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
    needs = lambda b: b._replace(workspace=work.workspace(len(b.names), b.shape, b.rows))
    return [{i: needs(queue[k]) for i, queue in queues.items() if k < len(queue)} for k in range(number)]
