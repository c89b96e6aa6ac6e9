"""Whole tensors for optimizers that need them: the rank that owns a tensor receives the gradient elements of all ranks,
computes the direction of the update, and sends its elements back.

The elements stay where the shards are: what a rank sends is in its shards' gradients, and what it receives replaces
them. Of ranks that hold the same shards (along dp), those with the owner's replica index send, and all receive.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ndtrain.mesh.mesh import Mesh
from ndtrain.mesh.row_map import Held, Rows
from ndtrain.mesh.sharding import TENSOR_AXIS, FlatLayout, UnitGroups
from ndtrain.mesh.transfer import Arriving, Transfer
from ndtrain.optim import WholeTensors
from ndtrain.parallel.owners import Batch, Round, holder_axes
from ndtrain.parallel.unit import StatePlan

Holding = dict[str, list[Held]]  # tensor -> the elements that a rank holds
Direction = Callable[[WholeTensors], Tensor]


@dataclass(frozen=True)
class OwnedTensor:
    """A tensor that this rank owns.

    Attributes:
        state: name -> state of another shape than the tensor's.
    """

    name: str
    state: dict[str, Tensor]


class OwnerRounds:
    """The exchanges between the shards of this rank's tensors and their owners.

    Args:
        rounds: the plan, the same on all ranks that take part in it.
        layouts_of: rank -> unit -> the flat layout of the stage as that rank holds it.
        grads: unit -> the gradient of this rank's shard.

    Attributes:
        rounds: the plan.
        owned: the tensors that this rank owns.
    """

    def __init__(
        self,
        mesh: Mesh,
        plan: StatePlan,
        rounds: Sequence[Round],
        layouts_of: Callable[[int], Mapping[str, FlatLayout]],
        grads: Mapping[str, Tensor],
    ):
        holders = {axes: _Holders(mesh, axes, layouts_of) for axes in dict.fromkeys(r.axes for r in rounds)}
        self._rounds = [_Exchange(mesh, plan, r.batches, holders[r.axes], grads) for r in rounds]
        self.rounds = rounds
        self.owned = [tensor for exchange in self._rounds for tensor in exchange.owned]

    def gather(self, number: int) -> None:
        """Start to send the gradients of a round to the owners."""
        self._rounds[number].gather()

    def await_gather(self, number: int) -> None:
        """Wait for the gradients that this rank owns in a round."""
        self._rounds[number].await_gather()

    def compute(self, number: int, direction: Direction) -> None:
        """Compute the directions of the tensors that this rank owns in a round."""
        self._rounds[number].compute(direction)

    def scatter(self, number: int) -> None:
        """Start to send the directions of a round to all shards."""
        self._rounds[number].scatter()

    def await_scatter(self, number: int) -> None:
        """Wait for the directions of a round. They replace the gradients of the shards."""
        self._rounds[number].await_scatter()


class _Holders:
    """The ranks that hold parts of the same tensors, and what each of them holds.

    Attributes:
        replica: by position: the index of the rank among the ranks with the same shards.
    """

    def __init__(self, mesh: Mesh, axes: tuple[str, ...], layouts_of: Callable[[int], Mapping[str, FlatLayout]]):
        spec, rank = mesh.spec, mesh.rank
        members = spec.members(rank, *axes)
        mine = {u: layout for u, layout in layouts_of(rank).items() if holder_axes(layout.groups) == axes}
        groups = next(iter(mine.values())).groups
        self.group, self.position = mesh.group(*axes), members.index(rank)
        self.replica = [spec.index(member, *groups.replica_axes) for member in members]
        self._units = {t.name: u for u, layout in mine.items() for t in layout.tensors}
        self._pieces = _pieces(mesh, members, groups, lambda rank: {u: layouts_of(rank)[u] for u in mine})

    def unit(self, tensor: str) -> str:
        return self._units[tensor]

    def placement(self, wanted: Mapping[str, int], once: bool = False) -> list[Holding]:
        """Return which elements of tensors the ranks hold.

        Args:
            wanted: tensor -> position of its owner.
            once: True to count each element once: of ranks with the same elements, the one that sends them.
        """
        found: list[Holding] = [{} for _ in self.replica]
        for name, owner in wanted.items():
            for piece in self._pieces[name]:
                for position in piece.positions:
                    sends = not piece.copy and self.replica[position] == self.replica[owner]
                    if sends or not once:
                        found[position].setdefault(name, []).append(piece.held)
        return found


class _Piece(NamedTuple):
    """Elements of a tensor.

    Attributes:
        positions: of the ranks that hold them.
        copy: True if a rank before them along tp holds the same elements.
    """

    positions: Sequence[int]
    held: Held
    copy: bool


def _pieces(
    mesh: Mesh, members: Sequence[int], groups: UnitGroups, layouts_of: Callable[[int], Mapping[str, FlatLayout]]
) -> dict[str, list[_Piece]]:
    """Return the pieces of each tensor that the shards of these ranks hold. Ranks that differ only along axes other
    than tp have the same layouts, and hold other parts of them."""
    spec = mesh.spec
    positions: dict[tuple[int, int], list[int]] = {}  # (coord on tp, part) -> the ranks that hold it
    for position, member in enumerate(members):
        at = spec.index(member, TENSOR_AXIS), spec.index(member, *groups.shard_axes)
        positions.setdefault(at, []).append(position)
    layouts = {tp: layouts_of(members[of[0]]) for (tp, part), of in positions.items() if part == 0}
    pieces: dict[str, list[_Piece]] = {}
    for (tp, part), of in positions.items():
        for layout in layouts[tp].values():
            for tensor, held in layout.held(*layout.bounds(part)):
                pieces.setdefault(tensor.name, []).append(_Piece(of, held, tensor.tp_replica > 0))
    return pieces


class _Exchange:
    """One round."""

    def __init__(
        self, mesh: Mesh, plan: StatePlan, batches: Mapping[int, Batch], holders: _Holders, grads: Mapping[str, Tensor]
    ):
        owner = {name: i for i, batch in batches.items() for name in batch.names}
        held = holders.placement(owner)
        counted = holders.placement(owner, once=True)
        whole: list[Holding] = [{} for _ in held]
        for i, batch in batches.items():
            numel = math.prod(batch.shape)
            whole[i] = {name: [Held(k * numel, Rows(0, numel))] for k, name in enumerate(batch.names)}
        self._memory = plan.sent, mesh.device
        self._to_owners = Transfer(holders.group, holders.position, counted, whole, self._memory)
        self._to_shards = Transfer(holders.group, holders.position, whole, held, self._memory)
        self._shards = {name: (grads[holders.unit(name)],) for name in owner}
        self._batch = batches.get(holders.position)
        self._state: dict[str, Tensor] = {}
        if self._batch is not None:
            for s in plan.spec:
                if s.shape is not None:
                    shape = len(self._batch.names), *s.shape_of(self._batch.shape)
                    self._state[s.name] = torch.zeros(shape, dtype=s.dtype or plan.master, device=mesh.device)
        names = self._batch.names if self._batch else ()
        self.owned = [OwnedTensor(name, {s: x[i] for s, x in self._state.items()}) for i, name in enumerate(names)]
        self._grads = self._directions = torch.empty(0)
        self._arriving: Arriving | None = None
        self._leaving: Arriving | None = None

    def gather(self) -> None:
        self._grads = self._empty()
        self._arriving = self._to_owners.start(self._shards, self._whole(self._grads))

    def await_gather(self) -> None:
        self._arriving.wait()
        self._arriving = None

    def compute(self, direction: Direction) -> None:
        if self._batch is not None:
            shape = len(self._batch.names), *self._batch.shape
            self._directions = direction(
                WholeTensors(self._batch.names, self._grads.view(shape), self._batch.rows, self._state)
            )
        self._grads = self._grads.new_empty(0)

    def scatter(self) -> None:
        self._leaving = self._to_shards.start(self._whole(self._directions.reshape(-1)), self._shards)

    def await_scatter(self) -> None:
        self._leaving.wait()
        self._leaving, self._directions = None, self._directions.new_empty(0)

    def _empty(self) -> Tensor:
        dtype, device = self._memory
        return torch.empty(self._batch.numel if self._batch else 0, dtype=dtype, device=device)

    def _whole(self, flat: Tensor) -> dict[str, tuple[Tensor]]:
        return dict.fromkeys(self._batch.names if self._batch else (), (flat,))
