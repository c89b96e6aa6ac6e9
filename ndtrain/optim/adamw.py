"""AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101), fused over the slices of flat buffers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ndtrain.config import OptimConfig
from ndtrain.optim.optimizer import Optimizer, OptimTensor, StateSpec, Update
from ndtrain.optim.rounded_adamw import RoundedAdamW
from ndtrain.plugins import register_optimizer

# optim.state_dtype -> dtype of optimizer state; None: the dtype of the master weights
STATE_DTYPES = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16}


@register_optimizer("adamw")
class AdamW(Optimizer):
    """PyTorch's fused AdamW; with `optim.state_dtype=bf16` an AdamW whose moments are rounded stochastically."""

    @classmethod
    def state_spec(cls, cfg: OptimConfig) -> tuple[StateSpec, ...]:
        dtype = STATE_DTYPES[cfg.state_dtype]
        return StateSpec("exp_avg", dtype), StateSpec("exp_avg_sq", dtype)

    @classmethod
    def width_power(cls, cfg: OptimConfig) -> float:
        return 1.0  # the elements of its updates have about one size, so their sum over features grows with the width

    def __init__(self, cfg: OptimConfig):
        super().__init__(cfg)
        self._update: Callable[[Update], None] | None = None

    def step(self, tensors: Sequence[OptimTensor], update: Update) -> None:
        if self._update is None:
            self._update = (_Rounded if self.cfg.state_dtype == "bf16" else _Fused)(self.cfg, tensors)
        self._update(update)


@dataclass
class _Group:
    """Tensors with the same learning-rate factor and the same weight decay.

    Attributes:
        steps: for each tensor the number of updates that the kernel has made, in fp32 on the tensor's device.
    """

    lr_mult: float
    weight_decay: float
    weights: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    exp_avgs: list[Tensor] = field(default_factory=list)
    exp_avg_sqs: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)

    def add(self, t: OptimTensor) -> None:
        self.weights.append(t.weight)
        self.grads.append(t.grad)
        self.exp_avgs.append(t.state["exp_avg"])
        self.exp_avg_sqs.append(t.state["exp_avg_sq"])
        self.steps.append(torch.zeros((), dtype=torch.float32, device=t.weight.device))


class _Fused:
    """PyTorch's fused kernel, called through the functional interface.

    The class `torch.optim.AdamW` would import the compiler, which takes more than a second.
    """

    def __init__(self, cfg: OptimConfig, tensors: Sequence[OptimTensor]):
        self.cfg = cfg
        groups: dict[tuple[float, float], _Group] = {}
        for t in tensors:
            key = t.lr_mult, t.weight_decay
            groups.setdefault(key, _Group(*key)).add(t)
        self.groups = list(groups.values())

    def __call__(self, update: Update) -> None:
        beta1, beta2 = self.cfg.betas
        for group in self.groups:
            torch._foreach_copy_(group.steps, [update.made] * len(group.steps))  # the kernel adds this update itself
            adamw(
                group.weights, group.grads, group.exp_avgs, group.exp_avg_sqs, [], group.steps,
                fused=True, grad_scale=_scale_for_kernel(update, group.grads), found_inf=update.found_inf,
                amsgrad=False, beta1=beta1, beta2=beta2, lr=update.lr * group.lr_mult,
                weight_decay=group.weight_decay, eps=self.cfg.eps, maximize=False,
            )  # fmt: skip


class _Rounded:
    """AdamW with moments in bf16."""

    def __init__(self, cfg: OptimConfig, tensors: Sequence[OptimTensor]):
        groups: dict[tuple[float, float], list[Tensor]] = {}
        state, slices = {}, {}
        for t in tensors:
            t.weight.grad = t.grad
            groups.setdefault((t.lr_mult, t.weight_decay), []).append(t.weight)
            state[t.weight] = {"step": torch.zeros((), dtype=torch.float32, device=t.weight.device), **t.state}
            slices[t.weight] = t.slices
        param_groups = [{"params": p, "lr_mult": m, "weight_decay": decay} for (m, decay), p in groups.items()]
        self.adamw = RoundedAdamW(param_groups, slices, cfg.lr, tuple(cfg.betas), cfg.eps)
        self.adamw.state.update(state)

    def __call__(self, update: Update) -> None:
        adamw = self.adamw
        adamw.found_inf = update.found_inf
        for group in adamw.param_groups:
            group |= {"lr": update.lr * group["lr_mult"], "number": update.step}
        weights = [w for group in adamw.param_groups for w in group["params"]]
        adamw.grad_scale = _scale_for_kernel(update, [w.grad for w in weights])
        steps = [adamw.state[w]["step"] for w in weights]
        torch._foreach_copy_(steps, [update.made] * len(steps))
        adamw.step()


def _scale_for_kernel(update: Update, grads: Sequence[Tensor]) -> Tensor | None:
    """Return the divisor that the kernel applies to the gradients, which saves a pass over them; None if there is none.

    Kernels divide only fp32 gradients. Gradients of another precision are divided here.
    """
    scale = update.grad_scale
    if scale is None or grads[0].dtype == torch.float32:
        return None if scale is None else scale.float()
    torch._foreach_div_(grads, [scale] * len(grads))
    return None
