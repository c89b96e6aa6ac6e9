"""AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101), fused over the slices of flat buffers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ndtrain.config import OptimConfig
from ndtrain.model.device_kind import kind_of
from ndtrain.optim.optimizer import Optimizer, OptimTensor, StateSpec, TensorSlice, Update
from ndtrain.optim.rounding import draw, element_index, halves, round_to_bf16
from ndtrain.plugins import register_optimizer

_CHUNK = {"cpu": 1 << 15, "cuda": 1 << 22}  # elements updated at one time: they fit the cache, or fill a GPU
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
            group |= {"lr": update.lr, "number": update.step}
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
        groups: dict[float, list[Tensor]] = {}
        state, slices = {}, {}
        for t in tensors:
            t.weight.grad = t.grad
            groups.setdefault(t.weight_decay, []).append(t.weight)
            state[t.weight] = {"step": torch.zeros((), dtype=torch.float32, device=t.weight.device), **t.state}
            slices[t.weight] = t.slices
        cfg, by_decay = self.cfg, [{"params": params, "weight_decay": decay} for decay, params in groups.items()]
        common = {"lr": cfg.lr, "betas": tuple(cfg.betas), "eps": cfg.eps}
        if cfg.state_dtype == "bf16":
            adamw: torch.optim.Optimizer = RoundedAdamW(by_decay, slices, **common)
        else:
            adamw = torch.optim.AdamW(by_decay, **common, fused=True)
        adamw.state.update(state)
        return adamw


class RoundedAdamW(torch.optim.Optimizer):
    """AdamW with moments in bf16. It computes the update in fp32 and rounds the moments stochastically. It has the
    interface of PyTorch's fused AdamW under GradScaler, and makes the host wait for nothing.

    It uses only operations that round once, so that the bits of an element do not depend on the bounds of its shard.

    Args:
        groups: as of any PyTorch optimizer.
        slices: the tensors that each weight's elements belong to. Padding belongs to none and does not change.

    Attributes:
        param_groups: `number` in them is the step's number, which the random bits depend on.
        found_inf: if it is not 0, the step changes nothing.
        grad_scale: the divisor of the gradients, or None.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        slices: dict[Tensor, Sequence[TensorSlice]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "number": 0})
        self.slices = slices
        self.found_inf: Tensor = torch.zeros(())
        self.grad_scale: Tensor | None = None

    @torch.no_grad()
    def step(self) -> None:
        """One update of every weight from its `grad`."""
        for group in self.param_groups:
            for weight in group["params"]:
                made = self.state[weight]["step"].double() + 1
                corrections = [1 - beta**made for beta in group["betas"]]
                for piece in self.slices[weight]:
                    for chunk in piece.chunks(_CHUNK[kind_of(weight.device)]):
                        self._update(weight, chunk, group, corrections)

    def _update(self, weight: Tensor, piece: TensorSlice, group: dict[str, Any], corrections: list[Tensor]) -> None:
        state, (beta1, beta2), lr = self.state[weight], group["betas"], group["lr"]
        w, exp_avg, exp_avg_sq = (x[piece.at] for x in (weight, state["exp_avg"], state["exp_avg_sq"]))
        g = weight.grad[piece.at]
        if self.grad_scale is not None:
            g = g / self.grad_scale
        m = exp_avg.float().mul_(beta1).add_(g * (1 - beta1))
        v = exp_avg_sq.float().mul_(beta2).add_(g.square().mul_(1 - beta2))
        width = v.sqrt().div_(corrections[1].sqrt()).add_(group["eps"])
        new = w.mul(1 - lr * group["weight_decay"]).sub_((m / width).mul_(lr / corrections[0]))
        index = element_index(piece.tensor, piece.start, piece.start + w.numel(), w.device)
        upper, lower = halves(draw(piece.tensor.name, group["number"], index))
        skip = self.found_inf.bool()
        for target, value in ((w, new), (exp_avg, round_to_bf16(m, upper)), (exp_avg_sq, round_to_bf16(v, lower))):
            target.copy_(torch.where(skip, target, value))
