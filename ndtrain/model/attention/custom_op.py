"""Attention as a custom op in compiled graphs: packed documents, windows, and attention over keys of other devices.

The compiler does not look into a custom op. A batch with other documents therefore neither breaks the graph nor causes
a recompilation. Scores that differ between batches are passed as a **handle**, an integer in a CPU tensor. The op looks
up the `Scores` of the handle when it runs. (A Python value would be a constant of the graph.)

Shape legend: B batch, T time, N query heads, K key/value heads, D head_dim.
"""

from dataclasses import replace
from itertools import count
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ndtrain.model.attention.scores import Scores
from ndtrain.model.opaque import opaque


class Attention(Protocol):
    """Softmax attention as a pair of functions without autograd."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """Return (output [B, N, T, D], log-sum-exp [B, N, T]) for q [B, N, T, D], k and v [B, K, T, D]."""
        ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v. They do not share memory, and are in the precision of q or wider."""
        ...


_numbers = count()
_registry: WeakValueDictionary[int, Any] = WeakValueDictionary()


def _register(x: Any) -> int:
    """Register x for as long as it is referenced elsewhere. Return its number."""
    number = next(_numbers)
    _registry[number] = x
    return number


def handle(scores: Scores) -> Tensor:
    """Return the scores' handle, an int64 scalar on the CPU. It is valid while the scores are referenced elsewhere."""
    return torch.tensor(_register(scores))


def as_custom_op(
    attention: "AttentionOp", q_BTND: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, scores: Scores, handle: Tensor
) -> Tensor:
    """Return the output [B, T, N, D] of an attention, in a graph that is being compiled.

    When the graph runs, it uses the scores of `handle`. Only `first_head` comes from `scores`."""
    return attend(q_BTND, k_BTKD, v_BTKD, handle, attention.number, scores.first_head)[0]


class AttentionOp:
    """An `Attention` that compiled graphs can call.

    Attributes:
        number: its number in the registry, a constant of the graph.
    """

    def __init__(self) -> None:
        self.number = _register(self)


def _scores(handle: Tensor, first_head: int) -> Scores:
    """Return the scores of a handle, with `first_head` set."""
    return replace(_registry[handle.item()], first_head=first_head)


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    """Return views [B, N, T, D] of tensors [B, T, N, D]."""
    return [x.transpose(1, 2) for x in tensors]


@opaque
def attend(
    q_BTND: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, handle: Tensor, number: int, first_head: int
) -> tuple[Tensor, Tensor]:
    """Return (output [B, T, N, D], log-sum-exp [B, N, T]), both contiguous and in memory of their own."""
    out, lse = _registry[number].forward(*_heads_first(q_BTND, k_BTKD, v_BTKD), _scores(handle, first_head))
    return out.transpose(1, 2).contiguous(), lse.contiguous()


@attend.register_fake
def _(q_BTND, k_BTKD, v_BTKD, handle, number, first_head):
    B, T, N, _ = q_BTND.shape
    wide = torch.promote_types(q_BTND.dtype, torch.float32)
    return q_BTND.new_empty(q_BTND.shape), q_BTND.new_empty(B, N, T, dtype=wide)


@opaque
def attend_backward(
    grad_BTND: Tensor,
    q_BTND: Tensor,
    k_BTKD: Tensor,
    v_BTKD: Tensor,
    out_BTND: Tensor,
    lse_BNT: Tensor,
    handle: Tensor,
    number: int,
    first_head: int,
) -> tuple[Tensor, Tensor, Tensor]:
    grad, *saved = _heads_first(grad_BTND, q_BTND, k_BTKD, v_BTKD, out_BTND)
    gradients = _registry[number].backward(grad, *saved, lse_BNT, _scores(handle, first_head))
    return tuple(x.transpose(1, 2).to(q_BTND.dtype).contiguous() for x in gradients)


@attend_backward.register_fake
def _(grad_BTND, q_BTND, k_BTKD, v_BTKD, out_BTND, lse_BNT, handle, number, first_head):
    return tuple(x.new_empty(x.shape) for x in (q_BTND, k_BTKD, v_BTKD))


def _save_for_backward(ctx, inputs: tuple, output: tuple) -> None:
    q_BTND, k_BTKD, v_BTKD, handle, ctx.number, ctx.first_head = inputs
    ctx.save_for_backward(q_BTND, k_BTKD, v_BTKD, *output, handle)


def _backward(ctx, grad_BTND: Tensor, _: Tensor | None):
    gradients = attend_backward(grad_BTND, *ctx.saved_tensors, ctx.number, ctx.first_head)
    return *gradients, None, None, None


attend.register_autograd(_backward, setup_context=_save_for_backward)
