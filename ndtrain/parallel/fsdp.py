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

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ndtrain.distributed.collectives import Pending, all_gather, reduce_scatter, reduces_in_place
from ndtrain.distributed.mesh import Mesh
from ndtrain.distributed.sharding import FlatLayout, UnitGroups
from ndtrain.model.device_kind import host_of
from ndtrain.parallel import compiled_linear
from ndtrain.parallel.allocations import storage_id
from ndtrain.parallel.dp import ReplicaReducer
from ndtrain.parallel.grad_accumulator import GradAccumulator
from ndtrain.parallel.pp import TiedReducer
from ndtrain.parallel.tp import TPReplicaReducer
from ndtrain.parallel.unit import StatePlan, Unit, allocate, resize
from ndtrain.parallel.whole_tensors import WholeTensors


class ShardedUnits:
    """All units of a rank's stages. Holds their state; gathers, reshards and reduces it.

    Args:
        layouts: unit name -> flat layout, in model order. Each names the groups of its unit, which exist already.
        tp_replicas, ties: sum gradients over the replicas that single tensors have along tp, and over the two stages
            that hold tied embeddings.
        accumulator: accumulates the gradients of matrices.
        compiled: the units whose blocks are compiled.
        in_graph: whether their matmuls are part of the graphs.
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
        compiled: frozenset[str],
        in_graph: bool,
        fused_names: Sequence[tuple[str, ...]],
    ):
        self.plan, self.device = plan, mesh.device
        self.tp_replicas, self.ties = tp_replicas, ties
        self.accumulator, self.compiled, self.in_graph = accumulator, compiled, in_graph
        self.compute, self.master, self.offload = plan.compute, plan.master, plan.offload
        self.state_device = host_of(mesh.device) if plan.offload else mesh.device
        self.before_update: list[Callable[[], None]] = []
        self.whole_tensors: WholeTensors | None = None
        self._reductions: list[tuple[Unit, Tensor, Pending, bool]] = []
        self._replicas: dict[tuple[str, ...], ReplicaReducer] = {}
        by_name: dict[str, Unit] = {}
        for groups in dict.fromkeys(layout.groups for layout in layouts.values()):
            alike = {name: layout for name, layout in layouts.items() if layout.groups == groups}
            fused = {name: () if in_graph and name in compiled else fused_names for name in alike}
            by_name |= allocate(alike, plan, mesh, self._reducer(groups, mesh), fused)
        self.units = {name: by_name[name] for name in layouts}
        for unit in self.units.values():
            if in_graph and unit.name in compiled:
                compiled_linear.register(unit.accumulated, accumulator)
            if unit.name not in compiled and unit.residency.holds_full_grad:
                self._attach(unit)

    def _reducer(self, groups: UnitGroups, mesh: Mesh) -> ReplicaReducer:
        """One for each set of axes, so that neighbouring gradients travel in one message."""
        axes = groups.replica_axes
        if axes not in self._replicas:
            self._replicas[axes] = ReplicaReducer(mesh.group(*axes))
        return self._replicas[axes]

    @property
    def fully_resident(self) -> bool:
        """Whether nothing is gathered, resharded or reduced while a step runs."""
        return all(u.group is None and u.replicas.alone for u in self.units.values()) and not self.reshards

    @property
    def reshards(self) -> bool:
        """Whether there are units whose weights are unsharded for each use."""
        return any(u.residency.reshard_after_forward for u in self.units.values())

    # ------------------------------------------------------------------------------------------------------- state

    def state_bytes(self) -> int:
        """Bytes of parameters, gradients, master weights and optimizer state this rank holds now. Shared storage counts
        once, offloaded state not at all."""
        storages = {}
        for unit in self.units.values():
            state = () if self.offload else (unit.master, *unit.state.values(), unit.ema)
            for x in (unit.full, unit.gather_source, unit.grad, unit.full_grad, *state):
                if x is not None:
                    storages[storage_id(x)] = x.untyped_storage().nbytes()
        return sum(storages.values())

    # -------------------------------------------------------------------------------------------------- parameters

    def prefetch(self, name: str) -> None:
        """Starts to gather the unit's weights, unless they are unsharded or being gathered."""
        unit = self.units[name]
        if unit.ready or unit.gather:
            return
        if unit.residency.reshard_after_forward:
            resize(unit.full, unit.layout.numel)
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
            resize(unit.full, 0)
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
        elif name in self.compiled:
            self._attach(unit)

    def close_gradients(self, name: str) -> None:
        """Ends the backward through the unit. The compiler refuses parameters that have a gradient of another
        precision, so the parameters of compiled units have a gradient only during backward."""
        if name in self.compiled:
            for _, p in self.units[name].with_gradient:
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
        self._close(unit)
        full, work = unit.full_grad, reduce_scatter(unit.full_grad, unit.reductions)
        if not unit.residency.holds_full_grad:
            unit.full_grad = None  # only the reduction still reads it: the unit's next backward allocates another
            for _, p in unit.with_gradient:
                p.grad = None
        if not (unit.residency.holds_full_grad and unit.replicas.alone and reduces_in_place(full)):
            self._wait_for_reductions()  # at most one that holds memory or that replicas sum next is in progress
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
        unit.full_grad[unit.layout.matrix_numel :].zero_()
        self.accumulator.open(unit.accumulated)

    def _close(self, unit: Unit) -> None:
        """The gradients of matrices that no backward has reached become zero."""
        if unit.name in self.compiled:
            self._attach(unit)
        self.accumulator.close(unit.accumulated)
        self.close_gradients(unit.name)

    def _attach(self, unit: Unit) -> None:
        for name, p in unit.with_gradient:
            at = unit.layout.offsets[name]
            p.grad = unit.full_grad[at : at + p.numel()].view(p.shape)
