"""Muon for hidden matrices, AdamW for all other tensors.

Muon (Jordan, 2024, https://kellerjordan.github.io/posts/muon) replaces the momentum of a matrix by the nearest
orthogonal matrix. The update rule is the one of `torch.optim.Muon`.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ndtrain.config import OptimConfig
from ndtrain.mesh.sharding import TensorLayout, Tensors
from ndtrain.optim.adamw import STATE_DTYPES, AdamW
from ndtrain.optim.newton_schulz import flops_of, orthogonalise, workspace_of
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
SQUARES = "row_squares"  # the state of NorMuon: the average of the mean square of each row of the direction
_Alike = dict[tuple[float, float], tuple[list[Tensor], list[Tensor]]]  # factors -> weights, directions
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
        self._alike: _Alike | None = None  # made in the first step, since the tensors stay the same
        self._factor = 1.0 if cfg.adamw_lr is None else cfg.adamw_lr / cfg.lr

    @classmethod
    def state_spec(cls, cfg: OptimConfig) -> tuple[StateSpec, ...]:
        dtype = STATE_DTYPES[cfg.state_dtype]
        moments = (replace(spec, tensors=Tensors.OTHER) for spec in AdamW.state_spec(cfg))
        squares = StateSpec(SQUARES, shape=lambda shape: shape[:1], tensors=Tensors.HIDDEN)
        squares = [squares] * (cfg.normalize == "neurons")
        return StateSpec("momentum_buffer", dtype, tensors=Tensors.HIDDEN), *squares, *moments

    @classmethod
    def kind_of(cls, tensor: TensorLayout) -> Tensors:
        return Tensors.HIDDEN if tensor.hidden else Tensors.OTHER

    @classmethod
    def width_power(cls, cfg: OptimConfig) -> float:
        # an orthogonal update does not grow with the width, unless adjust multiplies it by the root of the width
        return 0.5 if cfg.adjust == "match_rms_adamw" else 0.0

    @classmethod
    def sent(cls, cfg: OptimConfig, master: torch.dtype) -> torch.dtype:
        return NS_DTYPES[cfg.ns_dtype]

    @classmethod
    def flops(cls, cfg: OptimConfig, tensor: TensorLayout) -> float:
        shape = _block(cfg, tensor.shape, tensor.dims[0].width)
        return tensor.numel / math.prod(shape) * flops_of(cfg.ns, cfg.ns_steps, shape)

    @classmethod
    def workspace(cls, cfg: OptimConfig, shape: Shape, rows: int, sent: torch.dtype) -> int:
        numel, block = math.prod(shape), _block(cfg, shape[1:], rows)
        needed = workspace_of(cfg.ns, (numel // math.prod(block), *block)) * sent.itemsize
        if cfg.normalize == "neurons":  # the squares of the directions are in fp32
            return max(needed, numel * (sent.itemsize + 2 * torch.float32.itemsize))
        return needed

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
        blocks = whole.grads.view(-1, *_block(self.cfg, whole.grads.shape[1:], whole.rows))
        directions = orthogonalise(blocks, self.cfg.ns, self.cfg.ns_steps)
        if self.cfg.normalize == "neurons":
            self._normalise(directions, whole.state[SQUARES].view(*directions.shape[:2]), update)
        return directions.reshape(whole.grads.shape)

    def _normalise(self, directions: Tensor, squares: Tensor, update: Update) -> None:
        """Divide each row by the root of a moving average of its mean square, and give each matrix the norm of an
        orthogonal one (NorMuon: Li et al., 2025, arXiv:2510.05491, algorithm 1).

        Args:
            directions: [k, A, B]. squares: [k, A].
        """
        rate = (1 - self.cfg.betas[1]) * (1 - update.found_inf)
        squares.lerp_(directions.to(squares.dtype).square().mean(-1), rate.to(squares))
        directions.div_(squares.sqrt().add_(self.cfg.eps)[..., None])
        norm = torch.linalg.vector_norm(directions, dim=(1, 2), keepdim=True, dtype=squares.dtype)
        directions.mul_(math.sqrt(min(directions.shape[1:])) / norm.clamp(min=self.cfg.eps))

    def step(self, tensors: Sequence[OptimTensor], update: Update) -> None:
        hidden = [t for t in tensors if t.hidden]
        for t in hidden:
            decay_weight(t, update)
        if self._alike is None:
            self._alike = self._group(hidden)
        for (lr_mult, adjusted), (weights, directions) in self._alike.items():
            torch._foreach_add_(weights, directions, alpha=-(update.lr * lr_mult * adjusted))
        if others := [t for t in tensors if not t.hidden]:
            self._adamw.step(others, update._replace(lr=update.lr * self._factor))

    def _group(self, tensors: Sequence[OptimTensor]) -> _Alike:
        """Return the matrices by the factors of their learning rate."""
        alike: _Alike = {}
        for t in tensors:
            for piece in t.slices:
                weights, directions = alike.setdefault((t.lr_mult, self._adjusted(piece.tensor)), ([], []))
                weights.append(t.weight[piece.at])
                directions.append(t.grad[piece.at])
        return alike

    def _adjusted(self, tensor: TensorLayout) -> float:
        rows, columns = _block(self.cfg, tensor.shape, tensor.dims[0].width)
        if self.cfg.adjust == "original":
            return math.sqrt(max(1, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))


def _block(cfg: OptimConfig, shape: Shape, rows: int) -> Shape:
    """Return the shape of the parts of a matrix that are orthogonalised.

    Args:
        rows: the number of rows of one head; 1 if the matrix is not divided into heads.
    """
    return (rows, shape[1]) if cfg.split == "heads" and rows > 1 else shape


def _nesterov(grad: Tensor, momentum: Tensor, new: Tensor, decay: Tensor) -> None:
    momentum.lerp_(grad, new)
    grad.lerp_(momentum, decay)
