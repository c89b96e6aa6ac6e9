"""Stochastic gradient descent with momentum, one of the two smallest examples of an optimizer."""

from ndtrain.config import OptimConfig
from ndtrain.optim.optimizer import OptimTensor, PerTensorOptimizer, StateSpec
from ndtrain.plugins import register_optimizer


@register_optimizer("sgd")
class SGD(PerTensorOptimizer):
    """`optim.momentum=0` keeps no state. Weight decay is decoupled, unlike in `torch.optim.SGD`."""

    @classmethod
    def state_spec(cls, cfg: OptimConfig) -> tuple[StateSpec, ...]:
        return (StateSpec("momentum_buffer"),) if cfg.momentum else ()

    def update(self, tensor: OptimTensor, lr: float, step: int) -> None:
        direction = tensor.grad
        if self.cfg.momentum:
            direction = tensor.state["momentum_buffer"].mul_(self.cfg.momentum).add_(tensor.grad)
        tensor.weight.mul_(1 - lr * tensor.weight_decay).sub_(direction, alpha=lr)
