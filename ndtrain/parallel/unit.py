"""A unit's buffers on this rank: which ones exist, their size, their precision and their device."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ndtrain.device.kind import host_of
from ndtrain.mesh.collectives import Group, Pending
from ndtrain.mesh.mesh import Mesh
from ndtrain.mesh.sharding import FlatLayout, Tensors, UnitGroups
from ndtrain.optim import StateSpec, TensorSlice
from ndtrain.parallel.linear.accumulator import FusedWeights

REDUCTIONS = "reductions"  # the lane of zero 3's reduce-scatters, apart from its gathers


@dataclass(frozen=True)
class StatePlan:
    """The state that a rank holds, with its precision and its device.

    Attributes:
        zero: 1, 2 or 3, as in `fsdp.py`.
        compute, master: dtypes of the weights in compute precision and of the master weights.
        spec: the optimizer's state.
        whole: the tensors whose updates are computed from whole gradients (`whole_tensors.py`); None: there are none.
        sent: the dtype of these gradients on their way to the owners of the tensors.
        ema: True if there is an average of the weights.
        outer: True if there are outer weights and their momentum (`islands.sync=diloco`), in host memory.
        offload: True if master, optimizer state and average are in host memory.
    """

    zero: int
    compute: torch.dtype
    master: torch.dtype
    spec: tuple[StateSpec, ...]
    whole: Tensors | None = None
    sent: torch.dtype = torch.float32
    ema: bool = False
    outer: bool = False
    offload: bool = False

    @property
    def sharded(self) -> Iterator[StateSpec]:
        """The optimizer's state that is sharded like the weights. The owners of whole tensors hold the rest."""
        return (spec for spec in self.spec if spec.shape is None)


@dataclass(frozen=True)
class Residency:
    """How long a rank holds the whole weights and the whole gradient of a unit.

    Attributes:
        reshard_after_forward: True if the weights are unsharded for each use, and resharded after it (zero 3).
        holds_full_grad: True if the unsharded gradient is kept over the whole step (zero 1, or a unit that is not
            split).
        shares_master: True if the rank's part of the unsharded weights is the master copy.
    """

    reshard_after_forward: bool
    holds_full_grad: bool
    shares_master: bool

    @classmethod
    def of(cls, plan: StatePlan, shards: int) -> "Residency":
        """Return the residency of a unit that is split into `shards` parts."""
        one_copy = shards == 1 and (plan.compute == plan.master or plan.offload)
        reshard = plan.zero == 3 and not one_copy
        return cls(
            reshard,
            holds_full_grad=plan.zero == 1 or shards == 1,
            shares_master=not reshard and plan.compute == plan.master and not plan.offload,
        )


@dataclass
class Unit:
    """One unit's buffers on this rank. Parameters are views of `full`.

    Attributes:
        group: the ranks that the flat buffer is split over, for gathers.
        reductions: the same ranks, for reduce-scatters. Under zero 3 on NCCL it is a second group. A gather that is
            needed soon then does not wait for a reduce-scatter.
        residency: how long this rank holds the whole weights and gradient.
        fused_weights: names of matrices -> these matrices as one fused weight.
        with_gradient: the fused weights, under the name of their first matrix, and the parameters that are in no fused
            weight. Their `.grad` are views of `full_grad`.
        full: all local elements in compute precision; its storage is empty while the unit is resharded.
        master, grad, ema: this rank's shard in master precision; ema: None without an average.
        outer, outer_momentum: the shard's outer weights and their momentum; None without `islands.sync=diloco`.
        state: the optimizer's state tensors by name. Each has the elements of the shard that `held` gives.
        gather_source: this rank's elements that gathers send: the master, or if it is offloaded a copy on the device.
        full_grad: the unsharded gradient; None while this rank does not hold it.
        held: name of a state -> the elements of the shard that have it.
        grad_at: the buffer that `grad` is a slice of, and the first element of the slice.
    """

    name: str
    layout: FlatLayout
    group: Group
    reductions: Group
    residency: Residency
    parameters: dict[str, nn.Parameter]
    fused_weights: dict[tuple[str, ...], FusedWeights]
    full: Tensor
    master: Tensor
    gather_source: Tensor
    state: dict[str, Tensor]
    held: dict[str, slice]
    grad: Tensor
    full_grad: Tensor | None
    grad_at: tuple[Tensor, int]
    ema: Tensor | None = None
    outer: Tensor | None = None
    outer_momentum: Tensor | None = None
    gather: Pending | None = None
    with_gradient: list[tuple[str, nn.Parameter]] = field(init=False)

    def __post_init__(self) -> None:
        fused_names = {name for names in self.fused_weights for name in names}
        fused = [(names[0], s.weight) for names, s in self.fused_weights.items()]
        self.with_gradient = [*fused, *((n, p) for n, p in self.parameters.items() if n not in fused_names)]

    @property
    def accumulated(self) -> list[nn.Parameter]:
        """The weights whose gradients are accumulated by matmuls. The gradients of vectors are added by autograd."""
        return [p for _, p in self.with_gradient if p.ndim > 1]

    def buffer(self, name: str) -> Tensor:
        """Return this rank's shard of the weights, of a copy of them or of a state tensor, by name."""
        return self.state[name] if name in self.state else getattr(self, name)

    def part(self, name: str, at: int, numel: int) -> Tensor:
        """Return `numel` elements of a buffer, from element `at` of the shard on."""
        at -= self.held[name].start if name in self.held else 0
        return self.buffer(name)[at : at + numel]


def allocate(
    layouts: Mapping[str, FlatLayout],
    plan: StatePlan,
    mesh: Mesh,
    fused_names: Mapping[str, Sequence[tuple[str, ...]]],
) -> dict[str, Unit]:
    """Allocate units of the same groups, in model order. They share one buffer of each kind. The optimizer then sees
    few tensors, and neighbouring gradients are summed in one message. Everything begins as zeros.

    Args:
        layouts: unit name -> its flat layout.
        fused_names: unit name -> names of matrices that are fused if they are neighbours in the flat buffer.
    """
    groups = next(iter(layouts.values())).groups
    residency = Residency.of(plan, groups.shards)
    group, reductions = shard_groups(plan, mesh, groups)
    hidden = sum(hidden_in_shard(f) for f in layouts.values())
    buffers = _Buffers.of(plan, groups.shards, sum(f.numel for f in layouts.values()), hidden, mesh.device)
    units, at, shard_at, state_at = {}, 0, 0, dict.fromkeys(buffers.state, 0)
    for name, layout in layouts.items():
        start, stop = layout.own
        span = slice(shard_at, shard_at + stop - start)
        resident = buffers.full is not None
        full = buffers.full[at : at + layout.numel] if resident else buffers.empty(layout.numel)
        own = full.data[start:stop] if resident else None
        own_is_source = residency.shares_master or (plan.offload and resident)
        grad_start = at + start if residency.holds_full_grad else shard_at
        held = {s.name: slice(*(i - start for i in layout.own_of(s.tensors))) for s in plan.sharded}
        state = {}
        for kind, of in held.items():
            state[kind] = buffers.state[kind][state_at[kind] : state_at[kind] + of.stop - of.start]
            state_at[kind] += of.stop - of.start
        units[name] = Unit(
            name=name,
            layout=layout,
            group=group,
            reductions=reductions,
            residency=residency,
            parameters=_parameters(full, layout, plan.master),
            fused_weights=_fused_weights(full, layout, fused_names[name], plan.master),
            full=full.data,  # its own version counter hides gathers from autograd's check for in-place changes
            master=own if residency.shares_master else buffers.master[span],
            gather_source=own if own_is_source else buffers.source[span],
            state=state,
            held=held,
            grad=buffers.grad[grad_start : grad_start + stop - start],
            full_grad=buffers.grad[at : at + layout.numel] if residency.holds_full_grad else None,
            grad_at=(buffers.grad, grad_start),
            ema=None if buffers.ema is None else buffers.ema[span],
            outer=None if buffers.outer is None else buffers.outer[span],
            outer_momentum=None if buffers.outer_momentum is None else buffers.outer_momentum[span],
        )
        if not resident:
            resize(units[name].full, 0)
        at, shard_at = at + layout.numel, span.stop
    return units


def shard_groups(plan: StatePlan, mesh: Mesh, groups: UnitGroups) -> tuple[Group, Group]:
    """Return the process groups of a unit's gathers and of its reduce-scatters. Every rank must call this in the same
    order."""
    lane = REDUCTIONS if Residency.of(plan, groups.shards).reshard_after_forward else ""
    return mesh.group(*groups.shard_axes), mesh.group(*groups.shard_axes, lane=lane)


@dataclass(frozen=True)
class _Buffers:
    """The buffers that units of the same groups share.

    Attributes:
        full: all local elements, if they stay unsharded.
        master, source, ema, outer, outer_momentum, state: the rank's shards; of a state, the elements that have it.
            Gathers send `source`, unless they send a part of `full`.
        grad: the gradient of all local elements, or of the rank's shards.
        empty: makes the buffer of one unit with this number of elements, if units do not stay unsharded.
    """

    full: Tensor | None
    master: Tensor | None
    source: Tensor | None
    grad: Tensor
    state: dict[str, Tensor]
    ema: Tensor | None
    outer: Tensor | None
    outer_momentum: Tensor | None
    empty: Callable[[int], Tensor]

    @classmethod
    def of(cls, plan: StatePlan, shards: int, local: int, hidden: int, device: torch.device) -> "_Buffers":
        """Allocate the buffers for `local` elements of units that are split into `shards` parts.

        Args:
            hidden: the number of the rank's elements that belong to hidden matrices.
        """
        residency, shard = Residency.of(plan, shards), local // shards
        numel = {Tensors.ALL: shard, Tensors.HIDDEN: hidden, Tensors.OTHER: shard - hidden}
        resident = not residency.reshard_after_forward
        zeros = lambda n, dtype: torch.zeros(n, dtype=dtype, device=device)
        on_host = lambda dtype: torch.zeros(shard, dtype=dtype, device=host_of(device))
        where = host_of(device) if plan.offload else device
        stored = lambda dtype, n=shard: torch.zeros(n, dtype=dtype, device=where)
        master = None if residency.shares_master else stored(plan.master)
        return cls(
            full=zeros(local, plan.compute) if resident else None,
            master=master,
            source=zeros(shard, plan.compute) if plan.offload and not resident else master,
            grad=zeros(local if residency.holds_full_grad else shard, plan.master),
            state={s.name: stored(s.dtype or plan.master, numel[s.tensors]) for s in plan.sharded},
            ema=stored(plan.master) if plan.ema else None,
            outer=on_host(plan.master) if plan.outer else None,
            outer_momentum=on_host(plan.master) if plan.outer else None,
            empty=lambda n: zeros(n, plan.compute),
        )


class StateBytes(NamedTuple):
    """Bytes that a rank holds of some units between steps.

    Attributes:
        weights: the unsharded weights, and the shard that gathers send if it is a tensor of its own.
        gradient: the unsharded gradient, or the shard's gradient.
        sharded: the shard's master weights, optimizer state and average.
        offloaded: True if the `sharded` bytes are in host memory.
        outer: the shard's outer weights and their momentum, which always are.
    """

    weights: int
    gradient: int
    sharded: int
    offloaded: bool
    outer: int = 0

    @property
    def on_device(self) -> int:
        return self.weights + self.gradient + (0 if self.offloaded else self.sharded)

    @property
    def on_host(self) -> int:
        return self.outer + (self.sharded if self.offloaded else 0)


def hidden_in_shard(layout: FlatLayout) -> int:
    """Return the number of elements of this rank's shard that belong to hidden matrices."""
    start, stop = layout.own_of(Tensors.HIDDEN)
    return stop - start


@lru_cache(maxsize=4096)
def state_bytes(plan: StatePlan, shards: int, numel: int, hidden: int = 0) -> StateBytes:
    """Count the bytes of units by allocating their buffers on the meta device.

    Args:
        shards: the number of parts that the units are split into.
        numel: the number of elements before the split. They are padded to `shards` equal parts.
        hidden: the number of the rank's elements, after the split, that belong to hidden matrices.
    """
    buffers = _Buffers.of(plan, shards, -(-numel // shards) * shards, hidden, torch.device("meta"))
    count = lambda *held: sum(x.untyped_storage().nbytes() for x in held if x is not None)
    source = None if buffers.source is buffers.master else buffers.source
    return StateBytes(
        weights=count(buffers.full, source),
        gradient=count(buffers.grad),
        sharded=count(buffers.master, *buffers.state.values(), buffers.ema),
        offloaded=plan.offload,
        outer=count(buffers.outer, buffers.outer_momentum),
    )


def _parameters(full: Tensor, layout: FlatLayout, grad_dtype: torch.dtype) -> dict[str, nn.Parameter]:
    return {t.name: _parameter(full, layout.offsets[t.name], t.local_shape, grad_dtype) for t in layout.tensors}


def _fused_weights(
    full: Tensor, layout: FlatLayout, fused_names: Sequence[tuple[str, ...]], grad_dtype: torch.dtype
) -> dict[tuple[str, ...], FusedWeights]:
    shapes = {t.name: t.local_shape for t in layout.tensors}
    fused_weights = {}
    for names in fused_names:
        if names[0] in shapes and layout.can_fuse(names):
            rows = tuple(shapes[name][0] for name in names)
            whole = _parameter(full, layout.offsets[names[0]], (sum(rows), shapes[names[0]][1]), grad_dtype)
            fused_weights[names] = FusedWeights(whole, rows)
    return fused_weights


def _parameter(full: Tensor, at: int, shape: tuple[int, ...], grad_dtype: torch.dtype) -> nn.Parameter:
    p = nn.Parameter(full[at : at + math.prod(shape)].view(shape))
    if grad_dtype != p.dtype:
        p.grad_dtype = grad_dtype
    return p


def resize(x: Tensor, numel: int) -> None:
    """Allocate the storage of `numel` elements, or free it (0)."""
    x.untyped_storage().resize_(numel * x.element_size())


def tensor_slices(unit: Unit, start: int, stop: int) -> tuple[TensorSlice, ...]:
    """Return the tensors of the flat buffer's elements [start, stop)."""
    spans = unit.layout.tensors_in(start, stop)
    return tuple(TensorSlice(slice(a - start, b - start), t, a - unit.layout.offsets[t.name]) for t, a, b in spans)
