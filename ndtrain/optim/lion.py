"""Lion (Chen et al., 2023, arXiv:2302.06675), one of the two smallest examples of an optimizer."""

from ndtrain.config import OptimConfig
from ndtrain.optim.optimizer import OptimTensor, PerTensorOptimizer, StateSpec
from ndtrain.plugins import register_optimizer


@register_optimizer("lion")
class Lion(PerTensorOptimizer):
    """The update is the sign of a mixture of momentum and gradient. The paper recommends `optim.betas=[0.9,0.99]`, a
    learning rate three to ten times smaller than AdamW's, and a weight decay that is larger by the same factor."""

    @classmethod
    def state_spec(cls, cfg: OptimConfig) -> tuple[StateSpec, ...]:
        return (StateSpec("exp_avg"),)

    @classmethod
    def width_power(cls, cfg: OptimConfig) -> float:
        return 1.0  # the elements of its updates have about one size, so their sum over features grows with the width

    def update(self, tensor: OptimTensor, lr: float, step: int) -> None:
        (beta1, beta2), average = self.cfg.betas, tensor.state["exp_avg"]
        direction = average.lerp(tensor.grad, 1 - beta1).sign_()
        tensor.weight.mul_(1 - lr * tensor.weight_decay).sub_(direction, alpha=lr)
        average.lerp_(tensor.grad, 1 - beta2)
