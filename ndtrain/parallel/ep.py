"""Expert parallelism: the ranks along ep hold different experts of a layer, and send each other the rows of their
tokens (Lepikhin et al., 2021, arXiv:2006.16668).

A rank first tells every other one how many rows come for each of its experts. That is all that the host waits for.
Then the rows travel, and their outputs travel back; gradients take the same ways in the other direction. A rank whose
experts get no row takes part with none, and its graph is the same.

What lies between `send` and `receive` is computed while the rows travel: the shared expert, and in the backward its
gradients, since autograd runs first what was made last.

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


class SavedExchange(Exchange):
    """An exchange whose results a recomputed block may save. All experts are here, and rows stay where they are.

    Args:
        saved_ops: where they are saved.
        counts_X, rows: as `Exchange` takes them.
    """

    def __init__(self, saved_ops: SavedOps, counts_X: Tensor, rows: int):
        super().__init__(counts_X, rows)
        self._saved_ops = saved_ops

    @torch.compiler.disable
    def receive(self, sent: Tensor) -> Tensor:
        return _Move.apply(sent, _as_it_is, _as_it_is, self._saved_ops.of(DISPATCH))

    @torch.compiler.disable
    def to_tokens(self, y_RE: Tensor) -> Tensor:
        return _Move.apply(y_RE, _as_it_is, _as_it_is, self._saved_ops.of(COMBINE))


def _as_it_is(x: Tensor) -> Tensor:
    return x


class ExpertExchange(SavedExchange):
    """The exchange with the experts of other ranks. What came by messages is saved in every mode of recompute.

    Args:
        group: the ranks along ep; each has as many experts, in order.
        saved_ops, counts_X, rows: as `SavedExchange` takes them.
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
    def send(self, x_ME: Tensor) -> Tensor:
        """Returns a tensor without elements, which stands for the rows that travel."""
        return _Move.apply(x_ME, self._start_there, self._finish_back, None)

    @torch.compiler.disable
    def receive(self, sent: Tensor) -> Tensor:
        return _Move.apply(sent, self._finish_there, self._start_back, self._saved_ops.of(DISPATCH))

    @torch.compiler.disable
    def to_tokens(self, y_RE: Tensor) -> Tensor:
        return _Move.apply(y_RE, self._back, self._there, self._saved_ops.of(COMBINE))

    def _there(self, x_ME: Tensor) -> Tensor:
        return self._finish_there(self._start_there(x_ME))

    def _back(self, y_RE: Tensor) -> Tensor:
        return self._finish_back(self._start_back(y_RE))

    def _start_there(self, x_ME: Tensor) -> Tensor:
        if not self._saved_ops.replays(DISPATCH):
            self._launch(x_ME, self._sends, self._receives, x_ME.nbytes)
        return x_ME.new_empty(0)

    def _finish_there(self, sent: Tensor) -> Tensor:
        """Rows come rank by rank, each rank's sorted by expert."""
        return self._arrived()[self._order.slots]

    def _start_back(self, y_RE: Tensor) -> Tensor:
        of_tokens = sum(self._sends) * y_RE.shape[1] * y_RE.element_size()
        self._launch(y_RE[self._order.rows[:, 0]], self._receives, self._sends, of_tokens)
        return y_RE.new_empty(0)

    def _finish_back(self, sent: Tensor) -> Tensor:
        return self._arrived()

    def _launch(self, rows: Tensor, sends: list[int], receives: list[int], nbytes: int) -> None:
        arriving = rows.new_empty(sum(receives), rows.shape[1])
        pending = all_to_all_rows(rows, arriving, sends, receives, self._group, nbytes)
        self._travelling = pending, arriving

    def _arrived(self) -> Tensor:
        """The rows that were launched last. No two exchanges of a microbatch are under way at one time."""
        pending, arriving = self._travelling
        del self._travelling
        pending.wait()
        return arriving


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
