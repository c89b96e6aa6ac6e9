"""The look-up in the embedding and the loss of the head. Their weights' gradients go straight into the flat buffers.

Shape legend: N tokens, E hidden_size, V vocabulary.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ndtrain.model import loss
from ndtrain.model.objective import Objective
from ndtrain.model.vocabulary import LOCAL, Targets, Vocabulary
from ndtrain.parallel.linear.accumulator import GradAccumulator
from ndtrain.parallel.linear.comm import NO_COMM, Rows, StreamComm


def embedding(
    accumulator: GradAccumulator,
    tokens: Tensor,
    weight_VE: nn.Parameter,
    comm: StreamComm = NO_COMM,
    vocabulary: Vocabulary = LOCAL,
) -> Tensor:
    """Return the residual stream of the tokens.

    Args:
        accumulator: accumulates the gradient of the table.
        tokens: ids.
        comm: sums the rows of all ranks.
        vocabulary: the rows of the table on this rank. Other ids give zero here.
    """
    return _Embedding.apply(accumulator, comm, vocabulary, tokens, weight_VE)


def head_loss(
    accumulator: GradAccumulator,
    objective: Objective,
    x_NE: Tensor,
    weight_VE: nn.Parameter,
    targets: Targets,
    scale: Tensor,
    chunk: int,
    vocabulary: Vocabulary = LOCAL,
) -> Tensor:
    """Compute `model.loss.head_loss`. The accumulator gets the gradient of the output embedding."""
    add = partial(accumulator.accumulate_product, weight_VE)
    return loss.head_loss(x_NE, weight_VE, targets, scale, chunk, vocabulary, objective, add)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        accumulator: GradAccumulator,
        comm: StreamComm,
        vocabulary: Vocabulary,
        tokens: Tensor,
        weight_VE: nn.Parameter,
    ):
        ctx.accumulator, ctx.comm, ctx.vocabulary, ctx.weight = accumulator, comm, vocabulary, weight_VE
        ctx.save_for_backward(tokens)
        ids_N = tokens.flatten()

        def rows_of(rows: Rows) -> Tensor:
            local_N, here_N = vocabulary.local(ids_N[rows])
            y_NE = F.embedding(local_N, weight_VE)
            return y_NE if here_N is None else y_NE.mul_(here_N[:, None])

        return comm.reduce(rows_of, [slice(0, len(ids_N))])()

    @staticmethod
    def backward(ctx, grad: Tensor):
        (tokens,) = ctx.saved_tensors
        local_N, here_N = ctx.vocabulary.local(tokens.flatten())
        dy_NE = ctx.comm.gather(grad).all()
        if here_N is not None:  # selecting the held rows instead would make the host wait for their number
            dy_NE = dy_NE.where(here_N[:, None], 0)
        ctx.accumulator.add_rows(ctx.weight, local_N, dy_NE)
        return (None,) * 5
