"""`moe.capacity`: rows of experts are sent in buffers of a fixed size, so no layer makes the host wait for their
numbers.

A rank sends every other rank the same number of rows: `moe.capacity` times the mean, filled up with zeros. This is the
capacity factor of Lepikhin et al., 2021, arXiv:2006.16668. The rows that arrive are sorted into one bucket for each
expert. A bucket also has `moe.capacity` times the mean number of rows. The real numbers of rows stay on the device.
Rows of zeros are multiplied like others, and add nothing to any gradient.

Nothing is dropped. If rows do not fit, a flag on the device is set. The host reads it once a step, before the weights
are updated. All ranks then run the step again with twice the capacity, until everything fits. Forwards outside of a
training step (evaluation, samples) send exactly the rows that exist.

Shape legend: as in `ep.py`; Q ranks along ep; X experts of a rank or of a part; C rows of a part from one rank to
another; D rows of one expert's bucket.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from ndtrain.config import ModelConfig
from ndtrain.config.schema import resolved
from ndtrain.mesh.collectives import all_reduce
from ndtrain.mesh.host_device import Readback
from ndtrain.mesh.mesh import Mesh
from ndtrain.model.moe.exchange import ExpertRows, Part
from ndtrain.model.spec import DISPATCH
from ndtrain.parallel.ep import ExpertRanks, Messages, Plan, Selection, parts_of, plan_rows, their_counts


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

    def plan(self, ranks: ExpertRanks, counts_X: Tensor, rows: int) -> Plan:
        """Plan to send buffers of a fixed size if they are in use. The arguments are as in `plan_rows`."""
        if not self._in_use:
            return plan_rows(ranks, counts_X, rows)
        theirs_X = ranks.saved_ops(DISPATCH, partial(their_counts, counts_X, ranks.group))
        theirs_QX, mine_QX = (x.view(ranks.group.size(), -1) for x in (theirs_X, counts_X))
        first_QX = (counts_X.cumsum(0) - counts_X).view_as(mine_QX)  # each expert's first row that is sent
        parts, places, at = {}, [], 0
        for experts in parts_of(mine_QX.shape[1], ranks.parts):
            first_Q1 = first_QX[:, experts][:, :1]
            part, messages = self._plan_part(experts, at, rows, mine_QX[:, experts], first_Q1, theirs_QX[:, experts])
            parts[part], first_returned_Q1 = messages, at + _multiples(messages.arrive[0], first_Q1)
            places.append(first_returned_Q1 + first_QX[:, experts] - first_Q1)
            at += sum(messages.arrive)
        to_tokens = _fill(mine_QX.view(1, -1), torch.cat(places, 1).view(1, -1), rows, at)
        return Plan(parts, at, to_tokens._replace(empty=None))

    def _plan_part(
        self, experts: slice, at: int, rows: int, mine_QX: Tensor, first_Q1: Tensor, theirs_QX: Tensor
    ) -> tuple[Part, Messages]:
        """Plan the messages of a part.

        Args:
            at: as in `Messages`.
            rows: the number of rows of all parts.
            mine_QX, theirs_QX: the number of rows that go to each expert, and that come from each rank for each expert.
            first_Q1: the first row for each rank.
        """
        ranks, number = theirs_QX.shape
        C, D = self.rows_of_pair(rows, number), self.rows_of_expert(rows, ranks)
        mine_Q1 = mine_QX.sum(1, keepdim=True)
        self._overflow += (mine_Q1 > C).any() | (theirs_QX.sum(0) > D).any()
        # the first row that each rank sends to each expert: among the rows that arrive, and in the buckets
        arriving_QX = _multiples(C, theirs_QX[:, :1]) + theirs_QX.cumsum(1) - theirs_QX
        bucket_QX = _multiples(D, theirs_QX[0]) + theirs_QX.cumsum(0) - theirs_QX
        to_ranks = _fill(mine_Q1, first_Q1, C, rows)
        to_experts = _fill(theirs_QX.t(), arriving_QX.t(), D, ranks * C)
        from_experts = _fill(theirs_QX, bucket_QX, C, number * D)
        ends_X = torch.arange(1, number + 1, dtype=torch.int32, device=theirs_QX.device) * D
        sent = [slice(q * C, (q + 1) * C) for q in range(ranks)]
        messages = Messages(to_ranks, sent, at, [C] * ranks, to_experts, from_experts, recorded=ranks * C)
        return Part(experts, ExpertRows([D] * number, ends_X)), messages

    def rows_of_pair(self, rows: int, experts: int) -> int:
        """Return C: the number of rows that fit into a message from a rank with `rows` rows to `experts` experts of
        another rank."""
        tokens = rows // self._choices
        return min(math.ceil(self.factor * rows * experts / self._experts), tokens * min(self._choices, experts))

    def rows_of_expert(self, rows: int, ranks: int) -> int:
        """Return D: the number of rows that fit into an expert's bucket, if each of `ranks` ranks has `rows` rows."""
        return min(math.ceil(self.factor * rows * ranks / self._experts), rows // self._choices * ranks)

    def check(self) -> None:
        """Set `exceeded` for the step that has run. The host waits for the other ranks."""
        (total,) = Readback(all_reduce(self._overflow, self._mesh.world), self._overflow).wait("the rows that fitted")
        self.exceeded = not total.is_meta and total.item() > 0

    def grow(self) -> None:
        self.factor = min(2 * self.factor, self.most)


def _multiples(of: int, like: Tensor) -> Tensor:
    """Return 0, `of`, 2 `of` and so on, in the shape of `like`."""
    return torch.arange(0, like.numel() * of, of, device=like.device).view_as(like)


def _fill(sizes_BG: Tensor, firsts_BG: Tensor, each: int, rows: int) -> Selection:
    """Select rows for B blocks of `each` rows. A block has the rows of its G groups one after another, and then empty
    rows. Where a group has more rows than fit, some rows are wrong, or not there.

    Args:
        sizes_BG, firsts_BG: the number of rows of each group, and its first row in the source.
        rows: the number of rows of the source.
    """
    ends_BG = sizes_BG.cumsum(1).contiguous()
    place_BD = torch.arange(each, device=sizes_BG.device).expand(len(sizes_BG), each).contiguous()
    group_BD = torch.searchsorted(ends_BG, place_BD, right=True).clamp(max=sizes_BG.shape[1] - 1)
    source_BD = place_BD + (firsts_BG + sizes_BG - ends_BG).gather(1, group_BD)
    there_BD = (place_BD < ends_BG[:, -1:]) & (source_BD < rows)
    return Selection(source_BD.where(there_BD, 0).flatten(), ~there_BD.reshape(-1, 1))
