"""Output projection and cross-entropy in one, over chunks of tokens.

Shape legend: N tokens, C tokens of a chunk, E hidden_size, V vocabulary.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ndtrain.model.matmul_accumulate import accumulate_product

IGNORE = -100  # a label that does not count, as in torch.nn.functional.cross_entropy


class Vocabulary:
    """How the head's tokens and logits lie: here all of them on this device."""

    def chunks(self, x_NE: Tensor, labels_N: Tensor, chunk: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(rows of x, the hidden states of those tokens, their labels), `chunk` tokens at a time."""
        for start in range(0, len(x_NE), chunk):
            rows = slice(start, start + chunk)
            yield rows, x_NE[rows], labels_N[rows]

    def log_softmax(
        self, logits_CV: Tensor, target_C1: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(log-probabilities of the columns here, each target's column here, whether it is here; None: all are)"""
        return logits_CV.log_softmax(dim=-1, dtype=dtype), target_C1, None

    def add_input_gradient(self, out_CE: Tensor, dlogits_CV: Tensor, weight_VE: Tensor, share_C1: Tensor) -> None:
        """out = share * (dlogits @ weight), on return or by `finish`."""
        torch.mm(dlogits_CV, weight_VE, out=out_CE)
        out_CE *= share_C1

    def finish(self) -> None:
        """What was started is done."""

    def report(self, total: Tensor) -> Tensor:
        """The loss that this device answers for."""
        return total


LOCAL = Vocabulary()


def chunked_loss(
    x_NE: Tensor,
    weight_VE: Tensor,
    labels_N: Tensor,
    scale: Tensor,
    chunk: int,
    want_gradients: bool,
    add_weight_gradient: Callable[[Tensor, Tensor], None],
    vocabulary: Vocabulary = LOCAL,
) -> tuple[Tensor, Tensor | None]:
    """(scale * sum of the losses over valid tokens, its gradient by x), chunk by chunk: logits of all tokens never
    exist, and the gradients are made while a chunk's are at hand.

    Args:
        scale: scalar that the sum is multiplied with.
        chunk: tokens whose logits exist at one time.
        add_weight_gradient: called with (a, b) for every chunk; the weight's gradient is the sum of a @ b.
    """
    total = torch.zeros((), dtype=_wide(x_NE.dtype), device=x_NE.device)
    dx_NE = torch.empty_like(x_NE) if want_gradients else None
    for rows, x_CE, labels_C in vocabulary.chunks(x_NE, labels_N, chunk):
        valid_C = labels_C != IGNORE
        target_C1 = labels_C.where(valid_C, 0)[:, None]
        weight_C1 = (valid_C * scale).to(total.dtype)[:, None]
        logp_CV, column_C1, here_C1 = vocabulary.log_softmax(x_CE @ weight_VE.t(), target_C1, total.dtype)
        hit_C1 = torch.ones_like(weight_C1) if here_C1 is None else here_C1.to(weight_C1.dtype)
        total -= (logp_CV.gather(1, column_C1) * weight_C1 * hit_C1).sum()
        if want_gradients:
            dlogits_CV = logp_CV.exp_()
            dlogits_CV.scatter_add_(1, column_C1, -hit_C1)
            dlogits_CV = dlogits_CV.to(x_NE.dtype)
            # a token's share is put on the narrow matrices: one pass less over the wide one
            share_C1 = weight_C1.to(x_NE.dtype)
            vocabulary.add_input_gradient(dx_NE[rows], dlogits_CV, weight_VE, share_C1)
            add_weight_gradient(dlogits_CV.t(), x_CE * share_C1)
    vocabulary.finish()
    return vocabulary.report(total), dx_NE


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The precision sums over tokens are taken in: at least fp32."""
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
    """scale * sum over valid tokens of the cross-entropy of `x @ weight.T` against `labels`.

    Args:
        x_NE: final hidden states, of the tokens row behind row.
        weight_VE: output embedding.
        labels_BT: token ids; `IGNORE` does not count.
        scale: scalar; one over the number of valid tokens of the *global* batch makes it the training loss.
        chunk: tokens whose logits exist at one time.

    Returns:
        A scalar, fp32 or wider.
    """
    wanted = torch.is_grad_enabled()  # asked here: inside a Function it never is
    return _HeadLoss.apply(x_NE, weight_VE, labels_BT.flatten(), scale, chunk, vocabulary, wanted)
