"""The interface of an optimizer: the state that it declares, and one update of some tensors.

`parallel/sharded_optimizer.py` chooses these tensors. An optimizer that works element by element gets slices of the
flat buffers. An optimizer that needs whole tensors (`whole_tensors`) gets each tensor on one rank, which keeps its
state.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ndtrain.config import OptimConfig
from ndtrain.mesh.sharding import TensorLayout

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StateSpec:
    """One kind of optimizer state. Each parameter has one state tensor of this kind.

    Sharding, offload, checkpoints and memory formulas read the spec.

    Attributes:
        name: its prefix in checkpoints: `exp_avg.<parameter>`.
        dtype: its dtype; None: the dtype of the master weights.
        shape: maps the parameter's shape to the shape of the state; None: the parameter's own shape, sharded like it.
            Only an optimizer of whole tensors may have another shape.
    """

    name: str
    dtype: torch.dtype | None = None
    shape: Callable[[Shape], Shape] | None = None

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
    """One tensor of an update: a slice of a flat buffer [n], or a whole tensor in its shape.

    Attributes:
        weight, grad: of one shape, in master precision; `weight` is changed in place, `grad` may be.
        state: name -> state tensor, changed in place.
        weight_decay: 0 for vectors.
        slices: the tensors that the elements belong to; padding belongs to none. Empty for a whole tensor.
        lr_mult: the factor of the learning rate.
    """

    weight: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    weight_decay: float
    slices: tuple[TensorSlice, ...] = ()
    lr_mult: float = 1.0


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
    """The base class of optimizers. One instance updates the same tensors in every step.

    Attributes:
        whole_tensors: True if the optimizer needs each tensor whole.
    """

    whole_tensors = False

    def __init__(self, cfg: OptimConfig):
        self.cfg = cfg

    @classmethod
    @abstractmethod
    def state_spec(cls, cfg: OptimConfig) -> tuple[StateSpec, ...]:
        """Return the kinds of state of each parameter. The state begins as zeros."""

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
