"""The interface of an optimizer: the state that it declares, and one update of some tensors.

`parallel/sharded_optimizer.py` decides which tensors those are. An optimizer that works element by element gets slices
of the flat buffers. One that needs whole tensors (`whole_tensors`) gets each tensor on one rank, which keeps its state.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ndtrain.config import OptimConfig
from ndtrain.distributed.sharding import TensorLayout

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StateSpec:
    """One kind of state tensor. Each parameter has one. Sharding, offload, checkpoints and memory formulas read this.

    Attributes:
        name: its prefix in checkpoints: `exp_avg.<parameter>`.
        dtype: its dtype; None: that of the master weights.
        shape: parameter's shape -> its shape; None: the parameter's own, and sharded like it. Only an optimizer of
            whole tensors may have another.
    """

    name: str
    dtype: torch.dtype | None = None
    shape: Callable[[Shape], Shape] | None = None

    def shape_of(self, parameter: Shape) -> Shape:
        return parameter if self.shape is None else self.shape(parameter)


class TensorSlice(NamedTuple):
    """Elements of one tensor in a shard.

    Attributes:
        at: their positions in the shard.
        tensor: the tensor's layout.
        start: the first one's offset in the local row-major tensor.
    """

    at: slice
    tensor: TensorLayout
    start: int

    def chunks(self, most: int) -> Iterator["TensorSlice"]:
        """The same elements, at most `most` at a time."""
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
        made: the number of updates made before, without the skipped ones; a scalar on the state's device.
        lr: the learning rate of a tensor whose `lr_mult` is 1.
        found_inf: 1 if the loss or a gradient is not finite, so that nothing may change, otherwise 0; such a scalar
            too.
        grad_scale: the divisor of the gradients (clipping), such a scalar too; None: 1.
    """

    step: int
    made: Tensor
    lr: float
    found_inf: Tensor
    grad_scale: Tensor | None


class Optimizer(ABC):
    """One instance updates the same tensors in every step.

    Attributes:
        whole_tensors: whether it needs each tensor whole.
    """

    whole_tensors = False

    def __init__(self, cfg: OptimConfig):
        self.cfg = cfg

    @classmethod
    @abstractmethod
    def state_spec(cls, cfg: OptimConfig) -> tuple[StateSpec, ...]:
        """The state of each parameter. It begins as zeros."""

    @abstractmethod
    def step(self, tensors: Sequence[OptimTensor], update: Update) -> None:
        """One update of all tensors, or none where `update.found_inf` is 1."""


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
        """Changes `tensor.weight` and `tensor.state` in place; the gradient is clipped already.

        Args:
            lr: the tensor's learning rate, `lr_mult` included.
            step: the number of updates made, this one included.
        """
