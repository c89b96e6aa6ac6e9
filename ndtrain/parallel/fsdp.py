"""fsdp (and cp): each unit's parameters are one flat buffer, split evenly over the ranks that its layout names
(`UnitGroups`).

Let N be the number of parameters that tp and pp leave to a rank, and n the number of ranks that split them. The compute
precision has c bytes, the master precision 4. A rank then holds these bytes:

| zero | parameters  | gradients | master + moments |
|------|-------------|-----------|------------------|
| 1    | N c         | 4 N       | 12 N / n         |
| 2    | N c         | 4 N / n   | 12 N / n         |
| 3    | one or two units while they compute | 4 N / n | 12 N / n |

If compute and master precision are the same dtype and parameters stay resident (zero 1 and 2, or n = 1), the rank's
shard of the compute copy *is* the master: 4 N / n less. With moments in bf16 (`optim.state_dtype`) the last column is
8 N / n. With `optim.offload` the last column is in host memory. The device then keeps the rank's own weights in compute
precision: c N / n if zero is 3 and n > 1. Otherwise they are part of the parameters.

The idea to shard all state comes from ZeRO (Rajbhandari et al., 2020, arXiv:1910.02054).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ndtrain.device.kind import host_of
from ndtrain.mesh.collectives import Pending, all_gather, reduce_scatter
from ndtrain.mesh.mesh import Mesh
from ndtrain.mesh.sharding import FlatLayout
from ndtrain.parallel.allocations import storage_id
from ndtrain.parallel.grad_sums import ReplicaReducer, TiedReducer, TPReplicaReducer
from ndtrain.parallel.linear.accumulator import GradAccumulator, register
from ndtrain.parallel.unit import StatePlan, Unit, allocate, resize
from ndtrain.parallel.whole_tensors import OwnerRounds


class ShardedUnits:
    """All units of a rank's stages. Holds their state; gathers, reshards and reduces it.

    Args:
        layouts: unit name -> flat layout, in model order. Each layout names the groups of its unit, which exist
            already.
        tp_replicas: sums the gradients of single tensors over their replicas along tp.
        ties: sums the gradients of tied embeddings over the two stages that hold them.
        accumulator: accumulates the gradients of matrices.
        compiled: the units whose blocks are compiled.
        in_graph: True if the matmuls of compiled blocks are part of their graphs.
        fused_names: names of matrices that are fused if they are neighbours in the flat buffer.

    Attributes:
        unsharded: the units whose weights are unsharded.
        before_update: functions to call before an update changes weights or state.
        offer_unit: is called with a unit whose gradient is final, if other islands read it.
        owners: the exchanges with the owners of whole tensors; None: the optimizer needs none.
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
        self.offer_unit: Callable[[Unit], None] = lambda unit: None
        self.owners: OwnerRounds | None = None
        self.unsharded: set[str] = set()
        self._reductions: dict[str, tuple[Tensor, Pending]] = {}
        self._replicas: dict[str, ReplicaReducer] = {}
        by_name: dict[str, Unit] = {}
        for groups in dict.fromkeys(layout.groups for layout in layouts.values()):
            alike = {name: layout for name, layout in layouts.items() if layout.groups == groups}
            fused = {name: () if in_graph and name in compiled else fused_names for name in alike}
            by_name |= allocate(alike, plan, mesh, fused)
            if (
                groups.replicas > 1
            ):  # one for each set of axes, so that neighbouring gradients are summed in one message
                axes = groups.replica_axes
                self._replicas.setdefault("+".join(axes), ReplicaReducer(mesh.group(*axes)))
        self.units = {name: by_name[name] for name in layouts}
        for unit in self.units.values():
            if in_graph and unit.name in compiled:
                register(unit.accumulated, accumulator)
            if unit.name not in compiled and unit.residency.holds_full_grad:
                self._attach(unit)

    # ------------------------------------------------------------------------------------------------------- state

    def state_bytes(self) -> int:
        """Return the bytes of parameters, gradients, master weights and optimizer state that this rank holds now.
        Shared storage counts once, offloaded state not at all."""
        storages = {}
        for unit in self.units.values():
            state = () if self.offload else (unit.master, *unit.state.values(), unit.ema)
            for x in (unit.full, unit.gather_source, unit.grad, unit.full_grad, *state):
                if x is not None:
                    storages[storage_id(x)] = x.untyped_storage().nbytes()
        return sum(storages.values())

    # -------------------------------------------------------------------------------------------------- parameters

    def gather(self, name: str) -> None:
        """Start the all-gather of the unit's weights."""
        unit = self.units[name]
        if unit.residency.reshard_after_forward:
            resize(unit.full, unit.layout.numel)
        unit.gather = all_gather(unit.full, unit.gather_source, unit.group)

    def await_gather(self, name: str) -> None:
        """Wait for the all-gather of the unit's weights. They are then unsharded on this rank."""
        unit = self.units[name]
        assert unit.gather, "its gather has been launched"
        unit.gather.wait()
        unit.gather = None
        self.unsharded.add(name)

    def unshard(self, name: str) -> None:
        """Gather the unit's weights and wait for them, unless they are unsharded already. For use outside of a step."""
        if name not in self.unsharded:
            self.gather(name)
            self.await_gather(name)

    def free(self, name: str) -> None:
        """Free the unsharded weights of a unit that is resharded after each use (zero 3)."""
        resize(self.units[name].full, 0)
        self.unsharded.discard(name)

    def weights_changed(self, published: bool = False) -> None:
        """Mark the gathered weights as stale after an optimizer step or a load. The next use gathers them again.

        Args:
            published: True if the offloaded weights are already copied to the device.
        """
        for unit in self.units.values():
            if self.offload and not published:
                unit.gather_source.copy_(unit.master)
            if unit.residency.reshard_after_forward and unit.name in self.unsharded:
                self.free(unit.name)
        self.unsharded.clear()

    def start_average(self) -> None:
        """Set the average of the weights, if there is one, to the weights."""
        for unit in self.units.values():
            if unit.ema is not None:
                unit.ema.copy_(unit.master)

    def start_outer(self) -> None:
        """Set the outer weights, if there are any, to the weights, and their momentum to zero."""
        for unit in self.units.values():
            if unit.outer is not None:
                unit.outer.copy_(unit.master)
                unit.outer_momentum.zero_()

    # --------------------------------------------------------------------------------------------------- gradients

    def open(self, name: str) -> None:
        """Start the unit's unsharded gradient, and allocate it unless the rank holds it all the time. From now on,
        backward through the unit may accumulate into `.grad`."""
        unit = self.units[name]
        if unit.full_grad is None:
            unit.full_grad = torch.empty(unit.layout.numel, dtype=self.master, device=self.device)
            self._attach(unit)
        self._start_gradient(unit)

    def attach(self, name: str) -> None:
        """Attach the gradients to the parameters of a compiled unit, for a backward."""
        if name in self.compiled:
            self._attach(self.units[name])

    def detach(self, name: str) -> None:
        """Detach the gradients from the parameters of a compiled unit, after the backward. The compiler refuses
        parameters that have a gradient of another precision."""
        if name in self.compiled:
            for _, p in self.units[name].with_gradient:
                p.grad = None

    def deferring(self, later: list[Callable[[], None]] | None) -> AbstractContextManager:
        """Return a context in which the gradients of matrices are deferred: their computation is appended to `later`.
        If `later` is None, they are not deferred."""
        return nullcontext() if later is None else self.accumulator.deferred(later)

    def close(self, name: str) -> None:
        """Complete the unit's unsharded gradient. The gradients of matrices that no backward has reached become
        zero."""
        self.attach(name)
        self.accumulator.close(self.units[name].accumulated)
        self.detach(name)

    def discard(self, name: str) -> None:
        """Drop the unit's unsharded gradient, unless the rank holds it all the time."""
        unit = self.units[name]
        if not unit.residency.holds_full_grad:
            unit.full_grad = None
            for _, p in unit.with_gradient:
                p.grad = None

    def reduce(self, name: str) -> None:
        """Start the reduce-scatter of the unit's gradient. From now on only the reduction holds this gradient, unless
        the rank holds it all the time. The unit's next backward allocates a new one."""
        unit = self.units[name]
        self._reductions[name] = unit.full_grad, reduce_scatter(unit.full_grad, unit.reductions)
        self.discard(name)

    def collect(self, name: str, first: bool) -> None:
        """Wait for the reduce-scatter of the unit's gradient, and add the result to the shard's gradient.

        Args:
            first: True for the first reduce-scatter of the step. Its result replaces the shard's gradient.
        """
        unit = self.units[name]
        full, work = self._reductions.pop(name)
        work.wait()
        if not unit.residency.holds_full_grad:
            own = full[slice(*unit.layout.own)]
            unit.grad.copy_(own) if first else unit.grad.add_(own)

    def sum_replicas(self, axes: str, names: Sequence[str]) -> None:
        """Start to sum the gradients of neighbouring shards over their replicas."""
        units = [self.units[name] for name in names]
        buffer, _ = units[0].grad_at
        start, numel = min(u.grad_at[1] for u in units), sum(u.grad.numel() for u in units)
        assert max(u.grad_at[1] + u.grad.numel() for u in units) == start + numel, "they are neighbours"
        self._replicas[axes].launch(buffer[start : start + numel])

    def await_sums(self, axes: str) -> None:
        """Wait for the sums over replicas."""
        self._replicas[axes].wait()

    def sum_tp_replicas(self, names: Sequence[str]) -> None:
        """Sum the gradients of these units that several ranks of tp hold."""
        for unit in (self.units[name] for name in names):
            self.tp_replicas.add(unit.layout, unit.layout.own[0], unit.grad)
        self.tp_replicas.finish()

    def sum_tied(self, name: str) -> None:
        """Add the other stage's gradient of the tied embeddings."""
        self.ties.add(self.units[name].grad)

    def offer(self, name: str) -> None:
        """Offer the unit's gradient to the other islands."""
        self.offer_unit(self.units[name])

    def _start_gradient(self, unit: Unit) -> None:
        """Zero the gradients of vectors, which autograd adds to, and the padding behind them. The gradients of matrices
        are overwritten by their first matmul."""
        unit.full_grad[unit.layout.matrix_numel :].zero_()
        self.accumulator.open(unit.accumulated)

    def _attach(self, unit: Unit) -> None:
        for name, p in unit.with_gradient:
            at = unit.layout.offsets[name]
            p.grad = unit.full_grad[at : at + p.numel()].view(p.shape)
