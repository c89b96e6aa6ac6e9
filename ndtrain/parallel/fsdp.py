"""fsdp (and cp): each unit's parameters are one flat buffer, split evenly over the ranks that its layout names
(`UnitGroups`).

With N local parameters, n ranks that split them, c bytes of compute precision and 4 bytes of master precision, a rank
holds

| zero | parameters  | gradients | master + moments |
|------|-------------|-----------|------------------|
| 1    | N c         | 4 N       | 12 N / n         |
| 2    | N c         | 4 N / n   | 12 N / n         |
| 3    | one or two units while they compute | 4 N / n | 12 N / n |

Where compute and master precision are one dtype and parameters stay resident (zero 1 and 2, or n = 1), the rank's
shard of the compute copy *is* the master: 4 N / n less. With moments in bf16 (`optim.state_dtype`) the last column is
8 N / n. With `optim.offload` it lies in host memory, and a rank's own weights stay on the device in compute precision:
c N / n where zero is 3 and n > 1, else they are part of the parameters.

The idea of sharding all state is ZeRO's (Rajbhandari et al., 2020, arXiv:1910.02054).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ndtrain.distributed.collectives import Group, Pending, all_gather, reduce_scatter
from ndtrain.distributed.mesh import Mesh
from ndtrain.distributed.sharding import FlatLayout, UnitGroups
from ndtrain.optim import StateSpec
from ndtrain.parallel.dp import ReplicaReducer
from ndtrain.parallel.grad_accumulator import FusedWeights, GradAccumulator
from ndtrain.parallel.pp import TiedReducer
from ndtrain.parallel.tp import TPReplicaReducer
from ndtrain.parallel.whole_tensors import WholeTensors


@dataclass
class Unit:
    """One unit's buffers on this rank. Parameters are views of `full`, their `.grad` views of `full_grad`.

    Attributes:
        group: the ranks that the flat buffer is split over.
        replicas: sums its gradient over the ranks that hold the same shard.
        residency: when its weights and gradient are whole on this rank.
        fused_weights: names of matrices -> these matrices as one fused weight.
        accumulated: the weights whose gradients matmuls accumulate: fused weights, and the matrices that are in none.
        full: all local elements in compute precision; its storage is empty while the unit is resharded.
        master, grad, ema: this rank's shard in master precision; ema: None unless asked for.
        state: the optimizer's state tensors of the shard, by name.
        gather_source: this rank's elements as they are gathered: the master, or where that is offloaded a copy on the
            device.
        grad_at: the buffer that `grad` is a slice of, and where.
        ready: whether `full` holds the current weights.
        accumulating: whether `grad` already holds earlier microbatches of this step.
    """

    name: str
    layout: FlatLayout
    group: Group
    replicas: ReplicaReducer
    residency: "Residency"
    parameters: dict[str, nn.Parameter]
    fused_weights: dict[tuple[str, ...], FusedWeights]
    full: Tensor
    master: Tensor
    gather_source: Tensor
    state: dict[str, Tensor]
    grad: Tensor
    full_grad: Tensor | None
    grad_at: tuple[Tensor, int]
    ready: bool = False
    ema: Tensor | None = None
    gather: Pending | None = None
    accumulating: bool = False
    accumulated: list[nn.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        fused_names = {name for names in self.fused_weights for name in names}
        alone = [p for name, p in self.parameters.items() if p.ndim > 1 and name not in fused_names]
        self.accumulated = [*(s.weight for s in self.fused_weights.values()), *alone]

    def buffer(self, name: str) -> Tensor:
        """This rank's shard of the master weights, the average or a state tensor, by name."""
        return self.state[name] if name in self.state else getattr(self, name)

    def with_gradient(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters and fused weights, whose `.grad` is a view of `full_grad`, with the name of their first
        tensor."""
        yield from self.parameters.items()
        yield from ((names[0], s.weight) for names, s in self.fused_weights.items())


@dataclass(frozen=True)
class Residency:
    """When a unit is whole on a rank.

    Attributes:
        reshard_after_forward: whether its weights are unsharded for each use, and resharded after it (zero 3).
        holds_full_grad: whether the unsharded gradient is kept over the whole step (zero 1).
        shares_master: whether the rank's part of the unsharded weights is the master copy.
    """

    reshard_after_forward: bool
    holds_full_grad: bool
    shares_master: bool

    @classmethod
    def of(cls, plan: "StatePlan", shards: int) -> "Residency":
        """Of a unit that is split in `shards` parts."""
        one_copy = shards == 1 and (plan.compute == plan.master or plan.offload)
        reshard = plan.zero == 3 and not one_copy
        return cls(
            reshard,
            holds_full_grad=plan.zero == 1 or shards == 1,
            shares_master=not reshard and plan.compute == plan.master and not plan.offload,
        )


@dataclass(frozen=True)
class StatePlan:
    """Which state a rank holds, in which precision and where.

    Attributes:
        zero: 1, 2 or 3, as above.
        compute, master: dtypes.
        spec: the optimizer's state.
        sharded_spec: whether the state lies in the shards; otherwise the owners of whole tensors hold it
            (`whole_tensors.py`).
        ema: whether there is an average of the weights.
        offload: whether master, optimizer state and average lie in host memory.
    """

    zero: int
    compute: torch.dtype
    master: torch.dtype
    spec: tuple[StateSpec, ...]
    sharded_spec: bool = True
    ema: bool = False
    offload: bool = False


class ShardedUnits:
    """All units of a rank's stages. Holds their state; gathers, reshards and reduces it.

    Args:
        layouts: unit name -> flat layout, in model order. Each names the groups of its unit, which exist already.
        tp_replicas, ties: sum gradients over the replicas that single tensors have along tp, and over the two stages
            that hold tied embeddings.
        accumulator: accumulates the gradients of matrices.
        by_autograd: the units whose gradients of matrices autograd accumulates instead.
        fused_names: names of matrices that are fused where they are neighbours in the flat buffer.

    Attributes:
        before_update: called before an update changes weights or state.
        whole_tensors: set for an optimizer that needs whole tensors, else None.
    """

    def __init__(
        self,
        layouts: Mapping[str, FlatLayout],
        mesh: Mesh,
        plan: StatePlan,
        tp_replicas: TPReplicaReducer,
        ties: TiedReducer,
        accumulator: GradAccumulator,
        by_autograd: frozenset[str],
        fused_names: Sequence[tuple[str, ...]],
    ):
        self.plan, self.device = plan, mesh.device
        self.tp_replicas, self.ties = tp_replicas, ties
        self.accumulator, self.by_autograd = accumulator, by_autograd
        self.compute, self.master, self.offload = plan.compute, plan.master, plan.offload
        self.state_device = torch.device("cpu") if plan.offload else mesh.device
        self.before_update: list[Callable[[], None]] = []
        self.whole_tensors: WholeTensors | None = None
        self._reductions: list[tuple[Unit, Tensor, Pending, bool]] = []
        self._replicas: dict[tuple[str, ...], ReplicaReducer] = {}
        by_name: dict[str, Unit] = {}
        for groups in dict.fromkeys(layout.groups for layout in layouts.values()):
            alike = {name: layout for name, layout in layouts.items() if layout.groups == groups}
            by_name |= self._allocate(alike, groups, mesh, fused_names)
        self.units = {name: by_name[name] for name in layouts}

    @property
    def fully_resident(self) -> bool:
        """Whether nothing is gathered, resharded or reduced while a step runs."""
        return all(u.group is None and u.replicas.alone for u in self.units.values()) and not self.reshards

    @property
    def reshards(self) -> bool:
        """Whether there are units whose weights are unsharded for each use."""
        return any(u.residency.reshard_after_forward for u in self.units.values())

    # ------------------------------------------------------------------------------------------------------- state

    def _allocate(
        self,
        layouts: Mapping[str, FlatLayout],
        groups: UnitGroups,
        mesh: Mesh,
        fused_names: Sequence[tuple[str, ...]],
    ) -> dict[str, Unit]:
        """One buffer of each kind for all units of the same groups, in model order, so that the optimizer sees few
        tensors and neighbouring gradients travel in one message."""
        plan, residency = self.plan, Residency.of(self.plan, groups.shards)
        resident, holds_full_grad = not residency.reshard_after_forward, residency.holds_full_grad
        group = mesh.group(*groups.shard_axes)
        if groups.replica_axes not in self._replicas:
            self._replicas[groups.replica_axes] = ReplicaReducer(mesh.group(*groups.replica_axes))
        local = sum(f.numel for f in layouts.values())
        shard = local // groups.shards
        empty = lambda n, dtype: torch.zeros(n, dtype=dtype, device=self.device)
        on_host = lambda dtype: torch.zeros(shard, dtype=dtype, device=self.state_device)
        full = empty(local, plan.compute) if resident else None
        master = None if residency.shares_master else on_host(plan.master)
        source = empty(shard, plan.compute) if plan.offload and not resident else master
        grad = empty(local if holds_full_grad else shard, plan.master)
        state = {s.name: on_host(s.dtype or plan.master) for s in plan.spec if plan.sharded_spec}
        average = on_host(plan.master) if plan.ema else None
        units, at, shard_at = {}, 0, 0
        for name, layout in layouts.items():
            start, stop = layout.own
            size = stop - start
            unit_full = full[at : at + layout.numel] if resident else empty(layout.numel, plan.compute)
            grad_start = at + start if holds_full_grad else shard_at
            span = slice(shard_at, shard_at + size)
            own = unit_full.data[start:stop] if resident else None
            own_is_source = residency.shares_master or (plan.offload and resident)
            fused = {} if name in self.by_autograd else _fused_weights(unit_full, layout, fused_names, plan.master)
            units[name] = unit = Unit(
                name=name,
                layout=layout,
                group=group,
                replicas=self._replicas[groups.replica_axes],
                residency=residency,
                parameters=_parameters(unit_full, layout, plan.master),
                fused_weights=fused,
                full=unit_full.data,  # its own version counter hides gathers from autograd's check for in-place changes
                master=own if residency.shares_master else master[span],
                gather_source=own if own_is_source else source[span],
                state={name: x[span] for name, x in state.items()},
                grad=grad[grad_start : grad_start + size],
                full_grad=grad[at : at + layout.numel] if holds_full_grad else None,
                grad_at=(grad, grad_start),
                ema=None if average is None else average[span],
            )
            if holds_full_grad and name not in self.by_autograd:
                self._attach(unit)
            if not resident:
                _resize(unit.full, 0)
            at, shard_at = at + layout.numel, shard_at + size
        return units

    def state_bytes(self) -> int:
        """Bytes of parameters, gradients, master weights and optimizer state this rank holds now. Shared storage counts
        once, offloaded state not at all."""
        storages = {}
        for unit in self.units.values():
            state = () if self.offload else (unit.master, *unit.state.values(), unit.ema)
            for x in (unit.full, unit.gather_source, unit.grad, unit.full_grad, *state):
                if x is not None:
                    storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return sum(storages.values())

    # -------------------------------------------------------------------------------------------------- parameters

    def prefetch(self, name: str) -> None:
        """Starts to gather the unit's weights, unless they are unsharded or being gathered."""
        unit = self.units[name]
        if unit.ready or unit.gather:
            return
        if unit.residency.reshard_after_forward:
            _resize(unit.full, unit.layout.numel)
        unit.gather = all_gather(unit.full, unit.gather_source, unit.group)

    def unshard(self, name: str) -> None:
        """Waits until the unit's weights are unsharded on this rank."""
        unit = self.units[name]
        if unit.ready:
            return
        self.prefetch(name)
        unit.gather.wait()
        unit.gather, unit.ready = None, True

    def reshard(self, name: str) -> None:
        """Frees the unsharded weights where zero is 3: the unit is not needed for now."""
        unit = self.units[name]
        if unit.residency.reshard_after_forward and unit.ready:
            _resize(unit.full, 0)
            unit.ready = False

    def weights_changed(self, published: bool = False) -> None:
        """Marks the gathered weights as stale, after an optimizer step or a load.

        Args:
            published: whether the offloaded weights are already copied to the device.
        """
        for unit in self.units.values():
            if self.offload and not published:
                unit.gather_source.copy_(unit.master)
            self.reshard(unit.name)
            unit.ready = False

    def start_average(self) -> None:
        """Sets the average of the weights, if there is one, to the weights."""
        for unit in self.units.values():
            if unit.ema is not None:
                unit.ema.copy_(unit.master)

    # --------------------------------------------------------------------------------------------------- gradients

    def begin_step(self) -> None:
        """Clears the gradients of the previous step."""
        for unit in self.units.values():
            unit.accumulating = False
            if unit.residency.holds_full_grad:
                self._start_gradient(unit)

    def open_gradients(self, name: str) -> None:
        """Backward through the unit may accumulate into `.grad` from now on."""
        unit = self.units[name]
        if unit.full_grad is None:
            unit.full_grad = torch.empty(unit.layout.numel, dtype=self.master, device=self.device)
            self._attach(unit)
            self._start_gradient(unit)
        elif name in self.by_autograd:
            self._attach(unit)

    def close_gradients(self, name: str) -> None:
        """Ends the backward through the unit. The compiler refuses parameters that have a gradient of another
        precision, so the parameters of compiled units have a gradient only during backward."""
        if name in self.by_autograd:
            for p in self.units[name].parameters.values():
                p.grad = None

    def deferring(self, later: list[Callable[[], None]] | None) -> AbstractContextManager:
        """Inside the context the gradients of matrices are deferred: their computation is appended to `later`. None:
        they are not deferred."""
        return nullcontext() if later is None else self.accumulator.deferred(later)

    def reduce(self, name: str, final: bool) -> None:
        """The unit's gradient of this microbatch is complete on this rank; `final`: it was the step's last.

        zero=1 sums over the ranks once, after the last microbatch; zero=2 and 3 after every one.
        """
        unit = self.units[name]
        if unit.residency.holds_full_grad and not final:
            return
        self.accumulator.close(unit.accumulated)
        full, work = unit.full_grad, reduce_scatter(unit.full_grad, unit.group)
        if not unit.residency.holds_full_grad:
            unit.full_grad = None  # only the reduction still reads it: the unit's next backward allocates another
            for _, p in unit.with_gradient():
                p.grad = None
        self._wait_for_reductions()  # waits for the previous reduction, so that at most one is in progress
        self._reductions.append((unit, full, work, final))

    def finish_step(self) -> None:
        """Finishes the gradient sums: over microbatches, the ranks of each unit's groups, tp replicas, and the stages
        that hold tied embeddings."""
        self._wait_for_reductions()
        for replicas in self._replicas.values():
            replicas.finish()
        for unit in self.units.values():
            self.tp_replicas.add(unit.layout, unit.layout.own[0], unit.grad)
        self.tp_replicas.finish()
        for unit in self.units.values():
            if any(t.pp_replicas > 1 for t in unit.layout.tensors):
                self.ties.add(unit.grad)

    def _wait_for_reductions(self) -> None:
        for unit, full, work, final in self._reductions:
            work.wait()
            if not unit.residency.holds_full_grad:
                own = full[slice(*unit.layout.own)]
                unit.grad.add_(own) if unit.accumulating else unit.grad.copy_(own)
                unit.accumulating = True
            if final:
                buffer, start = unit.grad_at
                unit.replicas.add(buffer, start, start + unit.grad.numel())
        self._reductions.clear()

    def _start_gradient(self, unit: Unit) -> None:
        """Zeroes the gradients of vectors, which autograd adds to, and the padding behind them. Gradients of matrices
        are overwritten by their first matmul."""
        if unit.name in self.by_autograd:
            unit.full_grad.zero_()
            return
        unit.full_grad[unit.layout.decayed :].zero_()
        self.accumulator.open(unit.accumulated)

    def _attach(self, unit: Unit) -> None:
        for name, p in unit.with_gradient():
            at = unit.layout.offsets[name]
            p.grad = unit.full_grad[at : at + p.numel()].view(p.shape)


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


def _resize(x: Tensor, numel: int) -> None:
    x.untyped_storage().resize_(numel * x.element_size())
