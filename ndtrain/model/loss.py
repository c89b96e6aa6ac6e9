"""Output projection and cross-entropy in one, over chunks of tokens.

Shape legend: N tokens, C tokens of a chunk, E hidden_size, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor

IGNORE = -100  # a label that does not count, as in torch.nn.functional.cross_entropy


def chunked_loss(
    x_NE: Tensor,
    weight_VE: Tensor,
    labels_N: Tensor,
    scale: Tensor,
    chunk: int,
    want_gradients: bool,
    add_weight_gradient: Callable[[Tensor, Tensor], None],
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
    for start in range(0, x_NE.shape[0], chunk):
        rows = slice(start, start + chunk)
        x_CE, labels_C = x_NE[rows], labels_N[rows]
        valid_C = labels_C != IGNORE
        target_C1 = labels_C.where(valid_C, 0)[:, None]
        weight_C1 = (valid_C * scale).to(total.dtype)[:, None]
        logp_CV = (x_CE @ weight_VE.t()).log_softmax(dim=-1, dtype=total.dtype)
        total -= (logp_CV.gather(1, target_C1) * weight_C1).sum()
        if want_gradients:
            dlogits_CV = logp_CV.exp_()
            dlogits_CV.scatter_add_(1, target_C1, torch.full_like(weight_C1, -1))
            dlogits_CV = dlogits_CV.to(x_NE.dtype)
            # a token's share is put on the narrow matrices: one pass less over the wide one
            share_C1 = weight_C1.to(x_NE.dtype)
            torch.mm(dlogits_CV, weight_VE, out=dx_NE[rows])
            dx_NE[rows] *= share_C1
            add_weight_gradient(dlogits_CV.t(), x_CE * share_C1)
    return total, dx_NE


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The precision sums over tokens are taken in: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_NE: Tensor, weight_VE: Tensor, labels_N: Tensor, scale: Tensor, chunk: int) -> Tensor:
        wanted = any(ctx.needs_input_grad)
        dw_VE = torch.zeros_like(weight_VE, dtype=_wide(weight_VE.dtype)) if wanted else None

        def add(a: Tensor, b: Tensor) -> None:
            if dw_VE.dtype == a.dtype:
                dw_VE.addmm_(a, b)
            else:
                dw_VE.add_(a @ b)

        total, dx_NE = chunked_loss(x_NE, weight_VE, labels_N, scale, chunk, wanted, add)
        ctx.save_for_backward(dx_NE, dw_VE)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor):
        dx_NE, dw_VE = ctx.saved_tensors
        return dx_NE * grad, dw_VE * grad, None, None, None


def head_loss(x_BTE: Tensor, weight_VE: Tensor, labels_BT: Tensor, scale: Tensor, chunk: int) -> Tensor:
    """scale * sum over valid tokens of the cross-entropy of `x @ weight.T` against `labels`.

    Args:
        x_BTE: final hidden states.
        weight_VE: output embedding.
        labels_BT: token ids; `IGNORE` does not count.
        scale: scalar; one over the number of valid tokens of the *global* batch makes it the training loss.
        chunk: tokens whose logits exist at one time.

    Returns:
        A scalar, fp32 or wider.
    """
    return _HeadLoss.apply(x_BTE.flatten(0, -2), weight_VE, labels_BT.flatten(), scale, chunk)
