"""Expert parallelism: the ranks along ep hold different experts of a layer, and send each other the rows of their
tokens (Lepikhin et al., 2021, arXiv:2006.16668).

A rank first tells every other one how many rows come for each of its experts. That is all that the host waits for.
Then the rows travel, and their outputs travel back; gradients take the same ways in the other direction. A rank whose
experts get no row takes part with none, and its graph is the same.

What lies between `send` and `receive` is computed while the rows travel: the shared expert, and in the backward its
gradients, since autograd runs first what was made last.

With `moe.overlap` the experts of a rank are cut into parts, and the rows of a part travel by themselves. In the forward
the rows of all parts are launched first. Then each part is multiplied while the later ones arrive and the outputs of
the earlier ones go back. Autograd takes the parts in the opposite order, so their gradients are launched in that order.
An expert gets the same rows in the same order, so no result changes.

Every gradient of an expert is made where the expert is, from the rows of all ranks along ep. So it is summed only over
the axes that ep leaves, and no number of ranks appears anywhere.

Shape legend: M rows of this rank's tokens, sorted by expert, R rows of a part of this rank's experts, E hidden_size, X
experts.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from ndtrain.distributed.collectives import Pending, all_to_all_rows
from ndtrain.distributed.sharding import balanced_split
from ndtrain.model.moe.exchange import Exchange, ExpertRows, Part
from ndtrain.model.moe.permutation import Permutation
from ndtrain.model.spec import COMBINE, DISPATCH
from ndtrain.parallel.recompute import SavedOps

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


def parts_of(experts: int, parts: int) -> list[slice]:
    """The parts of a rank's experts, as even as can be."""
    return [slice(*balanced_split(experts, parts, i)) for i in range(parts)]


class SavedExchange(Exchange):
    """An exchange whose results a recomputed block may save. All experts are here, and rows stay where they are.

    Args:
        saved_ops: where they are saved.
        counts_X, rows: as `Exchange` takes them.
    """

    def __init__(self, saved_ops: SavedOps, counts_X: Tensor, rows: int):
        self._saved_ops = saved_ops
        self.parts = [_SavedPart(saved_ops, slice(None), ExpertRows.of(counts_X, rows))]

    def to_tokens(self, returned: Sequence[Tensor]) -> Tensor:
        return _Move.apply(_as_it_is, _as_it_is, self._saved_ops.of(COMBINE), *returned)


class _SavedPart(Part):
    def __init__(self, saved_ops: SavedOps, experts: slice, expert_rows: ExpertRows):
        super().__init__(experts, expert_rows)
        self._saved_ops = saved_ops

    def receive(self, sent: Tensor) -> Tensor:
        return _Move.apply(_as_it_is, _as_it_is, self._saved_ops.of(DISPATCH), sent)


def _as_it_is(x: Tensor) -> Tensor:
    return x


class ReturnBuffer:
    """Where the rows of this rank's tokens arrive on their way back, one tensor for all parts. It refers neither to the
    exchange nor to its parts, and these not to each other in a circle: they are freed with the graph that holds them.

    Attributes:
        rows: of all parts.
    """

    def __init__(self, rows: int = 0):
        self.rows = rows
        self._rows_E: Tensor | None = None

    def get(self, like: Tensor) -> Tensor:
        """[rows, E] of the precision of `like`, whose rows have as many elements."""
        if self._rows_E is None:
            self._rows_E = like.new_empty(self.rows, like.shape[1])
        return self._rows_E

    def take(self) -> Tensor:
        """What all parts wrote, which is not held any longer."""
        made, self._rows_E = self._rows_E, None
        assert made is not None, "rows are received that were not sent"
        return made


class TravellingPart(Part, ABC):
    """A part whose rows come from other ranks. What came by messages is saved in every mode of recompute.

    The four steps of the way are those of rows and, in the opposite direction, of their gradients: an exchange calls
    `start_there` and, when all parts' `start_back` were called, `finish_back`.

    Args:
        returning: where rows come back.
        group: the ranks along ep.
        saved_ops, experts, expert_rows: as other parts take them.
    """

    def __init__(
        self,
        returning: ReturnBuffer,
        group: dist.ProcessGroup,
        saved_ops: SavedOps,
        experts: slice,
        expert_rows: ExpertRows,
    ):
        super().__init__(experts, expert_rows)
        self._returning, self._group, self._saved_ops = returning, group, saved_ops
        self._there: tuple[Pending, Tensor] | None = None  # what travels to the experts, and where to
        self._back: Pending | None = None  # what travels to the tokens

    def receive(self, sent: Tensor) -> Tensor:
        return _Move.apply(self.finish_there, self.start_back, self._saved_ops.of(DISPATCH), sent)

    def send_back(self, y_RE: Tensor) -> Tensor:
        """Returns a tensor without elements, which stands for the rows that travel."""
        start = _nothing if self._saved_ops.replays(COMBINE) else self.start_back
        return _Move.apply(start, self.finish_there, None, y_RE)

    def start_there(self, x_ME: Tensor) -> None:
        """Launches the rows of this part's experts."""
        self._there = self.launch_there(x_ME)

    def finish_there(self, sent: Tensor) -> Tensor:
        """The rows that came, sorted by expert."""
        assert self._there is not None, "rows are received that were not sent"
        (pending, arriving), self._there = self._there, None
        pending.wait()
        return self.by_expert(arriving)

    def start_back(self, y_RE: Tensor) -> Tensor:
        """Launches the rows of this part's experts on their way to the tokens."""
        self._back = self.launch_back(y_RE)
        return _nothing(y_RE)

    def finish_back(self) -> None:
        assert self._back is not None, "rows are received that were not sent"
        self._back.wait()
        self._back = None

    @abstractmethod
    def launch_there(self, x_ME: Tensor) -> tuple[Pending, Tensor]:
        """Returns the operation, and where the rows of the experts arrive."""

    @abstractmethod
    def by_expert(self, arriving: Tensor) -> Tensor:
        """What has arrived, sorted by expert: [R, E]."""

    @abstractmethod
    def launch_back(self, y_RE: Tensor) -> Pending:
        """The opposite of `by_expert` and of `launch_there`."""


def _nothing(x: Tensor) -> Tensor:
    return x.new_empty(0)


class TravellingExchange(Exchange):
    """The exchange with the experts of other ranks, part by part. All ranks launch the parts in one order.

    Attributes:
        parts: as of an `Exchange`; they write what comes back into `returning`.
    """

    parts: Sequence[TravellingPart]

    def __init__(self, saved_ops: SavedOps, returning: ReturnBuffer):
        self._saved_ops, self.returning = saved_ops, returning

    def send(self, x_ME: Tensor) -> Sequence[Tensor]:
        """Returns for each part a tensor without elements, which stands for its rows that travel."""
        start = self._no_start if self._saved_ops.replays(DISPATCH) else partial(self._start_there, self.parts)
        return _Move.apply(start, self._finish_back, None, x_ME)

    def to_tokens(self, returned: Sequence[Tensor]) -> Tensor:
        # autograd runs the last part's backward first
        launch = partial(self._start_there, self.parts[::-1])
        return _Move.apply(self._finish_back, launch, self._saved_ops.of(COMBINE), *returned)

    def of_tokens(self, returned: Tensor) -> Tensor:
        """What all parts wrote into `returning`, in the order of the rows that were sent: [M, E]."""
        return returned

    def _start_there(self, parts: Sequence[TravellingPart], x_ME: Tensor) -> tuple[Tensor, ...]:
        for part in parts:
            part.start_there(x_ME)
        return self._no_start(x_ME)

    def _no_start(self, x_ME: Tensor) -> tuple[Tensor, ...]:
        return tuple(_nothing(x_ME) for _ in self.parts)

    def _finish_back(self, *returned: Tensor) -> Tensor:
        for part in self.parts:
            part.finish_back()
        return self.of_tokens(self.returning.take())


class ExpertExchange(TravellingExchange):
    """Sends as many rows as there are, for which the host waits for their numbers.

    Args:
        group: the ranks along ep; each has as many experts, in order.
        parts: into which the experts of a rank are cut.
        saved_ops, counts_X, rows: as `SavedExchange` takes them.
    """

    def __init__(self, group: dist.ProcessGroup, parts: int, saved_ops: SavedOps, counts_X: Tensor, rows: int):
        super().__init__(saved_ops, ReturnBuffer(rows))
        theirs_X, on_host = saved_ops(DISPATCH, partial(exchange_counts, counts_X, group))
        mine, theirs = _even(rows, len(counts_X), group) if on_host.is_meta else on_host.tolist()
        each = len(counts_X) // group.size()
        self.parts = [
            _UnevenPart(self.returning, group, saved_ops, experts, each, mine, theirs, theirs_X)
            for experts in parts_of(each, parts)
        ]


class _UnevenPart(TravellingPart):
    """
    Args:
        each: how many experts a rank has.
        mine, theirs: the rows that go to each expert, and that come from each rank for each expert here, [X] on the
            host.
        theirs_X: on the device.
    """

    def __init__(
        self,
        returning: ReturnBuffer,
        group: dist.ProcessGroup,
        saved_ops: SavedOps,
        experts: slice,
        each: int,
        mine: list[int],
        theirs: list[int],
        theirs_X: Tensor,
    ):
        ends, firsts = list(accumulate(mine, initial=0)), range(0, len(mine), each)
        self._sends = [slice(ends[first + experts.start], ends[first + experts.stop]) for first in firsts]
        come = [theirs[first:][experts] for first in firsts]  # by rank and expert
        self._receives = [sum(of_rank) for of_rank in come]
        self._share = (experts.stop - experts.start) / each
        number = experts.stop - experts.start
        experts_R = torch.arange(number, device=theirs_X.device).repeat(len(firsts))
        theirs_R = theirs_X.view(-1, each)[:, experts].flatten()
        experts_R = experts_R.repeat_interleave(theirs_R, output_size=sum(self._receives))
        self._order = Permutation.of(experts_R[:, None], number)
        sizes = [sum(of_expert) for of_expert in zip(*come, strict=True)]
        super().__init__(returning, group, saved_ops, experts, ExpertRows.of_sizes(sizes, self._order.counts))

    def launch_there(self, x_ME: Tensor) -> tuple[Pending, Tensor]:
        arriving = x_ME.new_empty(sum(self._receives), x_ME.shape[1])
        sends, receives = [x_ME[rows] for rows in self._sends], arriving.split(self._receives)
        return all_to_all_rows(sends, receives, self._group, self._nbytes(x_ME)), arriving

    def by_expert(self, arriving: Tensor) -> Tensor:
        """Rows come rank by rank, each rank's sorted by expert."""
        return arriving[self._order.slots]

    def launch_back(self, y_RE: Tensor) -> Pending:
        returning = self._returning.get(y_RE)
        sends = y_RE[self._order.rows[:, 0]].split(self._receives)
        return all_to_all_rows(sends, [returning[rows] for rows in self._sends], self._group, self._nbytes(y_RE))

    def _nbytes(self, x: Tensor) -> int:
        """Of the mean part of this size."""
        return round(self._share * self._returning.rows * x.shape[1] * x.element_size())


@cache
def keep_out_of_graphs() -> None:
    """Makes what sends rows, or saves them, a break in compiled graphs. No decorator does, since it would import
    PyTorch's compiler for every run, which takes long."""
    senders = {
        SavedExchange: ("to_tokens",),
        _SavedPart: ("receive",),
        TravellingExchange: ("send", "to_tokens"),
        TravellingPart: ("receive", "send_back"),
    }
    for cls, names in senders.items():
        for name in names:
            setattr(cls, name, torch.compiler.disable(getattr(cls, name)))


def exchange_counts(counts_X: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """
    Returns:
        how many rows come from each rank for each expert here, [X]; on the host [2, X]: the rows that go to each
        expert, and those that come.
    """
    theirs_X = their_counts(counts_X, group)
    both = torch.stack([counts_X, theirs_X])
    return theirs_X, both if both.is_meta else both.cpu()


def their_counts(counts_X: Tensor, group: dist.ProcessGroup) -> Tensor:
    """How many rows come from each rank for each expert here, [X]."""
    each = len(counts_X) // group.size()
    theirs_X = torch.zeros_like(counts_X)  # where nothing is sent, as on a pretended rank, nothing comes
    all_to_all_rows(counts_X.split(each), theirs_X.split(each), group, counts_X.nbytes).wait()
    return theirs_X


def _even(rows: int, experts: int, group: dist.ProcessGroup) -> tuple[list[int], list[int]]:
    """The rows that go to each expert and that come, where all ranks send equally many to every expert, but for those
    that `imbalanced` adds."""
    mine = [rows * (i + 1) // experts - rows * i // experts for i in range(experts)]
    each, me = experts // group.size(), group.rank()
    return mine, [round(_imbalance * n) for n in mine[me * each : (me + 1) * each]] * group.size()


class _Move(torch.autograd.Function):
    """Moves rows one way, and their gradients the other way. Either may make several tensors of one, or one of
    several."""

    @staticmethod
    def forward(ctx, way: Callable, back: Callable, recall: Callable | None, *x: Tensor):
        ctx.back = back
        return way(*x) if recall is None else recall(partial(way, *x))

    @staticmethod
    def backward(ctx, *grads: Tensor):
        made = ctx.back(*(grad.contiguous() for grad in grads))
        return None, None, None, *(made if isinstance(made, tuple) else (made,))
