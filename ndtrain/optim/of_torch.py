"""Elementwise optimizers of `torch.optim`: `optim=torch optim.torch_name=RMSprop optim.torch_args={alpha:0.9}`.

They work on slices of the flat buffers. The state of a tensor therefore has to have its shape, and to begin as zeros. A
trial step on a small tensor shows whether this is so.
"""

import inspect
import json
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ndtrain.config import ConfigError, OptimConfig
from ndtrain.optim.optimizer import OptimTensor, PerTensorOptimizer, StateSpec
from ndtrain.plugins import register_optimizer

_WHOLE = ("Adafactor", "LBFGS", "Muon", "SparseAdam")  # need whole tensors, a closure, or sparse gradients
_OURS = ("lr", "params", "weight_decay", "maximize", "foreach", "fused", "capturable", "differentiable")


@register_optimizer("torch")
class TorchOptimizer(PerTensorOptimizer):
    """An optimizer of `torch.optim`, with the learning rate, the decoupled weight decay and the clipping of ndtrain."""

    @classmethod
    def state_spec(cls, cfg: OptimConfig) -> tuple[StateSpec, ...]:
        return tuple(map(StateSpec, _state_names(cfg.torch_name, json.dumps(cfg.torch_args or {}))))

    def __init__(self, cfg: OptimConfig):
        super().__init__(cfg)
        self._of: dict[OptimTensor, torch.optim.Optimizer] = {}

    def update(self, tensor: OptimTensor, lr: float, step: int) -> None:
        if tensor not in self._of:
            self._of[tensor] = _make(self.cfg.torch_name, [tensor.weight], self.cfg.torch_args or {})
        optimizer = self._of[tensor]
        tensor.weight.grad = tensor.grad
        optimizer.param_groups[0]["lr"] = lr
        optimizer.state[tensor.weight] = tensor.state | {"step": torch.tensor(float(step - 1))}
        tensor.weight.mul_(1 - lr * tensor.weight_decay)
        optimizer.step()
        tensor.weight.grad = None


@cache
def _state_names(name: str | None, args: str) -> tuple[str, ...]:
    """Return the names of the state tensors that an optimizer makes, given its arguments as JSON.

    Raises:
        ConfigError: `torch.optim` has no such elementwise optimizer, or its state cannot be sharded.
    """
    known = [n for n in dir(torch.optim) if _is_elementwise(n)]
    if name not in known:
        why = "it does not work element by element" if name in _WHOLE else "no such optimizer"
        raise ConfigError(f"optim.torch_name={name}: {why}; known: {', '.join(known)}")
    weight = torch.ones(3, requires_grad=True)
    weight.grad = torch.zeros(3)
    optimizer = _make(name, [weight], json.loads(args))
    optimizer.step()
    state = optimizer.state[weight]
    for key, value in state.items():
        begins_as_zeros = isinstance(value, Tensor) and value.shape == weight.shape and (value.abs() < 1e-6).all()
        if key != "step" and not begins_as_zeros:  # some optimizers have added an epsilon to it
            raise ConfigError(
                f"optim.torch_name={name}: its state {key} is not a tensor of the parameter's shape that starts as "
                "zeros, so it cannot be sharded: choose another optimizer"
            )
    return tuple(key for key in state if key != "step")


def _make(name: str | None, weights: list[Tensor], args: dict[str, Any]) -> torch.optim.Optimizer:
    kind = getattr(torch.optim, str(name))
    parameters = inspect.signature(kind).parameters
    taken = [key for key in parameters if key not in _OURS]
    decay = {"weight_decay": 0.0} if "weight_decay" in parameters else {}
    if wrong := next((key for key in args if key not in taken), None):
        raise ConfigError(f"optim.torch_args.{wrong}: {name} has no such argument; known: {', '.join(taken)}")
    try:
        return kind(weights, lr=1.0, **decay, **args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optim.torch_args: {name}: {error}") from error


def _is_elementwise(name: str) -> bool:
    kind = getattr(torch.optim, name)
    is_optimizer = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    return is_optimizer and kind is not torch.optim.Optimizer and name not in _WHOLE
