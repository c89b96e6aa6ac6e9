"""`moe.capacity`: rows of experts are sent in buffers of a fixed size, so no layer makes the host wait for their
numbers.

A rank sends every other rank the same number of rows: `moe.capacity` times the mean, filled up with zeros. This is the
capacity factor of Lepikhin et al., 2021, arXiv:2006.16668. The rows that arrive are sorted into one bucket for each
expert. A bucket also has `moe.capacity` times the mean number of rows. The real numbers of rows stay on the device.
Rows of zeros are multiplied like others, and add nothing to any gradient.

Nothing is dropped. If rows do not fit, a flag on the device is set. The host reads it once a step, before the weights
are updated. All ranks then run the step again with twice the capacity, until everything fits. Forwards outside of a
training step (evaluation, samples) send exactly the rows that exist.

Shape legend: as in `ep.py`; Q ranks along ep, X experts of a part on a rank, C rows from one rank to another, D rows of
one expert's bucket.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ndtrain.config import ModelConfig
from ndtrain.config.schema import resolved
from ndtrain.mesh.collectives import Pending, all_reduce, all_to_all_rows
from ndtrain.mesh.host_device import Readback
from ndtrain.mesh.mesh import Mesh
from ndtrain.model.moe.exchange import Exchange, ExpertRows
from ndtrain.model.spec import DISPATCH
from ndtrain.parallel.ep import ExpertExchange, ReturnBuffer, TravellingExchange, TravellingPart, parts_of, their_counts
from ndtrain.parallel.recompute import SavedOps


class Capacity:
    """The size of the buffers of all layers, and a flag on the device that is set if rows of a step do not fit.

    Args:
        factor: `moe.capacity`.

    Attributes:
        factor: the size over the mean number of rows. It never shrinks.
        most: the factor with which everything fits, however uneven routing is.
        exceeded: True if rows of the last step did not fit on at least one rank. It is the same on all ranks.
    """

    def __init__(self, m: ModelConfig, factor: float, mesh: Mesh):
        self._mesh, self._experts = mesh, resolved(m.num_experts)
        self._choices = resolved(m.num_experts_per_tok)
        self.most = self._experts / self._choices
        self.factor = min(factor, self.most)
        self._in_use = self.exceeded = False
        self._overflow = torch.zeros((), dtype=torch.float64, device=mesh.device)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Run the block with exchanges that have buffers of a fixed size."""
        self._overflow.zero_()
        self._in_use = True
        try:
            yield
        finally:
            self._in_use = False

    def exchange(
        self,
        group: dist.ProcessGroup,
        parts: int,
        saved_ops: SavedOps,
        counts_X: Tensor,
        rows: int,
        imbalance: float = 1.0,
    ) -> Exchange:
        """Return the exchange of a layer, as `Ops.exchange`. The arguments are as in `ExpertExchange`."""
        if self._in_use:
            return FixedExchange(self, group, parts, saved_ops, counts_X, rows)
        return ExpertExchange(group, parts, saved_ops, counts_X, rows, imbalance)

    def rows_of_pair(self, rows: int, experts: int) -> int:
        """Return C: the number of rows that fit into a message from a rank with `rows` rows to `experts` experts of
        another rank."""
        tokens = rows // self._choices
        return min(math.ceil(self.factor * rows * experts / self._experts), tokens * min(self._choices, experts))

    def rows_of_expert(self, rows: int, ranks: int) -> int:
        """Return D: the number of rows that fit into an expert's bucket, if each of `ranks` ranks has `rows` rows."""
        return min(math.ceil(self.factor * rows * ranks / self._experts), rows // self._choices * ranks)

    def count_overflow(self, overflows: Tensor) -> None:
        """Note whether the rows of an exchange fit.

        Args:
            overflows: True if they do not fit, a scalar on the device.
        """
        self._overflow += overflows

    def check(self) -> None:
        """Set `exceeded` for the step that has run. The host waits for the other ranks."""
        (total,) = Readback(all_reduce(self._overflow, self._mesh.world), self._overflow).wait("the rows that fitted")
        self.exceeded = not total.is_meta and total.item() > 0

    def grow(self) -> None:
        self.factor = min(2 * self.factor, self.most)


class FixedExchange(TravellingExchange):
    """An exchange that sends buffers of a fixed size.

    Args:
        capacity: the size of the buffers.
        group, parts, saved_ops, counts_X, rows: as in `ExpertExchange`.
    """

    def __init__(
        self,
        capacity: Capacity,
        group: dist.ProcessGroup,
        parts: int,
        saved_ops: SavedOps,
        counts_X: Tensor,
        rows: int,
    ):
        super().__init__(saved_ops, ReturnBuffer())
        each = len(counts_X) // group.size()
        theirs_QX = saved_ops(DISPATCH, partial(their_counts, counts_X, group)).view(-1, each)
        mine_QX, ends_X = counts_X.view(-1, each), counts_X.cumsum(0)
        first_QX = (ends_X - counts_X).view(-1, each)  # for each expert, the first row that is sent
        self.parts: list[_FixedPart] = []
        places = []  # for each expert, the position at which its first row returns
        for experts in parts_of(each, parts):
            sent = _Sent(mine_QX[:, experts], first_QX[:, experts], capacity, rows)
            part = _FixedPart(self.returning, group, saved_ops, experts, sent, theirs_QX[:, experts].contiguous())
            capacity.count_overflow(sent.overflows | part.overflows)
            places.append(part.first_Q[:, None] + first_QX[:, experts] - first_QX[:, experts][:, :1])
            self.parts.append(part)
        row_M = torch.arange(rows, device=counts_X.device)
        expert_M = torch.searchsorted(ends_X, row_M, right=True)
        moved_X = (torch.cat(places, 1) - first_QX).flatten()
        self._place_M = (row_M + moved_X[expert_M]).clamp(max=self.returning.rows - 1)

    def of_tokens(self, returned: Tensor) -> Tensor:
        return returned[self._place_M]


class _Gathered(NamedTuple):
    """A selection of rows: which row of a source tensor each row of the result is.

    Attributes:
        source: [rows], the index in the source; 0 if the row is empty.
        empty: [rows, 1], True if the row comes from no row of the source and is zeros.
    """

    source: Tensor
    empty: Tensor

    @classmethod
    def of(cls, source: Tensor, there: Tensor) -> "_Gathered":
        """Return the selection of all rows, of which some are empty.

        Args:
            source, there: of one shape, row-major; `source` is read only where `there` is true.
        """
        return cls(source.where(there, 0).flatten(), ~there.reshape(-1, 1))

    def take(self, x: Tensor) -> Tensor:
        return x[self.source].masked_fill_(self.empty, 0)


class _Sent:
    """The rows of this rank's tokens that go to the experts of one part on each rank.

    Args:
        mine_QX: the number of rows for each expert.
        first_QX: the first row for each expert.
        rows: the number of rows of all parts.

    Attributes:
        C, D: as in the legend.
        slots: the rows [Q x C] that are sent.
        overflows: True if they do not fit, a scalar on the device.
    """

    def __init__(self, mine_QX: Tensor, first_QX: Tensor, capacity: Capacity, rows: int):
        ranks, experts = mine_QX.shape
        self.C, self.D = capacity.rows_of_pair(rows, experts), capacity.rows_of_expert(rows, ranks)
        place_C, mine_Q1 = torch.arange(self.C, device=mine_QX.device), mine_QX.sum(1, keepdim=True)
        self.slots = _Gathered.of(first_QX[:, :1] + place_C, place_C < mine_Q1)
        self.overflows = (mine_Q1 > self.C).any()


class _FixedPart(TravellingPart):
    """A part whose messages have a fixed size.

    Args:
        sent: the rows of this rank's tokens.
        theirs_QX: the number of rows that come from each rank for each expert.
        returning: the buffer in which rows return. The rows of this part follow the rows of earlier parts.

    Attributes:
        rows: the number of rows that come, and that return, including the empty ones.
        first_Q: the position in `returning` of the first row from each rank.
        overflows: True if an expert gets more rows than fit, a scalar on the device.
    """

    def __init__(
        self,
        returning: ReturnBuffer,
        group: dist.ProcessGroup,
        saved_ops: SavedOps,
        experts: slice,
        sent: _Sent,
        theirs_QX: Tensor,
    ):
        self._sent, self._C = sent.slots, sent.C
        (ranks, number), C, D, device = theirs_QX.shape, sent.C, sent.D, theirs_QX.device
        self.rows, at = ranks * C, returning.rows
        returning.rows += self.rows
        self._at = slice(at, at + self.rows)
        self.first_Q = at + torch.arange(ranks, device=device) * C
        self.overflows = (theirs_QX.sum(0) > D).any()
        self._to_experts, self._from_experts = _buckets(theirs_QX, C, D)
        ends_X = torch.arange(1, number + 1, dtype=torch.int32, device=device) * D
        rows = ExpertRows([D] * number, ends_X)
        super().__init__(returning, group, saved_ops, experts, rows)

    def launch_there(self, x_ME: Tensor) -> tuple[Pending, Tensor]:
        arriving = x_ME.new_empty(self.rows, x_ME.shape[1])
        return self._launch(self._sent.take(x_ME), arriving), arriving

    def by_expert(self, arriving: Tensor) -> Tensor:
        return self._to_experts.take(arriving)

    def launch_back(self, y_RE: Tensor) -> Pending:
        returning = self._returning.get(y_RE)[self._at]
        return self._launch(self._from_experts.take(y_RE), returning)

    def _launch(self, rows: Tensor, arriving: Tensor) -> Pending:
        return all_to_all_rows(rows.split(self._C), arriving.split(self._C), self._group, rows.nbytes)


def _buckets(theirs_QX: Tensor, C: int, D: int) -> tuple[_Gathered, _Gathered]:
    """Return two selections: from the rows that arrived to buckets, and back. C rows come from each rank, sorted by
    expert. Each expert has a bucket of D rows, in the order of the ranks."""
    ranks, number = theirs_QX.shape
    of_rank_QX = theirs_QX.cumsum(1)  # ends of the experts in the rows of a rank
    of_expert_XQ = theirs_QX.t().cumsum(1)  # ends of the ranks in the bucket of an expert
    # the difference between a row's position in the bucket and its position in its rank's rows
    moved_QX = of_expert_XQ.t() - of_rank_QX
    place_XD = torch.arange(D, device=theirs_QX.device).expand(number, D).contiguous()
    place_QC = torch.arange(C, device=theirs_QX.device).expand(ranks, C).contiguous()
    rank_XD = torch.searchsorted(of_expert_XQ.contiguous(), place_XD, right=True)
    expert_QC = torch.searchsorted(of_rank_QX, place_QC, right=True)
    came_XD, comes_QC = rank_XD < ranks, expert_QC < number
    rank_XD, expert_QC = rank_XD.clamp(max=ranks - 1), expert_QC.clamp(max=number - 1)
    there_XD = place_XD - moved_QX.t().gather(1, rank_XD)
    there_QC = place_QC + moved_QX.gather(1, expert_QC)
    to_experts = _Gathered.of(rank_XD * C + there_XD, came_XD & (there_XD < C))
    return to_experts, _Gathered.of(expert_QC * D + there_QC, comes_QC & (there_QC < D))
