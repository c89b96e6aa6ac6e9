"""Fused output projection and cross-entropy, over chunks of tokens.

Shape legend: N tokens, C tokens of a chunk, E hidden_size, V vocabulary.
"""

from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor

from ndtrain.model.matmul_accumulate import accumulate_product

IGNORE = -100  # a label that does not count, as in torch.nn.functional.cross_entropy


class Vocabulary:
    """How the tokens and logits of the head are sharded. In this class they are not: all are on this device."""

    def chunks(self, x_NE: Tensor, labels_N: Tensor, chunk: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yields (rows of x, hidden states of those tokens [C, E], their labels [C]), `chunk` tokens at a time."""
        for start in range(0, len(x_NE), chunk):
            rows = slice(start, start + chunk)
            yield rows, x_NE[rows], labels_N[rows]

    def log_softmax(
        self, logits_CV: Tensor, target_C1: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(log-probabilities of the local columns [C, V], the local column of each target [C, 1], whether the target is
        local [C, 1]; None: all are)."""
        return logits_CV.log_softmax(dim=-1, dtype=dtype), *self.columns(target_C1)

    def columns(self, target_C1: Tensor) -> tuple[Tensor, Tensor | None]:
        """The last two results of `log_softmax`."""
        return target_C1, None

    def log_sum_exp(self, lse_C: Tensor) -> Callable[[], Tensor]:
        """Of all columns, from that of the local ones. It is complete once the function that is returned is called."""
        return lambda: lse_C

    def add_input_gradient(self, out_CE: Tensor, dlogits_CV: Tensor, weight_VE: Tensor, share_C1: Tensor) -> None:
        """out = share * (dlogits @ weight). It is complete on return, or after `finish`."""
        torch.mm(dlogits_CV, weight_VE, out=out_CE)
        out_CE *= share_C1

    def finish(self) -> None:
        """Waits for the operations that were started."""

    def report(self, total: Tensor) -> Tensor:
        """This device's term of the loss. The terms of all devices are summed."""
        return total


LOCAL = Vocabulary()

# ---------------------------------------------------------------------------------------- the loss of a chunk's logits

# (logits [C, V], targets [C, 1], weights of the tokens [C, 1] in fp32 or wider, vocabulary, whether the gradient is
# wanted) -> (weighted sum of the losses, gradient of the unweighted losses [C, V] in the logits' precision, or None)
CrossEntropy = Callable[[Tensor, Tensor, Tensor, Vocabulary, bool], tuple[Tensor, Tensor | None]]


def cross_entropy(
    logits_CV: Tensor, target_C1: Tensor, weight_C1: Tensor, vocabulary: Vocabulary, wanted: bool
) -> tuple[Tensor, Tensor | None]:
    """A `CrossEntropy`, op by op."""
    logp_CV, column_C1, here_C1 = vocabulary.log_softmax(logits_CV, target_C1, weight_C1.dtype)
    hit_C1 = _hits(here_C1, weight_C1)
    total = -(logp_CV.gather(1, column_C1) * weight_C1 * hit_C1).sum()
    if not wanted:
        return total, None
    dlogits_CV = logp_CV.exp_()
    dlogits_CV.scatter_add_(1, column_C1, -hit_C1)
    return total, dlogits_CV.to(logits_CV.dtype)


@cache
def compiled_cross_entropy() -> CrossEntropy:
    """`cross_entropy` in two compiled pieces, between which the ranks of a sharded vocabulary exchange sums. Each reads
    the logits in their own precision, so no copy of them in fp32 exists: with gradients it is two passes that read and
    one that writes, instead of four and four over twice as wide ones."""
    row_lse, losses = torch.compile(_row_lse), torch.compile(_losses)

    def compiled(
        logits_CV: Tensor, target_C1: Tensor, weight_C1: Tensor, vocabulary: Vocabulary, wanted: bool
    ) -> tuple[Tensor, Tensor | None]:
        lse = vocabulary.log_sum_exp(row_lse(logits_CV, weight_C1.dtype))
        column_C1, here_C1 = vocabulary.columns(target_C1)
        return losses(logits_CV, lse(), column_C1, _hits(here_C1, weight_C1), weight_C1, wanted)

    return compiled


def _row_lse(logits_CV: Tensor, dtype: torch.dtype) -> Tensor:
    """The log-sum-exp [C] of each row."""
    wide_CV = logits_CV.to(dtype)
    top_C1 = wide_CV.amax(1, keepdim=True)
    return ((wide_CV - top_C1).exp().sum(1, keepdim=True).log() + top_C1).squeeze(1)


def _losses(
    logits_CV: Tensor, lse_C: Tensor, column_C1: Tensor, hit_C1: Tensor, weight_C1: Tensor, wanted: bool
) -> tuple[Tensor, Tensor | None]:
    """As `CrossEntropy`, from the log-sum-exp of all columns, each target's local column, and whether it is local."""
    wide_CV, lse_C1 = logits_CV.to(lse_C.dtype), lse_C[:, None]
    total = -((wide_CV.gather(1, column_C1) - lse_C1) * weight_C1 * hit_C1).sum()
    if not wanted:
        return total, None
    columns_V = torch.arange(logits_CV.shape[1], device=logits_CV.device)
    p_CV = (wide_CV - lse_C1).exp()
    return total, torch.where(columns_V == column_C1, p_CV - hit_C1, p_CV).to(logits_CV.dtype)


def _hits(here_C1: Tensor | None, weight_C1: Tensor) -> Tensor:
    """1 where the target is local, else 0: [C, 1]."""
    return torch.ones_like(weight_C1) if here_C1 is None else here_C1.to(weight_C1.dtype)


# ----------------------------------------------------------------------------------------------- the loss of all tokens


def chunked_loss(
    x_NE: Tensor,
    weight_VE: Tensor,
    labels_N: Tensor,
    scale: Tensor,
    chunk: int,
    want_gradients: bool,
    add_weight_gradient: Callable[[Tensor, Tensor], None],
    vocabulary: Vocabulary = LOCAL,
    cross_entropy: CrossEntropy = cross_entropy,
) -> tuple[Tensor, Tensor | None]:
    """(scale * sum of the losses over valid tokens, its gradient with respect to x or None).

    It runs chunk by chunk. Only the logits of one chunk exist at a time, and the gradients are computed in the forward,
    while those logits exist.

    Args:
        scale: a scalar.
        chunk: number of tokens whose logits exist at a time.
        want_gradients: whether to compute the gradients.
        add_weight_gradient: called with (a, b) for every chunk; the gradient of the weight is the sum of a @ b.
        vocabulary: how tokens and logits are sharded.
        cross_entropy: computes the loss of a chunk's logits, and its gradient.
    """
    total = torch.zeros((), dtype=_wide(x_NE.dtype), device=x_NE.device)
    dx_NE = torch.empty_like(x_NE) if want_gradients else None
    for rows, x_CE, labels_C in vocabulary.chunks(x_NE, labels_N, chunk):
        valid_C = labels_C != IGNORE
        target_C1 = labels_C.where(valid_C, 0)[:, None]
        weight_C1 = (valid_C * scale).to(total.dtype)[:, None]
        of_chunk, dlogits_CV = cross_entropy(x_CE @ weight_VE.t(), target_C1, weight_C1, vocabulary, want_gradients)
        total += of_chunk
        if dlogits_CV is not None:
            # a token's weight is applied to the narrow matrices, which saves a pass over the wide one
            share_C1 = weight_C1.to(x_NE.dtype)
            vocabulary.add_input_gradient(dx_NE[rows], dlogits_CV, weight_VE, share_C1)
            add_weight_gradient(dlogits_CV.t(), x_CE * share_C1)
    vocabulary.finish()
    return vocabulary.report(total), dx_NE


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The precision of sums over tokens: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x_NE: Tensor,
        weight_VE: Tensor,
        labels_N: Tensor,
        scale: Tensor,
        chunk: int,
        vocabulary: Vocabulary,
        wanted: bool,
    ) -> Tensor:
        dw_VE = torch.zeros_like(weight_VE, dtype=_wide(weight_VE.dtype)) if wanted else None
        add = lambda a, b: accumulate_product(dw_VE, a, b)
        total, dx_NE = chunked_loss(x_NE, weight_VE, labels_N, scale, chunk, wanted, add, vocabulary)
        ctx.save_for_backward(dx_NE, dw_VE)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor):
        dx_NE, dw_VE = ctx.saved_tensors
        return dx_NE * grad, dw_VE * grad, *(None,) * 5


def head_loss(
    x_NE: Tensor, weight_VE: Tensor, labels_BT: Tensor, scale: Tensor, chunk: int, vocabulary: Vocabulary = LOCAL
) -> Tensor:
    """scale * sum over valid tokens of the cross-entropy of `x @ weight.T` and `labels`.

    Args:
        x_NE: final hidden states, the rows of the batch concatenated.
        weight_VE: output embedding.
        labels_BT: token ids; `IGNORE` marks tokens without a loss.
        scale: a scalar. For the training loss it is one over the number of valid tokens of the *global* batch.
        chunk: number of tokens whose logits exist at a time.
        vocabulary: how tokens and logits are sharded.

    Returns:
        A scalar, fp32 or wider.
    """
    wanted = torch.is_grad_enabled()  # checked here, since it is always off inside a Function
    return _HeadLoss.apply(x_NE, weight_VE, labels_BT.flatten(), scale, chunk, vocabulary, wanted)
