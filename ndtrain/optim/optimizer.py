"""The interface of an optimizer: the state that it declares, and one update of some tensors.

`parallel/sharded_optimizer.py` chooses these tensors. An optimizer gets slices of the flat buffers and works on them
element by element. An optimizer that needs whole tensors (`WholeTensorOptimizer`) also gets each whole gradient on one
rank, which owns the tensor.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ndtrain.config import OptimConfig
from ndtrain.mesh.sharding import TensorLayout, Tensors

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StateSpec:
    """One kind of optimizer state. Each of the parameters that have it has one state tensor of this kind.

    Sharding, offload, checkpoints and memory formulas read the spec.

    Attributes:
        name: its prefix in checkpoints: `exp_avg.<parameter>`.
        dtype: its dtype; None: the dtype of the master weights.
        shape: maps the parameter's shape to the shape of the state. None: the parameter's own shape; the state is then
            sharded like the parameter. State of another shape is held by the rank that owns the whole tensor.
        tensors: the parameters that have this state.
    """

    name: str
    dtype: torch.dtype | None = None
    shape: Callable[[Shape], Shape] | None = None
    tensors: Tensors = Tensors.ALL

    def shape_of(self, parameter: Shape) -> Shape:
        return parameter if self.shape is None else self.shape(parameter)


class TensorSlice(NamedTuple):
    """Contiguous elements of one tensor in a shard.

    Attributes:
        at: their positions in the shard.
        tensor: the tensor's layout.
        start: the offset of the first element in the local row-major tensor.
    """

    at: slice
    tensor: TensorLayout
    start: int

    def chunks(self, most: int) -> Iterator["TensorSlice"]:
        """Yield the same elements, at most `most` at a time."""
        for a in range(self.at.start, self.at.stop, most):
            b = min(a + most, self.at.stop)
            yield self._replace(at=slice(a, b), start=self.start + a - self.at.start)


@dataclass(frozen=True, eq=False)
class OptimTensor:
    """The elements of an update: a slice of a flat buffer [n].

    Attributes:
        weight, grad: of one shape, in master precision; `weight` is changed in place, `grad` may be.
        state: name -> state tensor, changed in place.
        weight_decay: 0 for vectors.
        slices: the tensors that the elements belong to; padding belongs to none.
        lr_mult: the factor of the learning rate.
    """

    weight: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    weight_decay: float
    slices: tuple[TensorSlice, ...] = ()
    lr_mult: float = 1.0

    @property
    def hidden(self) -> bool:
        """True if the elements belong to hidden matrices."""
        return bool(self.slices) and self.slices[0].tensor.hidden


class WholeTensors(NamedTuple):
    """Tensors of one shape, whole on the rank that owns them.

    Attributes:
        names: of the tensors.
        grads: what `prepare` has left in their gradients [k, *shape], in the dtype of `WholeTensorOptimizer.sent`.
        rows: the number of rows of one head; 1 if the tensors are not divided into heads.
        state: name -> states of another shape than the tensors' [k, *shape of the state].
    """

    names: tuple[str, ...]
    grads: Tensor
    rows: int
    state: dict[str, Tensor]


class Update(NamedTuple):
    """The arguments of an update that are the same for all tensors of a step.

    Attributes:
        step: the number of the step, from 1.
        made: the number of earlier updates, without skipped ones; a scalar on the device of the state.
        lr: the learning rate of a tensor whose `lr_mult` is 1.
        found_inf: 1 if the loss or a gradient is not finite, and nothing may change; otherwise 0. A scalar like `made`.
        grad_scale: the divisor of the gradients, for clipping; None: 1. A scalar like `made`.
    """

    step: int
    made: Tensor
    lr: float
    found_inf: Tensor
    grad_scale: Tensor | None


class Optimizer(ABC):
    """The base class of optimizers. One instance updates the same tensors in every step."""

    def __init__(self, cfg: OptimConfig):
        self.cfg = cfg

    @classmethod
    @abstractmethod
    def state_spec(cls, cfg: OptimConfig) -> tuple[StateSpec, ...]:
        """Return the kinds of state of the parameters. The state begins as zeros."""

    @classmethod
    def kind_of(cls, tensor: TensorLayout) -> Tensors:
        """Return the tensors that are updated like this one. A slice of an update has tensors of one kind."""
        return Tensors.ALL

    @classmethod
    def width_power(cls, cfg: OptimConfig) -> float | None:
        """Return the power of the model's width by which muP divides the learning rate of hidden matrices. The optimum
        of `optim.lr` then does not depend on the width (Yang et al., 2022, arXiv:2203.03466, table 3).

        Head and routers get the power 1, as in the paper for Adam, and all other tensors 0. None: no power is known,
        and `model.mup_base` is refused.
        """
        return None

    @abstractmethod
    def step(self, tensors: Sequence[OptimTensor], update: Update) -> None:
        """Update all tensors once, or change nothing if `update.found_inf` is 1."""


class PerTensorOptimizer(Optimizer):
    """An optimizer written as the update of one tensor. The host waits for `found_inf` once a step."""

    def step(self, tensors: Sequence[OptimTensor], update: Update) -> None:
        if update.found_inf.item():
            return
        made = int(update.made.item())
        for tensor in tensors:
            if update.grad_scale is not None:
                tensor.grad.div_(update.grad_scale.to(tensor.grad.dtype))
            self.update(tensor, update.lr * tensor.lr_mult, made + 1)

    @abstractmethod
    def update(self, tensor: OptimTensor, lr: float, step: int) -> None:
        """Change `tensor.weight` and `tensor.state` in place. The gradient is already clipped.

        Args:
            lr: the tensor's learning rate, including `lr_mult`.
            step: the number of updates, including this one.
        """


class WholeTensorOptimizer(Optimizer):
    """An optimizer that computes the update of some tensors from their whole gradients.

    A step has three parts. `prepare` works on slices, and leaves in their gradients what the owners of the tensors
    need. `direction` computes the direction of the update on the rank that owns a tensor. `step` gets slices again: the
    gradients of whole tensors are now elements of their directions.

    Attributes:
        whole: the tensors that are needed whole.
    """

    whole = Tensors.ALL

    @classmethod
    def sent(cls, cfg: OptimConfig, master: torch.dtype) -> torch.dtype:
        """Return the dtype of gradients and directions on the way to the owners and back.

        Args:
            master: the dtype of the master weights.
        """
        return master

    @classmethod
    def flops(cls, cfg: OptimConfig, tensor: TensorLayout) -> float:
        """Return the FLOPs of a direction. The tensors of all owners have about the same sum."""
        return float(tensor.numel)

    @classmethod
    def workspace(cls, cfg: OptimConfig, shape: Shape, rows: int, sent: torch.dtype) -> int:
        """Return the bytes of memory that `direction` allocates for tensors [k, *shape]: here, of the directions alone.

        Args:
            rows: as in `WholeTensors`.
            sent: the dtype of `WholeTensors.grads`.
        """
        return math.prod(shape) * sent.itemsize

    def prepare(self, tensors: Sequence[OptimTensor], update: Update) -> None:
        """Prepare the gradients of whole tensors: here, divide them by `update.grad_scale`."""
        if update.grad_scale is not None:
            for tensor in tensors:
                tensor.grad.div_(update.grad_scale.to(tensor.grad.dtype))

    @abstractmethod
    def direction(self, whole: WholeTensors, update: Update) -> Tensor:
        """Return the directions [k, *shape] of tensors of one shape. Change `whole.state` in place, unless
        `update.found_inf` is 1."""

    def step(self, tensors: Sequence[OptimTensor], update: Update) -> None:
        """Decay the weights and subtract the directions times the learning rate. If `update.found_inf` is 1, change
        nothing."""
        for t in tensors:
            decay_weight(t, update)
            t.weight.add_(t.grad.masked_fill_(update.found_inf.bool(), 0), alpha=-update.lr * t.lr_mult)


def decay_weight(t: OptimTensor, update: Update) -> None:
    """Multiply the weights by 1 - lr * weight decay, unless `update.found_inf` is 1."""
    if t.weight_decay:
        made = 1 - update.found_inf.double()
        t.weight.mul_((1 - made * (update.lr * t.lr_mult * t.weight_decay)).to(t.weight.dtype))
