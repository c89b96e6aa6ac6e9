"""AdamW over shards whose moments are held in bf16."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ndtrain.distributed.sharding import TensorLayout
from ndtrain.optim.rounding import draw, element_index, halves, round_to_bf16

_CHUNK = {"cpu": 1 << 15, "cuda": 1 << 22}  # elements worked on at one time: in the cache, or enough to fill a GPU


class Piece(NamedTuple):
    """Elements of one tensor in a shard: which of the shard, and from where on in the local tensor."""

    at: slice
    tensor: TensorLayout
    start: int

    def chunks(self, most: int) -> Iterator["Piece"]:
        for a in range(self.at.start, self.at.stop, most):
            b = min(a + most, self.at.stop)
            yield self._replace(at=slice(a, b), start=self.start + a - self.at.start)


class RoundedAdamW(torch.optim.Optimizer):
    """The update in fp32, from moments in bf16 and back to them by stochastic rounding. Used as PyTorch's fused AdamW
    is under GradScaler, and without a wait of the host as well.

    Only operations that round once are used, so that no element's bits depend on where its shard begins or ends.

    Args:
        groups: as of any PyTorch optimizer.
        pieces: of which tensors each weight's elements are; those of none (padding) are left alone.

    Attributes:
        param_groups: `number` in them is that of the step, which the draws depend on.
        found_inf: not 0 where nothing is to change.
        grad_scale: what to divide the gradients by, or None.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        pieces: dict[Tensor, Sequence[Piece]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "number": 0})
        self.pieces = pieces
        self.found_inf: Tensor = torch.zeros(())
        self.grad_scale: Tensor | None = None

    @torch.no_grad()
    def step(self) -> None:
        """One update of every weight from its `grad`."""
        for group in self.param_groups:
            for weight in group["params"]:
                made = self.state[weight]["step"].double() + 1
                corrections = [1 - beta**made for beta in group["betas"]]
                for piece in self.pieces[weight]:
                    for chunk in piece.chunks(_CHUNK[weight.device.type]):
                        self._update(weight, chunk, group, corrections)

    def _update(self, weight: Tensor, piece: Piece, group: dict[str, Any], corrections: list[Tensor]) -> None:
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
