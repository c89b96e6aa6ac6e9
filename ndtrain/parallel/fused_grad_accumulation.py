"""The model's weight ops, with gradients written straight into the flat buffers.

Autograd makes each weight gradient as a tensor of its own and then adds it to `.grad`. Here the matmul accumulates in
place, as Megatron-LM's gradient-accumulation fusion does: no zeroing, no temporary, no addition afterwards.

A `StreamComm` before a matmul turns the residual stream's tokens into the matmul's tokens, and a `StreamComm` after it
turns them back. On one device it is `NO_COMM`, which moves nothing; `parallel/tp.py` has the others.

Shape legend: N tokens, I in, O out, E hidden_size, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ndtrain.model import Ops
from ndtrain.model.attention.core import attend
from ndtrain.model.contiguous import cat_consecutive
from ndtrain.model.loss import chunked_loss
from ndtrain.model.objective import CROSS_ENTROPY, Objective
from ndtrain.model.spec import CORE
from ndtrain.model.vocabulary import LOCAL, Targets, Vocabulary
from ndtrain.parallel import compiled_linear
from ndtrain.parallel.ep import SavedExchange
from ndtrain.parallel.grad_accumulator import FusedWeights, GradAccumulator
from ndtrain.parallel.grouped_linear import GroupedLinear
from ndtrain.parallel.recompute import SavedOps

Rows = slice


class Gathered:
    """Rows [N, I] that are gathered, or still being received. `rows` waits for the rows that it returns.

    Attributes:
        order: slices of the rows in the order they arrive.
    """

    def __init__(self, x_NI: Tensor):
        self._x_NI = x_NI
        self.order: list[Rows] = [slice(0, x_NI.shape[0])]

    def rows(self, wanted: Rows) -> Tensor:
        """Return the `wanted` rows. Wait until they are received."""
        return self._x_NI if wanted is self.order[0] else self._x_NI[wanted]  # a slice of a tensor costs microseconds

    def all(self) -> Tensor:
        return self._x_NI


class StreamComm:
    """The communication between the residual stream's tokens and a matmul's tokens. This class moves nothing: both are
    the same.

    Attributes:
        sums_in_place: True if `reduce` writes into the tensor that `produce` returns.
    """

    sums_in_place = False

    def gather(self, x: Tensor) -> Gathered:
        """Gather the matmul's tokens from the residual stream's tokens. In the backward it gathers their gradients."""
        return Gathered(x)

    def reduce(self, produce: Callable[[Rows], Tensor], order: Sequence[Rows]) -> Callable[[], Tensor]:
        """Sum the matmul's outputs over the ranks into the residual stream's tokens. `produce` computes this rank's
        share of the sum slice by slice, preferably in `order`. Return a function that waits for the tokens."""
        if len(order) == 1:
            y_NO = produce(order[0])
            return lambda: y_NO
        parts = sorted(((rows.start, produce(rows)) for rows in order), key=lambda part: part[0])
        y_NO = torch.cat([y for _, y in parts])
        return lambda: y_NO


NO_COMM = StreamComm()


class MatmulImpl:
    """The matmuls of y = x @ w.T and of its gradients, and the preparation of their factors. This class leaves the
    factors as they are."""

    def of_weight(self, w_OI: Tensor) -> "MatmulImpl":
        """Return the implementation that multiplies by this weight."""
        return self

    def input(self, x: Gathered) -> Gathered:
        return x

    def gradient(self, dy: Gathered) -> Gathered:
        return dy

    def weight(self, w_OI: Tensor, backward: bool) -> Any:
        """Prepare the weight as a factor of `output`, or with `backward` as a factor of `input_gradient`."""
        return w_OI

    def output(self, x_NI: Any, w_OI: Any) -> Tensor:
        return torch.mm(x_NI, w_OI.t())

    def input_gradient(self, dys: Sequence[Any], weights: Sequence[Any]) -> Tensor:
        """Return the sum of dy_NO @ w_OI, [N, I]."""
        dx_NI = torch.mm(dys[0], weights[0])
        for dy, w in zip(dys[1:], weights[1:], strict=True):
            dx_NI.addmm_(dy, w)
        return dx_NI

    def weight_gradient(self, accumulator: GradAccumulator, w: nn.Parameter, dy_NO: Any, x_NI: Any) -> None:
        """Accumulate dy.T @ x."""
        accumulator.accumulate_product(w, dy_NO.t(), x_NI)

    def in_graph(self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """Return the outputs of several weights with one input, in a form that a compiler can trace
        (`compiled_linear.py`)."""
        return compiled_linear.linear(x, weights, biases)


PLAIN_MATMUL = MatmulImpl()


class WideMatmul(MatmulImpl):
    """Matmuls of an input in fp32 or wider with a weight that may be narrower."""

    def weight(self, w_OI: Tensor, backward: bool) -> Tensor:
        return w_OI.to(torch.promote_types(w_OI.dtype, torch.float32))


class LinearComm(NamedTuple):
    """The communication of a weight's matmul, before it and after it. `matmul` computes the matmul."""

    gather_input: StreamComm = NO_COMM
    reduce_output: StreamComm = NO_COMM
    matmul: MatmulImpl = PLAIN_MATMUL


LOCAL_LINEAR = LinearComm()
WIDE_LINEAR = LinearComm(matmul=WideMatmul())


class _Linear(torch.autograd.Function):
    """y_i = x @ w_i.T + b_i for several weights with the same communication.

    The gathered input is not saved: backward gathers it again. The Parameters are attributes, not saved tensors,
    because fsdp frees their storage between forward and backward. `recall`, if not None, returns the outputs: it
    computes them, or returns the saved ones. The weights are not inputs of autograd, so it accumulates no gradient for
    them.
    """

    @staticmethod
    def forward(
        ctx,
        accumulator: GradAccumulator,
        comm: LinearComm,
        recall: Callable | None,
        x_NI: Tensor,
        fused_weights: Sequence[FusedWeights],
        *biases,
    ):
        ctx.accumulator, ctx.comm, ctx.fused_weights, ctx.biases = accumulator, comm, fused_weights, biases
        ctx.save_for_backward(x_NI)
        if recall is None:
            return _outputs(comm, x_NI, fused_weights, biases)
        return recall(partial(_outputs, comm, x_NI, fused_weights, biases))

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (x_NI,) = ctx.saved_tensors
        db = [None if b is None else g.sum(0) for b, g in zip(ctx.biases, grads, strict=True)]
        gradients = _local_gradients if ctx.comm == LOCAL_LINEAR else _comm_gradients
        fused = cat_consecutive(grads, [len(s.rows) for s in ctx.fused_weights], -1)
        return None, None, None, gradients(ctx, x_NI, fused), None, *db


def _local_gradients(ctx, x_NI: Tensor, dys_NO: Sequence[Tensor]) -> Tensor:
    """Accumulate the weights' gradients and return the input's gradient."""
    lefts_ON = [dy_NO.t() for dy_NO in dys_NO]  # here, because after a large product a view costs twenty times as much
    dx_NI = PLAIN_MATMUL.input_gradient(dys_NO, [s.weight for s in ctx.fused_weights])
    for s, left_ON in zip(ctx.fused_weights, lefts_ON, strict=True):
        ctx.accumulator.accumulate_product(s.weight, left_ON, x_NI)
    return dx_NI


def _comm_gradients(ctx, x: Tensor, dys: Sequence[Tensor]) -> Tensor:
    """Do the same as `_local_gradients`, with communication. The input's gradient is computed first, so that it is sent
    while the weights' gradients are computed."""
    comm, matmul = ctx.comm, ctx.comm.matmul
    gathered = matmul.input(comm.gather_input.gather(x))
    arriving = [matmul.gradient(comm.reduce_output.gather(dy)) for dy in dys]
    factors = [matmul.weight(s.weight, backward=True) for s in ctx.fused_weights]
    produce = lambda rows: matmul.input_gradient([dy.rows(rows) for dy in arriving], factors)
    dx = comm.gather_input.reduce(produce, arriving[0].order)
    x_NI = gathered.all()
    for s, dy in zip(ctx.fused_weights, arriving, strict=True):
        matmul.weight_gradient(ctx.accumulator, s.weight, dy.all(), x_NI)
    return dx()


def _outputs(
    comm: LinearComm, x: Tensor, fused_weights: Sequence[FusedWeights], biases: Sequence[nn.Parameter | None]
) -> tuple[Tensor, ...]:
    """Return x @ w.T + b for each weight, for the residual stream's tokens."""
    if comm == LOCAL_LINEAR:
        made = [PLAIN_MATMUL.output(x, s.weight) for s in fused_weights]
    else:
        matmul, x_NI = comm.matmul, comm.matmul.input(comm.gather_input.gather(x))
        factors = [matmul.weight(s.weight, backward=False) for s in fused_weights]
        outs = [
            comm.reduce_output.reduce(lambda rows, w=w: matmul.output(x_NI.rows(rows), w), x_NI.order) for w in factors
        ]
        made = [out() for out in outs]
    outputs: list[Tensor] = []
    for y, s in zip(made, fused_weights, strict=True):
        outputs += (y,) if len(s.rows) == 1 else y.split_with_sizes(s.rows, -1)
    for y, bias_O in zip(outputs, biases, strict=True):
        if bias_O is not None:
            y += bias_O
    return tuple(outputs)


class _Embedding(torch.autograd.Function):
    """A look-up of the ids in `held`, the rows of the table that this rank holds. Other ids give zero. None: the rank
    holds all rows."""

    @staticmethod
    def forward(
        ctx, accumulator: GradAccumulator, comm: LinearComm, tokens: Tensor, weight: nn.Parameter, held: range | None
    ):
        ctx.accumulator, ctx.comm, ctx.weight, ctx.held = accumulator, comm, weight, held
        ctx.save_for_backward(tokens)
        ids_N = tokens.flatten()

        def rows_of(rows: Rows) -> Tensor:
            here_N, local_N = _local(ids_N[rows], held)
            y_NE = F.embedding(local_N, weight)
            return y_NE if here_N is None else y_NE.mul_(here_N[:, None])

        return comm.reduce_output.reduce(rows_of, [slice(0, len(ids_N))])()

    @staticmethod
    def backward(ctx, grad: Tensor):
        (tokens,) = ctx.saved_tensors
        here_N, local_N = _local(tokens.flatten(), ctx.held)
        dy_NE = ctx.comm.reduce_output.gather(grad).all()
        if here_N is not None:  # selecting the held rows instead would make the host wait for their number
            dy_NE = dy_NE.where(here_N[:, None], 0)
        ctx.accumulator.add_rows(ctx.weight, local_N, dy_NE)
        return (None,) * 5


def _local(ids_N: Tensor, held: range | None) -> tuple[Tensor | None, Tensor]:
    """Return True for each id that is held here, or None if all are, and the rows of the ids in the local table."""
    if held is None:
        return None, ids_N
    here_N = (ids_N >= held.start) & (ids_N < held.stop)
    return here_N, (ids_N - held.start).where(here_N, 0)


class _HeadLoss(torch.autograd.Function):
    """The loss from the head's input. It is already scaled, so its own gradient is 1. The weight's gradient is complete
    when forward returns."""

    @staticmethod
    def forward(
        ctx,
        gradients: GradAccumulator,
        vocabulary: Vocabulary,
        x_NE: Tensor,
        weight: nn.Parameter,
        targets: Targets,
        scale: Tensor,
        chunk: int,
        wanted: bool,
        objective: Objective,
    ):
        add = lambda a, b: gradients.accumulate_product(weight, a, b)
        sums, dx_NE = chunked_loss(x_NE, weight, targets, scale, chunk, wanted, add, vocabulary, objective)
        if wanted:
            ctx.save_for_backward(dx_NE)
        return sums

    @staticmethod
    def backward(ctx, grad: Tensor):
        return None, None, ctx.saved_tensors[0], *(None,) * 6


class WeightOps:
    """The model's ops over weights. Vectors (biases, norms) stay with autograd.

    Args:
        accumulator: accumulates the gradients of matrices.
        comm_of: parameter -> the communication around its matmul.
        saved_ops: the saved outputs of some matmuls, for the recompute of their block.
        matmul: computes the blocks' matmuls.
        fused_weights: the first matrix of each fused weight -> the fused weight.
        objective: computes the loss of the logits of a chunk of tokens.
    """

    def __init__(
        self,
        accumulator: GradAccumulator,
        comm_of: Callable[[nn.Parameter], LinearComm] = lambda weight: LOCAL_LINEAR,
        saved_ops: SavedOps | None = None,
        matmul: MatmulImpl = PLAIN_MATMUL,
        fused_weights: Mapping[nn.Parameter, FusedWeights] | None = None,
        objective: Objective = CROSS_ENTROPY,
    ):
        self.accumulator, self.comm_of, self.saved_ops, self.matmul = (
            accumulator,
            comm_of,
            saved_ops or SavedOps(),
            matmul,
        )
        self.objective = objective
        self.fused_weights = fused_weights or {}
        self._plans: dict[int, tuple[LinearComm, list[FusedWeights], str | None]] = {}  # by id of the first weight

    def linear(self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        comm, fused_weights, op = self._plans.get(id(weights[0])) or self._plan(weights)
        return _Linear.apply(self.accumulator, comm, self.saved_ops.of(op), x, fused_weights, *biases)

    def wide_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x @ w.T in fp32 or wider, for the tokens on this rank. Every rank holds the whole weight."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        whole = [FusedWeights(weight, (weight.shape[0],))]
        recall = self.saved_ops.of(self.saved_ops.op_of.get(weight))
        return _Linear.apply(self.accumulator, WIDE_LINEAR, recall, wide, whole, None)[0]

    def _plan(self, weights: Sequence[Tensor]) -> tuple[LinearComm, list[FusedWeights], str | None]:
        first = weights[0]
        comm = self.comm_of(first)._replace(matmul=self.matmul.of_weight(first))
        self._plans[id(first)] = plan = comm, self._fuse(weights), self.saved_ops.op_of.get(first)
        return plan

    def _fuse(self, weights: Sequence[Tensor]) -> list[FusedWeights]:
        fused, at = [], 0
        while at < len(weights):
            w = weights[at]
            fused.append(self.fused_weights.get(w) or FusedWeights(w, (w.shape[0],)))
            at += len(fused[-1].rows)
        return fused

    def embedding(
        self, tokens: Tensor, weight: Tensor, comm: LinearComm | None = None, held: range | None = None
    ) -> Tensor:
        return _Embedding.apply(self.accumulator, comm or LOCAL_LINEAR, tokens, weight, held)

    def head_loss(
        self, x: Tensor, weight: Tensor, targets: Targets, scale: Tensor, chunk: int, vocabulary: Vocabulary = LOCAL
    ) -> Tensor:
        wanted = torch.is_grad_enabled()  # read here, because inside a Function gradients are always disabled
        return _HeadLoss.apply(
            self.accumulator, vocabulary, x, weight, targets.flatten(), scale, chunk, wanted, self.objective
        )


def fused_ops(
    gradients: GradAccumulator,
    saved_ops: SavedOps | None = None,
    matmul: MatmulImpl = PLAIN_MATMUL,
    fused_weights: Mapping[nn.Parameter, FusedWeights] | None = None,
    objective: Objective = CROSS_ENTROPY,
) -> Ops:
    """Return the model's ops on one device.

    Args:
        gradients: accumulates the gradients of matrices.
        saved_ops, matmul, fused_weights, objective: as in `WeightOps`.
    """
    saved_ops = saved_ops or SavedOps()
    ops = WeightOps(gradients, saved_ops=saved_ops, matmul=matmul, fused_weights=fused_weights, objective=objective)

    def core(q_BTND: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, ctx) -> Tensor:
        return attend(q_BTND, k_BTKD, v_BTKD, ctx.scores, saved_ops.of(CORE))

    return Ops(
        linear=ops.linear,
        wide_linear=ops.wide_linear,
        grouped_linear=GroupedLinear(gradients, saved_ops, ops.fused_weights),
        exchange=partial(SavedExchange, saved_ops),
        embedding=ops.embedding,
        core=core,
        head_loss=ops.head_loss,
    )
