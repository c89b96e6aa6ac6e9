"""The model's weight ops with gradients written straight into the flat buffers.

Autograd makes each weight gradient as a tensor of its own and then adds it to `.grad`. Here the matmul accumulates in
place, as Megatron-LM's gradient-accumulation fusion does: no zeroing, no temporary, no addition afterwards.

What lies between the tokens of the stream and those a matmul sees is an `Exchange` on either side of it. On one device
that is `WHOLE`, which moves nothing; `parallel/tp.py` has the others.

Shape legend: N tokens, I in, O out, E hidden_size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ndtrain.model import Ops
from ndtrain.model.attention import attend
from ndtrain.model.loss import LOCAL, Vocabulary, chunked_loss
from ndtrain.parallel.gradients import Gradients
from ndtrain.parallel.recompute import Keep

Rows = slice


class Gathered:
    """Rows [N, I] that are here, or on their way and asked for by `rows`.

    Attributes:
        order: slices of the rows in the order they arrive.
    """

    def __init__(self, x_NI: Tensor):
        self._x_NI = x_NI
        self.order: list[Rows] = [slice(0, x_NI.shape[0])]

    def rows(self, wanted: Rows) -> Tensor:
        """Those rows, waited for."""
        return self._x_NI if wanted is self.order[0] else self._x_NI[wanted]  # a slice of a tensor costs microseconds

    def all(self) -> Tensor:
        return self._x_NI


class Exchange:
    """What lies between the stream's tokens and a matmul's, where that is nothing: both are the same."""

    def gather(self, x: Tensor) -> Gathered:
        """The matmul's tokens from the stream's; in backward, of gradients."""
        return Gathered(x.flatten(0, -2))

    def reduce(self, produce: Callable[[Rows], Tensor], order: Sequence[Rows]) -> Callable[[], Tensor]:
        """The stream's tokens from this rank's share of the matmul's, which `produce` makes slice by slice, best in
        `order`. Returns what waits for them."""
        if len(order) == 1:
            y_NO = produce(order[0])
            return lambda: y_NO
        parts = sorted(((rows.start, produce(rows)) for rows in order), key=lambda part: part[0])
        y_NO = torch.cat([y for _, y in parts])
        return lambda: y_NO

    def outside(self, shape: torch.Size) -> tuple[int, ...]:
        """Leading dims of the stream's tokens, given those of the matmul's."""
        return tuple(shape)

    inside = outside  # and the other way round


WHOLE = Exchange()


class Products:
    """The matmuls of y = x @ w.T and of its gradients, and what becomes of their factors before: here nothing."""

    def input(self, x: Gathered) -> Gathered:
        return x

    def gradient(self, dy: Gathered) -> Gathered:
        return dy

    def weight(self, w_OI: Tensor, backward: bool) -> Any:
        """As `output` takes it; or, backward, `input_gradient`."""
        return w_OI

    def output(self, x_NI: Any, w_OI: Any) -> Tensor:
        return x_NI @ w_OI.t()

    def input_gradient(self, dys: Sequence[Any], weights: Sequence[Any]) -> Tensor:
        """The sum of dy_NO @ w_OI, [N, I]."""
        dx_NI = dys[0] @ weights[0]
        for dy, w in zip(dys[1:], weights[1:], strict=True):
            dx_NI.addmm_(dy, w)
        return dx_NI

    def weight_gradient(self, sink: Gradients, w: nn.Parameter, dy_NO: Any, x_NI: Any) -> None:
        """dy.T @ x into the sink."""
        sink.add_product(w, dy_NO.t(), x_NI)


PLAIN = Products()


class Path(NamedTuple):
    """How a weight's matmul meets the stream: what is done to its input, and to its output; and how it is made."""

    enter: Exchange = WHOLE
    leave: Exchange = WHOLE
    products: Products = PLAIN


DIRECT = Path()


class _Linear(torch.autograd.Function):
    """y_i = x @ w_i.T + b_i for several weights of one path. What enters is gathered again in backward and not kept.
    The Parameters themselves are kept, not copies of them among the saved tensors: under fsdp their storage is empty
    between forward and backward. `recall`, if any, gives the outputs: it calls what makes them, or has them already.
    For autograd the weights are no inputs, as it has nothing to do for them."""

    @staticmethod
    def forward(ctx, sink: Gradients, path: Path, recall: Callable | None, x: Tensor, weights: Sequence, *biases):
        ctx.sink, ctx.path, ctx.weights, ctx.biases = sink, path, weights, biases
        ctx.save_for_backward(x)
        make = partial(_outputs, path, x, weights, biases)
        return recall(make) if recall else make()

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (x,) = ctx.saved_tensors
        sink, path, weights, products = ctx.sink, ctx.path, ctx.weights, ctx.path.products
        if path == DIRECT:
            x_NI, dys_NO = x.flatten(0, -2), [grad.flatten(0, -2) for grad in grads]
            dx_NI = products.input_gradient(dys_NO, weights)
            dx = lambda: dx_NI
        else:
            gathered = products.input(path.enter.gather(x))
            dys = [products.gradient(path.leave.gather(grad)) for grad in grads]
            factors = [products.weight(w, backward=True) for w in weights]
            produce = lambda rows: products.input_gradient([dy.rows(rows) for dy in dys], factors)
            dx = path.enter.reduce(produce, dys[0].order)
            x_NI, dys_NO = gathered.all(), [dy.all() for dy in dys]
        for w, dy_NO in zip(weights, dys_NO, strict=True):
            products.weight_gradient(sink, w, dy_NO, x_NI)
        db = [None if b is None else g.flatten(0, -2).sum(0) for b, g in zip(ctx.biases, grads, strict=True)]
        return None, None, None, dx().view(x.shape), None, *db


def _outputs(
    path: Path, x: Tensor, weights: Sequence[nn.Parameter], biases: Sequence[nn.Parameter | None]
) -> tuple[Tensor, ...]:
    """x @ w.T + b of each, in the stream's tokens."""
    if path == DIRECT:
        return tuple([F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)])
    products = path.products
    x_NI = products.input(path.enter.gather(x))
    factors = [products.weight(w, backward=False) for w in weights]
    outs = [path.leave.reduce(lambda rows, w=w: products.output(x_NI.rows(rows), w), x_NI.order) for w in factors]
    shape = path.leave.outside(path.enter.inside(x.shape[:-1]))
    return tuple(_add(out(), b).view(*shape, -1) for out, b in zip(outs, biases, strict=True))


def _add(y_NO: Tensor, bias_O: Tensor | None) -> Tensor:
    return y_NO if bias_O is None else y_NO.add_(bias_O)


class _Embedding(torch.autograd.Function):
    """Looks up the ids that lie in `held`, the table's rows that are here; others give zero. None: all are here."""

    @staticmethod
    def forward(ctx, sink: Gradients, path: Path, tokens: Tensor, weight: nn.Parameter, held: range | None):
        ctx.sink, ctx.path, ctx.weight, ctx.held = sink, path, weight, held
        ctx.save_for_backward(tokens)
        ids_N = tokens.flatten()

        def rows_of(rows: Rows) -> Tensor:
            here_N, local_N = _local(ids_N[rows], held)
            y_NE = F.embedding(local_N, weight)
            return y_NE if here_N is None else y_NE.mul_(here_N[:, None])

        y = path.leave.reduce(rows_of, [slice(0, len(ids_N))])
        return y().view(*path.leave.outside(tokens.shape), -1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (tokens,) = ctx.saved_tensors
        here_N, local_N = _local(tokens.flatten(), ctx.held)
        dy_NE = ctx.path.leave.gather(grad).all()
        if here_N is not None:  # to pick the rows that are held would make the host ask how many
            dy_NE = dy_NE.where(here_N[:, None], 0)
        ctx.sink.add_rows(ctx.weight, local_N, dy_NE)
        return (None,) * 5


def _local(ids_N: Tensor, held: range | None) -> tuple[Tensor | None, Tensor]:
    """(which ids are held, None for all; their rows in the table here)"""
    if held is None:
        return None, ids_N
    here_N = (ids_N >= held.start) & (ids_N < held.stop)
    return here_N, (ids_N - held.start).where(here_N, 0)


class _HeadLoss(torch.autograd.Function):
    """The loss comes scaled, so its own gradient is one: the weight's is complete when forward returns."""

    @staticmethod
    def forward(
        ctx,
        gradients: Gradients,
        vocabulary: Vocabulary,
        x: Tensor,
        weight: nn.Parameter,
        labels: Tensor,
        scale: Tensor,
        chunk: int,
        wanted: bool,
    ):
        add = lambda a, b: gradients.add_product(weight, a, b)
        loss, dx_NE = chunked_loss(x.flatten(0, -2), weight, labels.flatten(), scale, chunk, wanted, add, vocabulary)
        if wanted:
            ctx.save_for_backward(dx_NE.view_as(x))
        return loss

    @staticmethod
    def backward(ctx, grad: Tensor):
        return None, None, ctx.saved_tensors[0], *(None,) * 5


class WeightOps:
    """The model's ops over weights. Vectors (biases, norms) stay with autograd.

    Args:
        sink: where matrices' gradients go.
        path_of: parameter -> its path.
        keep: has the outputs of some matmuls when their block is run again.
        products: how the blocks' matmuls are made.
    """

    def __init__(
        self,
        sink: Gradients,
        path_of: Callable[[nn.Parameter], Path] = lambda weight: DIRECT,
        keep: Keep | None = None,
        products: Products = PLAIN,
    ):
        self.sink, self.path_of, self.keep, self.products = sink, path_of, keep or Keep(), products

    def linear(self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        path, recall = self.path_of(weights[0]), self.keep.of(self.keep.op_of.get(weights[0]))
        if self.products is not PLAIN:
            path = path._replace(products=self.products)
        return _Linear.apply(self.sink, path, recall, x, weights, *biases)

    def embedding(self, tokens: Tensor, weight: Tensor, path: Path | None = None, held: range | None = None) -> Tensor:
        return _Embedding.apply(self.sink, path or DIRECT, tokens, weight, held)

    def head_loss(
        self, x: Tensor, weight: Tensor, labels: Tensor, scale: Tensor, chunk: int, vocabulary: Vocabulary = LOCAL
    ) -> Tensor:
        wanted = torch.is_grad_enabled()  # asked here: inside a Function it never is
        return _HeadLoss.apply(self.sink, vocabulary, x, weight, labels, scale, chunk, wanted)


def direct_ops(gradients: Gradients, keep: Keep | None = None, products: Products = PLAIN) -> Ops:
    """The model's ops on one device, with weight gradients through `gradients`, for blocks that are run again what
    `keep` has of them, and matmuls as `products` makes them."""
    keep = keep or Keep()
    ops = WeightOps(gradients, keep=keep, products=products)
    core = lambda q, k, v, ctx: attend(q, k, v, ctx.scores, keep.of("core"))
    return Ops(linear=ops.linear, embedding=ops.embedding, core=core, head_loss=ops.head_loss)
