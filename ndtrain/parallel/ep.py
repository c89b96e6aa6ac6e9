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

An `ExpertExchange` follows a `Plan`, which is made from the numbers of rows. `moe.capacity` makes another plan
(`ep_capacity.py`).

The gradient of an expert is computed on the rank that holds the expert, from the rows of all ranks along ep. It is
therefore summed only over the axes that ep leaves over, and never divided by a number of ranks.

Shape legend: M rows of this rank's tokens, sorted by expert; S rows of all messages that this rank sends; A rows of a
part that arrive, rank by rank; R rows of a part, sorted by expert; E hidden_size, X experts.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ndtrain.mesh.collectives import Pending, all_to_all_rows
from ndtrain.mesh.sharding import balanced_split
from ndtrain.model.moe.exchange import Exchange, ExpertRows, Part, even_sizes
from ndtrain.model.moe.permutation import Permutation
from ndtrain.model.spec import COMBINE, DISPATCH
from ndtrain.parallel.recompute import SavedOps

LANE = "exchange"  # the lane of the rows, which must not wait behind the gathers of weights


def parts_of(experts: int, parts: int) -> list[slice]:
    """Split a rank's experts into parts, as evenly as possible."""
    return [slice(*balanced_split(experts, parts, i)) for i in range(parts)]


# ------------------------------------------------------------------------------------------------- where the rows go


class ExpertRanks(NamedTuple):
    """The ranks that hold the experts of a layer, and how they exchange rows.

    Attributes:
        group: the ranks along ep. Each holds the same number of experts, in order.
        parts: the number of parts into which the experts of a rank are split.
        saved_ops: the store of the results that recomputed blocks save.
        imbalance: on the meta device, the rows that come to this rank over the mean number.
    """

    group: dist.ProcessGroup
    parts: int
    saved_ops: SavedOps
    imbalance: float = 1.0


class Selection(NamedTuple):
    """Selected rows of a source tensor.

    Attributes:
        source: [rows], the index in the source of each row; None: the result is the source.
        empty: [rows, 1], True if the row is zeros in place of a row of the source; None: no row is.
    """

    source: Tensor | None = None
    empty: Tensor | None = None

    def take(self, x: Tensor) -> Tensor:
        if self.source is None:
            return x
        return x[self.source] if self.empty is None else x[self.source].masked_fill_(self.empty, 0)


class Messages(NamedTuple):
    """The messages of a part from and to each rank.

    Attributes:
        to_ranks: the rows from which messages are cut, from the M rows of this rank's tokens.
        sent: the rows for each rank, in the result of `to_ranks`.
        at: the first of these rows among the S rows that return.
        arrive: the number of rows that arrive from each rank. The same number is sent back.
        to_experts: R rows sorted by expert, from the A rows that arrive rank by rank.
        from_experts: the inverse.
        recorded: the number of rows that all ranks record.
    """

    to_ranks: Selection
    sent: Sequence[slice]
    at: int
    arrive: Sequence[int]
    to_experts: Selection
    from_experts: Selection
    recorded: float


class Plan(NamedTuple):
    """The messages of an exchange.

    Attributes:
        parts: the messages of each part, in order.
        rows: S.
        to_tokens: the M rows of this rank's tokens, from the S rows that return.
    """

    parts: dict[Part, Messages]
    rows: int
    to_tokens: Selection


def plan_rows(ranks: ExpertRanks, counts_X: Tensor, rows: int) -> Plan:
    """Plan to send exactly the rows that exist. The host waits for their numbers.

    Args:
        counts_X, rows: as in `Exchange`.
    """
    theirs_X, on_host = ranks.saved_ops(DISPATCH, partial(exchange_counts, counts_X, ranks.group))
    mine, theirs = _even(rows, len(counts_X), ranks) if on_host.is_meta else on_host.tolist()
    each = len(counts_X) // ranks.group.size()
    ends, firsts = list(accumulate(mine, initial=0)), range(0, len(mine), each)
    parts = {}
    for experts in parts_of(each, ranks.parts):
        number = experts.stop - experts.start
        come = [theirs[first:][experts] for first in firsts]  # the rows that come, by rank and expert
        arrive = [sum(of_rank) for of_rank in come]
        # they arrive rank by rank, and each rank's rows are sorted by expert
        experts_A = torch.arange(number, device=theirs_X.device).repeat(len(firsts))
        theirs_A = theirs_X.view(-1, each)[:, experts].flatten()
        experts_A = experts_A.repeat_interleave(theirs_A, output_size=sum(arrive))
        order = Permutation.of(experts_A[:, None], number)
        sizes = [sum(of_expert) for of_expert in zip(*come, strict=True)]
        sent = [slice(ends[first + experts.start], ends[first + experts.stop]) for first in firsts]
        to_experts, from_experts = Selection(order.slots), Selection(order.rows[:, 0])
        recorded = number / each * rows  # as if all experts got the mean number of rows
        part = Part(experts, ExpertRows.of_sizes(sizes, order.counts))
        parts[part] = Messages(Selection(), sent, 0, arrive, to_experts, from_experts, recorded)
    return Plan(parts, rows, Selection())


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


def _even(rows: int, experts: int, ranks: ExpertRanks) -> tuple[list[int], list[int]]:
    """Return the numbers of rows that go to each expert and that come, if all ranks send equally many rows to every
    expert. `imbalance` multiplies the rows that come."""
    mine = even_sizes(rows, experts)
    each, me = experts // ranks.group.size(), ranks.group.rank()
    return mine, [round(ranks.imbalance * n) for n in mine[me * each : (me + 1) * each]] * ranks.group.size()


# -------------------------------------------------------------------------------------------------------- the exchange


class ExpertExchange(Exchange):
    """The exchange with the experts of other ranks, part by part. All ranks launch the parts in the same order.
    Received rows are saved in every mode of recompute.

    Rows go "there", to the experts, and "back", to the tokens. Gradients go the same two ways. Tensors without elements
    take the place of rows in flight.

    Args:
        ranks: the ranks with the experts.
        plan: makes the plan: (ranks, counts_X, rows) -> a `Plan`.
        counts_X, rows: as in `Exchange`.
    """

    def __init__(self, ranks: ExpertRanks, plan: Callable[..., Plan], counts_X: Tensor, rows: int):
        self._group, self._saved_ops, self._plan = ranks.group, ranks.saved_ops, plan(ranks, counts_X, rows)
        self.parts = list(self._plan.parts)
        self._there: dict[Part, tuple[Pending, Tensor]] = {}  # messages to the experts, and the rows that arrive
        self._back: dict[Part, Pending] = {}  # messages back to the tokens
        self._returning: Tensor | None = None  # the rows [S, E] in which they arrive

    def send(self, x_ME: Tensor) -> Sequence[Tensor]:
        start = self._no_start if self._saved_ops.replays(DISPATCH) else partial(self._start_there, self.parts)
        return _Move.apply(start, self._finish_back, None, x_ME)

    def receive(self, part: Part, sent: Tensor) -> Tensor:
        finish, start = partial(self._finish_there, part), partial(self._start_back, part)
        return _Move.apply(finish, start, self._saved_ops.of(DISPATCH), sent)

    def send_back(self, part: Part, y_RE: Tensor) -> Tensor:
        start = _nothing if self._saved_ops.replays(COMBINE) else partial(self._start_back, part)
        return _Move.apply(start, partial(self._finish_there, part), None, y_RE)

    def to_tokens(self, returned: Sequence[Tensor]) -> Tensor:
        # autograd runs the last part's backward first
        start = partial(self._start_there, self.parts[::-1])
        return _Move.apply(self._finish_back, start, self._saved_ops.of(COMBINE), *returned)

    def _start_there(self, parts: Sequence[Part], x_ME: Tensor) -> tuple[Tensor, ...]:
        for part in parts:
            messages = self._plan.parts[part]
            arriving_AE = x_ME.new_empty(sum(messages.arrive), x_ME.shape[1])
            leaving = messages.to_ranks.take(x_ME)
            sends, receives = [leaving[rows] for rows in messages.sent], arriving_AE.split(messages.arrive)
            self._there[part] = self._launch(messages, sends, receives), arriving_AE
        return self._no_start(x_ME)

    def _no_start(self, x_ME: Tensor) -> tuple[Tensor, ...]:
        return tuple(_nothing(x_ME) for _ in self.parts)

    def _finish_there(self, part: Part, sent: Tensor) -> Tensor:
        pending, arriving_AE = self._there.pop(part)
        pending.wait()
        return self._plan.parts[part].to_experts.take(arriving_AE)

    def _start_back(self, part: Part, y_RE: Tensor) -> Tensor:
        messages, returning_SE = self._plan.parts[part], self._returning
        if returning_SE is None:
            returning_SE = self._returning = y_RE.new_empty(self._plan.rows, y_RE.shape[1])
        sends = messages.from_experts.take(y_RE).split(messages.arrive)
        receives = [returning_SE[messages.at :][rows] for rows in messages.sent]
        self._back[part] = self._launch(messages, sends, receives)
        return _nothing(y_RE)

    def _finish_back(self, *returned: Tensor) -> Tensor:
        for part in self.parts:
            self._back.pop(part).wait()
        returning_SE, self._returning = self._returning, None
        assert returning_SE is not None, "rows must be sent before they are received"
        return self._plan.to_tokens.take(returning_SE)

    def _launch(self, messages: Messages, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> Pending:
        nbytes = round(messages.recorded * sends[0].shape[1] * sends[0].element_size())
        return all_to_all_rows(sends, receives, self._group, nbytes)


class SavedExchange(Exchange):
    """An exchange whose results a recomputed block may save. All experts are on this rank, and rows stay where they
    are.

    Args:
        saved_ops: the store of the saved results.
        counts_X, rows: as in `Exchange`.
    """

    def __init__(self, saved_ops: SavedOps, counts_X: Tensor, rows: int):
        super().__init__(counts_X, rows)
        self._saved_ops = saved_ops

    def receive(self, part: Part, sent: Tensor) -> Tensor:
        return _Move.apply(_as_it_is, _as_it_is, self._saved_ops.of(DISPATCH), sent)

    def to_tokens(self, returned: Sequence[Tensor]) -> Tensor:
        return _Move.apply(_as_it_is, _as_it_is, self._saved_ops.of(COMBINE), *returned)


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _nothing(x: Tensor) -> Tensor:
    return x.new_empty(0)


@cache
def keep_out_of_graphs() -> None:
    """Make the methods that send or save rows a break in compiled graphs. Decorators are not used: they would import
    PyTorch's compiler in every run, which takes long."""
    for cls in (SavedExchange, ExpertExchange):
        for name in ("send", "receive", "send_back", "to_tokens"):
            if name in vars(cls):
                setattr(cls, name, torch.compiler.disable(getattr(cls, name)))


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
