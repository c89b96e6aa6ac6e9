"""Expert parallelism: the ranks along ep hold different experts of a layer, and send each other the rows of their
tokens (Lepikhin et al., 2021, arXiv:2006.16668).

A rank first tells every other one how many rows come for each of its experts. That is all that the host waits for.
Then the rows travel, and their outputs travel back; gradients take the same ways in the other direction. A rank whose
experts get no row takes part with none, and its graph is the same.

Every gradient of an expert is made where the expert is, from the rows of all ranks along ep. So it is summed only over
the axes that ep leaves, and no number of ranks appears anywhere.

Shape legend: M rows of this rank's tokens, sorted by expert, R rows of this rank's experts, E hidden_size, X experts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ndtrain.distributed.collectives import all_to_all_rows
from ndtrain.model.moe.exchange import Exchange, ExpertRows
from ndtrain.model.moe.permutation import Permutation
from ndtrain.parallel.recompute import COMBINE, DISPATCH, SavedOps

LANE = "exchange"  # of the rows: they must not wait behind the gathers of weights
_imbalance = 1.0  # rows that come to a rank without data, over the mean


@contextmanager
def imbalanced(times: float) -> Iterator[None]:
    """Inside, so many times the mean number of rows come to a rank whose tensors have no memory."""
    global _imbalance
    before, _imbalance = _imbalance, times
    try:
        yield
    finally:
        _imbalance = before


class ExpertExchange(Exchange):
    """The exchange of one microbatch's rows.

    Args:
        group: the ranks along ep; each has as many experts, in order.
        saved_ops: where a recomputed block saves what came by messages, so that its recompute sends nothing.
        counts_X, rows: as `Exchange` takes them.
    """

    def __init__(self, group: dist.ProcessGroup, saved_ops: SavedOps, counts_X: Tensor, rows: int):
        self._group, self._saved_ops = group, saved_ops
        theirs_X, on_host = saved_ops(DISPATCH, partial(_exchange_counts, counts_X, group))
        ranks, each = group.size(), len(counts_X) // group.size()
        mine, theirs = _even(rows, len(counts_X), group) if on_host.is_meta else on_host.tolist()
        by_rank = [slice(i * each, (i + 1) * each) for i in range(ranks)]
        self._sends, self._receives = ([sum(counts[s]) for s in by_rank] for counts in (mine, theirs))
        experts_R = torch.arange(each, device=counts_X.device).repeat(ranks)
        experts_R = experts_R.repeat_interleave(theirs_X, output_size=sum(theirs))
        self._order = Permutation.of(experts_R[:, None], each)
        self.expert_rows = ExpertRows.of_sizes([sum(theirs[x::each]) for x in range(each)], self._order.counts)

    @torch.compiler.disable
    def to_experts(self, x_ME: Tensor) -> Tensor:
        return _Move.apply(x_ME, self._there, self._back, self._saved_ops.of(DISPATCH))

    @torch.compiler.disable
    def to_tokens(self, y_RE: Tensor) -> Tensor:
        return _Move.apply(y_RE, self._back, self._there, self._saved_ops.of(COMBINE))

    def _there(self, x_ME: Tensor) -> Tensor:
        """Rows come rank by rank, each rank's sorted by expert."""
        x_RE = x_ME.new_empty(sum(self._receives), x_ME.shape[1])
        all_to_all_rows(x_ME, x_RE, self._sends, self._receives, self._group, x_ME.nbytes).wait()
        return x_RE[self._order.slots]

    def _back(self, y_RE: Tensor) -> Tensor:
        y_ME = y_RE.new_empty(sum(self._sends), y_RE.shape[1])
        by_rank = y_RE[self._order.rows[:, 0]]
        all_to_all_rows(by_rank, y_ME, self._receives, self._sends, self._group, y_ME.nbytes).wait()
        return y_ME


def _exchange_counts(counts_X: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """
    Returns:
        how many rows come from each rank for each expert here, [X]; on the host [2, X]: the rows that go to each
        expert, and those that come.
    """
    each = [len(counts_X) // group.size()] * group.size()
    theirs_X = torch.zeros_like(counts_X)  # where nothing is sent, as on a pretended rank, nothing comes
    all_to_all_rows(counts_X, theirs_X, each, each, group, counts_X.nbytes).wait()
    both = torch.stack([counts_X, theirs_X])
    return theirs_X, both if both.is_meta else both.cpu()


def _even(rows: int, experts: int, group: dist.ProcessGroup) -> tuple[list[int], list[int]]:
    """The rows that go to each expert and that come, where all ranks send equally many to every expert, but for those
    that `imbalanced` adds."""
    mine = [rows * (i + 1) // experts - rows * i // experts for i in range(experts)]
    each, me = experts // group.size(), group.rank()
    return mine, [round(_imbalance * n) for n in mine[me * each : (me + 1) * each]] * group.size()


class _Move(torch.autograd.Function):
    """Moves rows one way, and their gradients the other way."""

    @staticmethod
    def forward(ctx, x: Tensor, way: Callable, back: Callable, recall: Callable | None) -> Tensor:
        ctx.back = back
        return way(x) if recall is None else recall(partial(way, x))

    @staticmethod
    def backward(ctx, grad: Tensor):
        return ctx.back(grad.contiguous()), None, None, None
