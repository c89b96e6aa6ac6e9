"""Fused output projection and loss, computed in chunks of tokens. The formula of the loss is an `Objective`.

Shape legend: N tokens, C tokens of a chunk, E hidden_size, V vocabulary, S sums: the loss and `Objective.sums`.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ndtrain.model.matmul_accumulate import accumulate_product
from ndtrain.model.objective import CROSS_ENTROPY, Objective
from ndtrain.model.vocabulary import IGNORE, LOCAL, Targets, Vocabulary


def chunked_loss(
    x_NE: Tensor,
    weight_VE: Tensor,
    targets_N: Targets,
    scale: Tensor,
    chunk: int,
    want_gradients: bool,
    add_weight_gradient: Callable[[Tensor, Tensor], None],
    vocabulary: Vocabulary = LOCAL,
    objective: Objective = CROSS_ENTROPY,
) -> tuple[Tensor, Tensor | None]:
    """Return scale * the objective's weighted sums over the tokens [S], and the gradient of the first sum with respect
    to x. The gradient is None if it is not wanted.

    Only the logits of one chunk of tokens exist at a time. The forward therefore also computes the gradients, while
    these logits exist.

    Args:
        scale: a scalar.
        chunk: number of tokens whose logits exist at a time.
        want_gradients: whether to compute the gradients.
        add_weight_gradient: called with (a, b) for every chunk. The weight's gradient is the sum of a @ b.
        vocabulary: how tokens and logits are sharded.
        objective: returns the tokens' weights, and the loss of a chunk's logits with its gradient.
    """
    wide = _wide(x_NE.dtype)
    scale = scale.to(wide)
    sums = torch.zeros(1 + len(objective.sums), dtype=wide, device=x_NE.device)
    dx_NE = torch.empty_like(x_NE) if want_gradients else None
    for rows, x_CE, targets_C in vocabulary.chunks(x_NE, targets_N, chunk):
        weight_C1 = (objective.weights(targets_C).to(wide) * scale)[:, None]
        targets_C = targets_C._replace(labels=targets_C.labels.where(targets_C.labels != IGNORE, 0))
        of_chunk, dlogits_CV = objective.of_chunk(
            x_CE @ weight_VE.t(), targets_C, weight_C1, vocabulary, want_gradients
        )
        sums += of_chunk
        if dlogits_CV is not None:
            # apply the tokens' weights to the narrow matrices: this saves a pass over the wide logits gradient
            share_C1 = weight_C1.to(x_NE.dtype)
            vocabulary.add_input_gradient(dx_NE[rows], dlogits_CV, weight_VE, share_C1)
            add_weight_gradient(dlogits_CV.t(), x_CE * share_C1)
    vocabulary.finish()
    return vocabulary.report(sums), dx_NE


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the precision of sums over tokens: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


class _HeadLoss(torch.autograd.Function):
    """The loss from the head's input. It is already scaled. If the weight's gradient is accumulated elsewhere, it is
    complete when forward returns, and the loss's own gradient has to be 1."""

    @staticmethod
    def forward(
        ctx,
        x_NE: Tensor,
        weight_VE: Tensor,
        targets_N: Targets,
        scale: Tensor,
        chunk: int,
        vocabulary: Vocabulary,
        objective: Objective,
        wanted: bool,
        add: Callable[[Tensor, Tensor], None] | None,
    ) -> Tensor:
        dw_VE = None
        if add is None:
            dw_VE = torch.zeros_like(weight_VE, dtype=_wide(weight_VE.dtype)) if wanted else None
            add = partial(accumulate_product, dw_VE)
        sums, dx_NE = chunked_loss(x_NE, weight_VE, targets_N, scale, chunk, wanted, add, vocabulary, objective)
        ctx.save_for_backward(dx_NE, dw_VE)
        return sums

    @staticmethod
    def backward(ctx, grad_S: Tensor):
        dx_NE, dw_VE = ctx.saved_tensors
        d = (dx_NE, None) if dw_VE is None else (dx_NE * grad_S[0], dw_VE * grad_S[0])
        return *d, *(None,) * 7


def head_loss(
    x_NE: Tensor,
    weight_VE: Tensor,
    targets: Targets,
    scale: Tensor,
    chunk: int,
    vocabulary: Vocabulary = LOCAL,
    objective: Objective = CROSS_ENTROPY,
    add_weight_gradient: Callable[[Tensor, Tensor], None] | None = None,
) -> Tensor:
    """Return scale * the objective's weighted sums over the tokens. The logits are `x @ weight.T`.

    Args:
        x_NE: final hidden states, with the rows of the batch concatenated.
        weight_VE: output embedding.
        targets: the targets of [B, T] tokens.
        scale: a scalar. For the training loss it is 1 / (sum of the token weights of the *global* batch).
        chunk: number of tokens whose logits exist at a time.
        vocabulary: how tokens and logits are sharded.
        objective: the loss, and the weights of the tokens.
        add_weight_gradient: as in `chunked_loss`; None: autograd returns the weight's gradient.

    Returns:
        [S], fp32 or wider. Only the first element, the loss, has a gradient. The gradient includes terms that the
        objective adds to it, such as a z-loss.
    """
    wanted = torch.is_grad_enabled()  # checked here, because it is always False inside a Function's forward
    targets_N, add = targets.flatten(), add_weight_gradient
    return _HeadLoss.apply(x_NE, weight_VE, targets_N, scale, chunk, vocabulary, objective, wanted, add)
