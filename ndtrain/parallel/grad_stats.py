"""Statistics of a step over the whole mesh: the loss, the norm of the gradient, and whether both are finite."""

from typing import NamedTuple

import torch
from torch import Tensor

from ndtrain.mesh.collectives import all_reduce
from ndtrain.mesh.mesh import Mesh
from ndtrain.parallel.fsdp import ShardedUnits


class GradStats(NamedTuple):
    """Statistics of a step, with the same bits on every rank. They are fp64 and on the device.

    Attributes:
        losses: the loss and the objective's other sums, each summed over all ranks.
        norm: the 2-norm of the whole model's gradient, each element counted once.
        finite: True if the norm and the losses are finite. A sum is not, if a rank's part is not.
    """

    losses: Tensor
    norm: Tensor
    finite: Tensor


class GradStatsReducer:
    """Sums the losses of all ranks, and the squared norms of the gradients that each of them owns."""

    def __init__(self, units: ShardedUnits, mesh: Mesh):
        self.mesh, self.device = mesh, units.device
        self._counted = _counted(units)

    def __call__(self, losses_share: Tensor) -> GradStats:
        mine = torch.zeros(1 + len(losses_share), dtype=torch.float64, device=self.device)
        for x in self._counted:
            mine[0] += _square_sum(x)
        mine[1:] = losses_share
        all_reduce(mine, self.mesh.world).wait()
        return GradStats(mine[1:], mine[0].sqrt(), mine.isfinite().all())


_ROW = 4096  # number of elements whose norm is computed in their own precision


def _counted(units: ShardedUnits) -> list[Tensor]:
    """Return the gradients that this rank counts in the norm, in few slices. If an element has replicas, only the first
    one is counted."""
    spans: list[tuple[Tensor, int, int]] = []
    for unit in units.units.values():
        buffer, at = unit.grad_at
        if unit.layout.groups.replica:
            continue
        for s in unit.layout.slices(*unit.layout.own, lambda t: t.owned):
            start, stop = at + s.start, at + s.stop
            if spans and spans[-1][0] is buffer and spans[-1][2] == start:
                start = spans.pop()[1]
            spans.append((buffer, start, stop))
    return [buffer[start:stop] for buffer, start, stop in spans]


def _square_sum(x: Tensor) -> Tensor:
    """Return the sum of squares, fp64, from the norms of short rows. PyTorch's fp32 norm of 10 M elements is off by
    5e-4 on CPU. Clipping would then depend on how the gradient is sharded."""
    whole = len(x) // _ROW * _ROW
    rows = torch.linalg.vector_norm(x[:whole].view(-1, _ROW), dim=1).double().square().sum()
    return rows + x[whole:].double().square().sum()
