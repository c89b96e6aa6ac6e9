"""Muon for hidden matrices, AdamW for all other tensors.

Muon (Jordan, 2024, https://kellerjordan.github.io/posts/muon) replaces the momentum of a matrix by the nearest
orthogonal matrix. The update rule is the one of `torch.optim.Muon`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ndtrain.config import OptimConfig
from ndtrain.mesh.sharding import TensorLayout, Tensors
from ndtrain.optim.adamw import STATE_DTYPES, AdamW
from ndtrain.optim.newton_schulz import flops_of, orthogonalise
from ndtrain.optim.optimizer import (
    OptimTensor,
    Shape,
    StateSpec,
    Update,
    WholeTensorOptimizer,
    WholeTensors,
    decay_weight,
)
from ndtrain.optim.rounding import rounded
from ndtrain.plugins import register_optimizer

NS_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
_CHUNK = 1 << 22  # elements whose rounding needs memory at one time


@register_optimizer("muon")
class Muon(WholeTensorOptimizer):
    """Muon with Nesterov momentum and decoupled weight decay.

    The momentum is sharded like the weights. The owner of a matrix gets what is to be orthogonalised, and returns the
    orthogonal matrix.
    """

    whole = Tensors.HIDDEN

    def __init__(self, cfg: OptimConfig):
        super().__init__(cfg)
        self._adamw = AdamW(cfg)
        self._factor = 1.0 if cfg.adamw_lr is None else cfg.adamw_lr / cfg.lr

    @classmethod
    def state_spec(cls, cfg: OptimConfig) -> tuple[StateSpec, ...]:
        dtype = STATE_DTYPES[cfg.state_dtype]
        moments = (replace(spec, tensors=Tensors.OTHER) for spec in AdamW.state_spec(cfg))
        return StateSpec("momentum_buffer", dtype, tensors=Tensors.HIDDEN), *moments

    @classmethod
    def kind_of(cls, tensor: TensorLayout) -> Tensors:
        return Tensors.HIDDEN if tensor.hidden else Tensors.OTHER

    @classmethod
    def sent(cls, cfg: OptimConfig, master: torch.dtype) -> torch.dtype:
        return NS_DTYPES[cfg.ns_dtype]

    @classmethod
    def flops(cls, cfg: OptimConfig, shape: Shape) -> float:
        return flops_of(cfg.ns, cfg.ns_steps, shape)

    def prepare(self, tensors: Sequence[OptimTensor], update: Update) -> None:
        """Add the gradients to the momentum, and leave in them what is to be orthogonalised."""
        made = 1 - update.found_inf.double()
        new, decay = (1 - self.cfg.momentum) * made, self.cfg.momentum * made  # 0: nothing changes
        for t in tensors:
            if update.grad_scale is not None:
                t.grad.div_(update.grad_scale.to(t.grad.dtype))
            t.grad.masked_fill_(update.found_inf.bool(), 0)
            momentum, rates = t.state["momentum_buffer"], (new.to(t.grad.dtype), decay.to(t.grad.dtype))
            if momentum.dtype == t.grad.dtype:
                _nesterov(t.grad, momentum, *rates)
                continue
            for piece in (chunk for of_tensor in t.slices for chunk in of_tensor.chunks(_CHUNK)):
                wide = momentum[piece.at].to(t.grad.dtype)
                _nesterov(t.grad[piece.at], wide, *rates)
                momentum[piece.at] = rounded(wide, piece, update.step)

    def direction(self, whole: WholeTensors, update: Update) -> Tensor:
        return orthogonalise(whole.grads, self.cfg.ns, self.cfg.ns_steps)

    def step(self, tensors: Sequence[OptimTensor], update: Update) -> None:
        hidden = [t for t in tensors if t.hidden]
        for t in hidden:
            decay_weight(t, update)
        for rate, weights, directions in self._by_rate(hidden, update.lr):
            torch._foreach_add_(weights, directions, alpha=-rate)
        if others := [t for t in tensors if not t.hidden]:
            self._adamw.step(others, update._replace(lr=update.lr * self._factor))

    def _by_rate(self, tensors: Sequence[OptimTensor], lr: float) -> Iterator[tuple[float, list[Tensor], list[Tensor]]]:
        """Yield (learning rate, weights, directions) of the matrices that have the same learning rate."""
        alike: dict[float, tuple[list[Tensor], list[Tensor]]] = {}
        for t in tensors:
            for piece in t.slices:
                rate = lr * t.lr_mult * self._adjusted(piece.tensor.shape)
                weights, directions = alike.setdefault(rate, ([], []))
                weights.append(t.weight[piece.at])
                directions.append(t.grad[piece.at])
        yield from ((rate, *of) for rate, of in alike.items())

    def _adjusted(self, shape: Shape) -> float:
        rows, columns = shape
        if self.cfg.adjust == "original":
            return math.sqrt(max(1, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))


def _nesterov(grad: Tensor, momentum: Tensor, new: Tensor, decay: Tensor) -> None:
    momentum.lerp_(grad, new)
    grad.lerp_(momentum, decay)
