"""Attention as one node of a compiled graph, where it is more than one call of PyTorch's: packed documents, windows,
and attention whose keys are elsewhere. What the compiler cannot look into is opaque to it; it neither breaks the graph
nor is traced anew when a batch has other documents.

What differs from batch to batch reaches the node as a *ticket*: a number in a tensor on the CPU, under which its
`Scores` are found when the node runs. (As Python values they would be constants of the graph.)

Shape legend: B batch, T time, N query heads, K key/value heads, D head_dim.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ndtrain.model.attention.scores import Scores


class Attention(Protocol):
    """Softmax attention as a pair of functions without autograd."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """q [B, N, T, D], k and v [B, K, T, D] -> (output [B, N, T, D], log-sum-exp [B, N, T])."""
        ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v, shaped as these, no two in the same memory; in their precision or a wider."""
        ...


_numbers = count()
_found: WeakValueDictionary[int, Any] = WeakValueDictionary()


def _register(x: Any) -> int:
    number = next(_numbers)
    _found[number] = x
    return number


def handle(scores: Scores) -> Tensor:
    """The number that a node finds these scores under while someone keeps them; an int64 scalar on the CPU."""
    return torch.tensor(_register(scores))


def as_custom_op(
    attention: "AttentionOp", q_BTND: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, scores: Scores, handle: Tensor
) -> Tensor:
    """The output [B, T, N, D] of an attention, inside a graph that is being compiled. Of `scores` the ticket's count,
    but for the slopes."""
    return _attend(q_BTND, k_BTKD, v_BTKD, handle, attention.number, scores.slopes)[0]


class AttentionOp:
    """An `Attention` that graphs can hold as a node.

    Attributes:
        number: what the graphs call it.
    """

    def __init__(self) -> None:
        self.number = _register(self)


def _scores(handle: Tensor, slopes: Sequence[float] | None) -> Scores:
    return replace(_found[handle.item()], slopes=None if slopes is None else tuple(slopes))


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


@torch.library.custom_op("ndtrain::attend", mutates_args=())
def _attend(
    q_BTND: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, handle: Tensor, number: int, slopes: Sequence[float] | None
) -> tuple[Tensor, Tensor]:
    """(output [B, T, N, D], log-sum-exp [B, N, T]), both contiguous and nobody else's."""
    out, lse = _found[number].forward(*_heads_first(q_BTND, k_BTKD, v_BTKD), _scores(handle, slopes))
    return out.transpose(1, 2).contiguous(), lse.contiguous()


@_attend.register_fake
def _(q_BTND, k_BTKD, v_BTKD, handle, number, slopes):
    B, T, N, _ = q_BTND.shape
    wide = torch.promote_types(q_BTND.dtype, torch.float32)
    return q_BTND.new_empty(q_BTND.shape), q_BTND.new_empty(B, N, T, dtype=wide)


@torch.library.custom_op("ndtrain::attend_backward", mutates_args=())
def _attend_backward(
    grad_BTND: Tensor,
    q_BTND: Tensor,
    k_BTKD: Tensor,
    v_BTKD: Tensor,
    out_BTND: Tensor,
    lse_BNT: Tensor,
    handle: Tensor,
    number: int,
    slopes: Sequence[float] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    grad, *saved = _heads_first(grad_BTND, q_BTND, k_BTKD, v_BTKD, out_BTND)
    gradients = _found[number].backward(grad, *saved, lse_BNT, _scores(handle, slopes))
    return tuple(x.transpose(1, 2).to(q_BTND.dtype).contiguous() for x in gradients)


@_attend_backward.register_fake
def _(grad_BTND, q_BTND, k_BTKD, v_BTKD, out_BTND, lse_BNT, handle, number, slopes):
    return tuple(x.new_empty(x.shape) for x in (q_BTND, k_BTKD, v_BTKD))


def _keep_for_backward(ctx, inputs: tuple, output: tuple) -> None:
    q_BTND, k_BTKD, v_BTKD, handle, ctx.number, ctx.slopes = inputs
    ctx.save_for_backward(q_BTND, k_BTKD, v_BTKD, *output, handle)


def _backward(ctx, grad_BTND: Tensor, _: Tensor | None):
    gradients = _attend_backward(grad_BTND, *ctx.saved_tensors, ctx.number, ctx.slopes)
    return *gradients, None, None, None


_attend.register_autograd(_backward, setup_context=_keep_for_backward)
