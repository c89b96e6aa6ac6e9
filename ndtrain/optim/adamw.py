"""AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101), fused over the slices of flat buffers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ndtrain.config import OptimConfig
from ndtrain.optim.optimizer import Optimizer, OptimTensor, StateSpec, Update
from ndtrain.optim.rounded_adamw import RoundedAdamW
from ndtrain.plugins import register_optimizer

_STATE_DTYPES = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16}


@register_optimizer("adamw")
class AdamW(Optimizer):
    """PyTorch's fused AdamW; with `optim.state_dtype=bf16` an AdamW whose moments are rounded stochastically."""

    @classmethod
    def state_spec(cls, cfg: OptimConfig) -> tuple[StateSpec, ...]:
        dtype = _STATE_DTYPES[cfg.state_dtype]
        return StateSpec("exp_avg", dtype), StateSpec("exp_avg_sq", dtype)

    def step(self, tensors: Sequence[OptimTensor], update: Update) -> None:
        if not hasattr(self, "_adamw"):
            self._adamw = self._make(tensors)
        adamw = self._adamw
        adamw.found_inf = update.found_inf  # as GradScaler passes it to the fused kernel, which then changes nothing
        for group in adamw.param_groups:
            group |= {"lr": update.lr * group["lr_mult"], "number": update.step}
        weights = [w for group in adamw.param_groups for w in group["params"]]
        scale = update.grad_scale
        if scale is not None and weights[0].dtype == torch.float32:  # also as GradScaler does: saves a pass
            adamw.grad_scale = scale.float()
        elif scale is not None:  # that kernel takes an fp32 scale only
            torch._foreach_div_([w.grad for w in weights], [scale] * len(weights))
        steps = [adamw.state[w]["step"] for w in weights]
        torch._foreach_copy_(steps, [update.made] * len(steps))  # the optimizer counts this one itself
        adamw.step()

    def _make(self, tensors: Sequence[OptimTensor]) -> torch.optim.Optimizer:
        """PyTorch's optimizer over the tensors, with our state tensors as its own."""
        groups: dict[tuple[float, float], list[Tensor]] = {}
        state, slices = {}, {}
        for t in tensors:
            t.weight.grad = t.grad
            groups.setdefault((t.lr_mult, t.weight_decay), []).append(t.weight)
            state[t.weight] = {"step": torch.zeros((), dtype=torch.float32, device=t.weight.device), **t.state}
            slices[t.weight] = t.slices
        cfg = self.cfg
        param_groups = [{"params": p, "lr_mult": m, "weight_decay": decay} for (m, decay), p in groups.items()]
        common = {"lr": cfg.lr, "betas": tuple(cfg.betas), "eps": cfg.eps}
        if cfg.state_dtype == "bf16":
            adamw: torch.optim.Optimizer = RoundedAdamW(param_groups, slices, **common)
        else:
            adamw = torch.optim.AdamW(param_groups, **common, fused=True)
        adamw.state.update(state)
        return adamw
