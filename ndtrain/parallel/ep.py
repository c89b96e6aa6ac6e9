"""Expert parallelism: the ranks along ep hold different experts of a layer, and send each other the rows of their
tokens (Lepikhin et al., 2021, arXiv:2006.16668).

A rank first sends every other rank the number of rows for each of that rank's experts. The host waits for these
numbers, and for nothing else. Then the rows are sent to the experts, and the outputs are sent back to the tokens. In
the backward, the gradients of the outputs are sent to the experts, and the gradients of the rows are sent back. A rank
whose experts get no rows takes part with empty messages, and its graph is the same.

Ops between `send` and `receive` are computed while the rows are in flight. In the forward this is the shared expert. In
the backward it is the gradient of the shared expert, because autograd first runs the node that was made last.

With `moe.overlap` the experts of a rank are split into parts, and each part has messages of its own. In the forward the
rows of all parts are launched first. Then each part is multiplied while the rows of later parts arrive and the outputs
of earlier parts return. Autograd takes the parts in the opposite order, so their gradients are launched in that order.
An expert gets the same rows in the same order, so no result changes.

The gradient of an expert is computed on the rank that holds the expert, from the rows of all ranks along ep. It is
therefore summed only over the axes that ep leaves over, and never divided by a number of ranks.

Shape legend: M rows of this rank's tokens, sorted by expert, R rows of a part of this rank's experts, E hidden_size,
X experts.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from ndtrain.mesh.collectives import Pending, all_to_all_rows
from ndtrain.mesh.sharding import balanced_split
from ndtrain.model.moe.exchange import Exchange, ExpertRows, Part
from ndtrain.model.moe.permutation import Permutation
from ndtrain.model.spec import COMBINE, DISPATCH
from ndtrain.parallel.recompute import SavedOps

LANE = "exchange"  # the lane of the rows, which must not wait behind the gathers of weights


def parts_of(experts: int, parts: int) -> list[slice]:
    """Split a rank's experts into parts, as evenly as possible."""
    return [slice(*balanced_split(experts, parts, i)) for i in range(parts)]


class SavedExchange(Exchange):
    """An exchange whose results a recomputed block may save. All experts are on this rank, and rows stay where they
    are.

    Args:
        saved_ops: the store of the saved results.
        counts_X, rows: as in `Exchange`.
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
    """The buffer in which the rows of this rank's tokens return, one tensor for all parts. It refers neither to the
    exchange nor to its parts, and these form no reference cycle. They are therefore freed with the graph that holds
    them.

    Attributes:
        rows: the number of rows of all parts.
    """

    def __init__(self, rows: int = 0):
        self.rows = rows
        self._rows_E: Tensor | None = None

    def get(self, like: Tensor) -> Tensor:
        """Return the buffer [rows, E], in the precision of `like`. Its rows have the same width as the rows of
        `like`."""
        if self._rows_E is None:
            self._rows_E = like.new_empty(self.rows, like.shape[1])
        return self._rows_E

    def take(self) -> Tensor:
        """Return the tensor that all parts wrote into, and hold it no longer."""
        made, self._rows_E = self._rows_E, None
        assert made is not None, "rows must be sent before they are received"
        return made


class TravellingPart(Part, ABC):
    """A part whose rows come from other ranks. Received rows are saved in every mode of recompute.

    Rows go "there", to the experts, and "back", to the tokens. Each of the two messages is started and finished by a
    method of its own. Gradients use the same four methods in the opposite direction. An exchange calls `start_there`,
    and calls `finish_back` after the `start_back` of all parts.

    Args:
        returning: the buffer in which rows return.
        group: the ranks along ep.
        saved_ops, experts, expert_rows: as for other parts.
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
        self._there: tuple[Pending, Tensor] | None = (
            None  # the message to the experts, and the tensor in which it arrives
        )
        self._back: Pending | None = None  # the message back to the tokens

    def receive(self, sent: Tensor) -> Tensor:
        return _Move.apply(self.finish_there, self.start_back, self._saved_ops.of(DISPATCH), sent)

    def send_back(self, y_RE: Tensor) -> Tensor:
        """Start to send the outputs back. Return a tensor without elements in place of the rows in flight."""
        start = _nothing if self._saved_ops.replays(COMBINE) else self.start_back
        return _Move.apply(start, self.finish_there, None, y_RE)

    def start_there(self, x_ME: Tensor) -> None:
        """Launch the rows for this part's experts."""
        self._there = self.launch_there(x_ME)

    def finish_there(self, sent: Tensor) -> Tensor:
        """Wait for the rows, and return them sorted by expert."""
        assert self._there is not None, "rows must be sent before they are received"
        (pending, arriving), self._there = self._there, None
        pending.wait()
        return self.by_expert(arriving)

    def start_back(self, y_RE: Tensor) -> Tensor:
        """Launch the rows of this part's experts back to the tokens."""
        self._back = self.launch_back(y_RE)
        return _nothing(y_RE)

    def finish_back(self) -> None:
        assert self._back is not None, "rows must be sent before they are received"
        self._back.wait()
        self._back = None

    @abstractmethod
    def launch_there(self, x_ME: Tensor) -> tuple[Pending, Tensor]:
        """Launch the rows to the experts. Return the operation, and the tensor in which the rows arrive."""

    @abstractmethod
    def by_expert(self, arriving: Tensor) -> Tensor:
        """Return the rows that have arrived, sorted by expert: [R, E]."""

    @abstractmethod
    def launch_back(self, y_RE: Tensor) -> Pending:
        """Launch the rows back to the tokens. This is the inverse of `by_expert` and of `launch_there`."""


def _nothing(x: Tensor) -> Tensor:
    return x.new_empty(0)


class TravellingExchange(Exchange):
    """The exchange with the experts of other ranks, part by part. All ranks launch the parts in the same order.

    Attributes:
        parts: as in `Exchange`; they write the rows that return into `returning`.
    """

    parts: Sequence[TravellingPart]

    def __init__(self, saved_ops: SavedOps, returning: ReturnBuffer):
        self._saved_ops, self.returning = saved_ops, returning

    def send(self, x_ME: Tensor) -> Sequence[Tensor]:
        """Start to send the rows. Return for each part a tensor without elements in place of its rows in flight."""
        start = self._no_start if self._saved_ops.replays(DISPATCH) else partial(self._start_there, self.parts)
        return _Move.apply(start, self._finish_back, None, x_ME)

    def to_tokens(self, returned: Sequence[Tensor]) -> Tensor:
        # autograd runs the last part's backward first
        launch = partial(self._start_there, self.parts[::-1])
        return _Move.apply(self._finish_back, launch, self._saved_ops.of(COMBINE), *returned)

    def of_tokens(self, returned: Tensor) -> Tensor:
        """Return the rows that all parts wrote into `returning`, in the order in which the rows were sent: [M, E]."""
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
    """An exchange that sends exactly the rows that exist. The host waits for their numbers.

    Args:
        group: the ranks along ep. Each holds the same number of experts, in order.
        parts: the number of parts into which the experts of a rank are split.
        saved_ops, counts_X, rows: as in `SavedExchange`.
        imbalance: on the meta device, the rows that come to this rank over the mean number.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        parts: int,
        saved_ops: SavedOps,
        counts_X: Tensor,
        rows: int,
        imbalance: float = 1.0,
    ):
        super().__init__(saved_ops, ReturnBuffer(rows))
        theirs_X, on_host = saved_ops(DISPATCH, partial(exchange_counts, counts_X, group))
        mine, theirs = _even(rows, len(counts_X), group, imbalance) if on_host.is_meta else on_host.tolist()
        each = len(counts_X) // group.size()
        self.parts = [
            _UnevenPart(self.returning, group, saved_ops, experts, each, mine, theirs, theirs_X)
            for experts in parts_of(each, parts)
        ]


class _UnevenPart(TravellingPart):
    """A part whose messages have exactly the rows that exist.

    Args:
        each: the number of experts of a rank.
        mine, theirs: the number of rows that go to each expert, and the number that come from each rank for each expert
            here, [X] on the host.
        theirs_X: `theirs` on the device.
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
        come = [theirs[first:][experts] for first in firsts]  # the rows that come, by rank and expert
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
        """Sort the rows by expert. They arrive rank by rank, and each rank's rows are sorted by expert."""
        return arriving[self._order.slots]

    def launch_back(self, y_RE: Tensor) -> Pending:
        returning = self._returning.get(y_RE)
        sends = y_RE[self._order.rows[:, 0]].split(self._receives)
        return all_to_all_rows(sends, [returning[rows] for rows in self._sends], self._group, self._nbytes(y_RE))

    def _nbytes(self, x: Tensor) -> int:
        """Return the bytes of a part of this size whose experts all get the mean number of rows. All ranks record the
        same number."""
        return round(self._share * self._returning.rows * x.shape[1] * x.element_size())


@cache
def keep_out_of_graphs() -> None:
    """Make the functions that send or save rows a break in compiled graphs. Decorators are not used: they would import
    PyTorch's compiler in every run, which takes long."""
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
    """Exchange the numbers of rows with the other ranks.

    Returns:
        the number of rows that come from each rank for each expert here, [X]; on the host [2, X]: the rows that go to
            each expert, and the rows that come.
    """
    theirs_X = their_counts(counts_X, group)
    both = torch.stack([counts_X, theirs_X])
    return theirs_X, both if both.is_meta else both.cpu()


def their_counts(counts_X: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the number of rows that come from each rank for each expert here, [X]."""
    each = len(counts_X) // group.size()
    theirs_X = torch.zeros_like(counts_X)  # zeros, in case nothing is sent, as on a simulated rank
    all_to_all_rows(counts_X.split(each), theirs_X.split(each), group, counts_X.nbytes).wait()
    return theirs_X


def _even(rows: int, experts: int, group: dist.ProcessGroup, imbalance: float) -> tuple[list[int], list[int]]:
    """Return the numbers of rows that go to each expert and that come, if all ranks send equally many rows to every
    expert. `imbalance` multiplies the rows that come."""
    mine = [rows * (i + 1) // experts - rows * i // experts for i in range(experts)]
    each, me = experts // group.size(), group.rank()
    return mine, [round(imbalance * n) for n in mine[me * each : (me + 1) * each]] * group.size()


class _Move(torch.autograd.Function):
    """A move of rows one way, whose backward moves their gradients the other way. Both may split a tensor into several,
    or join several into one."""

    @staticmethod
    def forward(ctx, way: Callable, back: Callable, recall: Callable | None, *x: Tensor):
        ctx.back = back
        return way(*x) if recall is None else recall(partial(way, *x))

    @staticmethod
    def backward(ctx, *grads: Tensor):
        made = ctx.back(*(grad.contiguous() for grad in grads))
        return None, None, None, *(made if isinstance(made, tuple) else (made,))
