"""AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101), fused over the slices of flat buffers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ndtrain.config import OptimConfig
from ndtrain.optim.optimizer import Optimizer, OptimTensor, StateSpec, TensorSlice, Update
from ndtrain.optim.rounding import draw, element_index, halves, round_to_bf16
from ndtrain.plugins import register_optimizer

_CHUNK = {"cpu": 1 << 15, "cuda": 1 << 22}  # elements worked on at one time: in the cache, or enough to fill a GPU
_STATE_DTYPES = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16}


@register_optimizer("adamw")
class AdamW(Optimizer):
    """PyTorch's fused AdamW; with `optim.state_dtype=bf16` one whose moments are rounded stochastically."""

    @classmethod
    def state_spec(cls, cfg: OptimConfig) -> tuple[StateSpec, ...]:
        dtype = _STATE_DTYPES[cfg.state_dtype]
        return StateSpec("exp_avg", dtype), StateSpec("exp_avg_sq", dtype)

    def step(self, tensors: Sequence[OptimTensor], update: Update) -> None:
        if not hasattr(self, "_adamw"):
            self._adamw = self._make(tensors)
        adamw = self._adamw
        adamw.found_inf = update.found_inf  # as GradScaler hands it to the fused kernel, which then changes nothing
        for group in adamw.param_groups:
            group |= {"lr": update.lr, "number": update.step}
        weights = [w for group in adamw.param_groups for w in group["params"]]
        scale = update.grad_scale
        if scale is not None and weights[0].dtype == torch.float32:  # again as GradScaler does: one pass less
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
    """The update in fp32, from moments in bf16 and back to them by stochastic rounding. Used as PyTorch's fused AdamW
    is under GradScaler, and without a wait of the host as well.

    Only operations that round once are used, so that no element's bits depend on where its shard begins or ends.

    Args:
        groups: as of any PyTorch optimizer.
        slices: of which tensors each weight's elements are; those of none (padding) are left alone.

    Attributes:
        param_groups: `number` in them is that of the step, which the draws depend on.
        found_inf: not 0 where nothing is to change.
        grad_scale: what to divide the gradients by, or None.
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
                    for chunk in piece.chunks(_CHUNK[weight.device.type]):
                        self._update(weight, chunk, group, corrections)

    def _update(self, weight: Tensor, piece: TensorSlice, group: dict[str, Any], corrections: list[Tensor]) -> None:
        state, (beta1, beta2), lr = self.state[weight], group["betas"], group["lr"]
        w, m_held, v_held = (x[piece.at] for x in (weight, state["exp_avg"], state["exp_avg_sq"]))
        g = weight.grad[piece.at]
        if self.grad_scale is not None:
            g = g / self.grad_scale
        m = m_held.float().mul_(beta1).add_(g * (1 - beta1))
        v = v_held.float().mul_(beta2).add_(g.square().mul_(1 - beta2))
        width = v.sqrt().div_(corrections[1].sqrt()).add_(group["eps"])
        new = w.mul(1 - lr * group["weight_decay"]).sub_((m / width).mul_(lr / corrections[0]))
        index = element_index(piece.tensor, piece.start, piece.start + w.numel(), w.device)
        upper, lower = halves(draw(piece.tensor.name, group["number"], index))
        skip = self.found_inf.bool()
        for held, value in ((w, new), (m_held, round_to_bf16(m, upper)), (v_held, round_to_bf16(v, lower))):
            held.copy_(torch.where(skip, held, value))
