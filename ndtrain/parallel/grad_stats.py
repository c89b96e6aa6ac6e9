"""What the whole mesh makes of a step's gradients: loss, norm, and whether all of it is finite."""

from typing import NamedTuple

import torch
from torch import Tensor

from ndtrain.distributed.collectives import all_gather_row
from ndtrain.distributed.mesh import Mesh
from ndtrain.parallel.fsdp import ShardedUnits


class GradStats(NamedTuple):
    """The same bits on every rank, fp64 and on the device.

    Attributes:
        losses: the loss and the objective's other sums, each summed over all ranks.
        norm: the 2-norm of the whole model's gradient, each element counted once.
        finite: whether every rank's loss and the norm are.
    """

    losses: Tensor
    norm: Tensor
    finite: Tensor


class GradStatsReducer:
    """Asks every rank for its loss and for the norm of the gradients it owns."""

    def __init__(self, units: ShardedUnits, mesh: Mesh):
        self.mesh, self.device = mesh, units.device
        self._counted = _counted(units)

    def __call__(self, losses_share: Tensor) -> GradStats:
        mine = torch.zeros(1 + len(losses_share), dtype=torch.float64, device=self.device)
        for x in self._counted:
            mine[0] += _square_sum(x)
        mine[1:] = losses_share
        rows, work = all_gather_row(mine, self.mesh.world)
        work.wait()
        return GradStats(rows[:, 1:].sum(0), rows[:, 0].sum().sqrt(), rows.isfinite().all())


_ROW = 4096  # elements whose norm is taken in their own precision


def _counted(units: ShardedUnits) -> list[Tensor]:
    """The gradients that this rank counts in the norm, in few slices. Of the replicas of an element, the first one
    counts it."""
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
    """The sum of squares, fp64, from the norms of short rows: PyTorch's fp32 norm of 10 M elements is off by 5e-4 on
    CPU, which would make clipping depend on how the gradient is cut."""
    whole = len(x) // _ROW * _ROW
    rows = torch.linalg.vector_norm(x[:whole].view(-1, _ROW), dim=1).double().square().sum()
    return rows + x[whole:].double().square().sum()
