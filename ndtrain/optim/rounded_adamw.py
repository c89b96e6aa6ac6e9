"""AdamW with moments in bf16, rounded stochastically.

The update is one function. With a compiler it becomes one kernel for up to `_MOST_TENSORS` neighbouring tensors.
Without a compiler it runs operation by operation on chunks.
"""

import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ndtrain.device.kind import kind_of
from ndtrain.optim.optimizer import TensorSlice
from ndtrain.optim.rounding import Place, draw, element_index, halves, keys, round_to_bf16, select

# limits of one kernel: each additional tensor costs a few integer operations per element, and positions are int32
_MOST_TENSORS, _MOST_ELEMENTS = 16, 1 << 30
# elements of a chunk without a compiler. On a CPU per thread: the smallest share that PyTorch gives a thread, which
# fits its cache.
_CHUNK = {"cpu": 1 << 15, "cuda": 1 << 22}
# the fewest elements for which a CPU compiles, which takes as long as updating some hundred million without it
_WORTH_COMPILING = 1 << 24


class Scalars(NamedTuple):
    """Values that are the same for all elements of an update. Each is an fp32 scalar on the weights' device.

    Attributes:
        rest1, rest2: 1 - beta1, 1 - beta2.
        eps: epsilon * sqrt(1 - beta2^t) after t updates. Both bias corrections are factors of `rate`, in the order of
            Kingma & Ba (2014, arXiv:1412.6980, section 2), which saves each element a division.
        decay: 1 - lr * weight decay.
        rate: lr * sqrt(1 - beta2^t) / (1 - beta1^t).
        found_inf: if it is not 0, the update changes nothing.
        grad_scale: the divisor of the gradient; None: 1.
    """

    beta1: Tensor
    rest1: Tensor
    beta2: Tensor
    rest2: Tensor
    eps: Tensor
    decay: Tensor
    rate: Tensor
    found_inf: Tensor
    grad_scale: Tensor | None


def update(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    places: Tensor,
    tensor_keys: Tensor,
    s: Scalars,
    one_row: bool,
    first: int | None,
) -> None:
    """Update neighbouring tensors, or a chunk of one tensor, in place.

    The update computes in fp32, with operations that round once. The bits of an element therefore depend neither on the
    bounds of its shard nor on compilation.

    Args:
        weight, grad: fp32 [n]. exp_avg, exp_avg_sq: bf16 [n].
        places: int32 [k, 5], a `Place` of each tensor. tensor_keys: int32 [k, 2].
        one_row: True if the elements of each tensor are within one row.
        first: the position of the chunk's first element. None: 0, as a constant when compiled. PyTorch 2.11 would add a
            variable as an int64, whose bits differ from an int32's.
    """
    if s.grad_scale is not None:
        grad = grad / s.grad_scale
    old_m, old_v = exp_avg.float(), exp_avg_sq.float()
    m = old_m.mul(s.beta1).add_(grad * s.rest1)
    v = old_v.mul(s.beta2).add_(grad.square().mul_(s.rest2))
    new = weight.mul(s.decay).sub_(m.mul(s.rate).div_(_sqrt(v).add_(s.eps)))
    position = torch.arange(weight.numel(), dtype=torch.int32, device=weight.device)
    if first is not None:
        position.add_(first)
    rows = [(*p.unbind(), *key.unbind()) for p, key in zip(places.unbind(), tensor_keys.unbind(), strict=True)]
    shift, *of_rows, key1, key2 = select(position, [(r[0], r[1], *r[5:]) for r in rows] if one_row else rows)
    upper, lower = halves(draw(element_index(position, shift, of_rows), key1, key2))
    skip = s.found_inf.bool()
    m, v = round_to_bf16(m, upper), round_to_bf16(v, lower)
    for target, old, value in ((weight, weight, new), (exp_avg, old_m, m), (exp_avg_sq, old_v, v)):
        target.copy_(torch.where(skip, old, value))


def _sqrt(x: Tensor) -> Tensor:
    """Return the square root, rounded once on every device.

    MKL's fp32 square root, which PyTorch calls on a CPU, may be off in the last bit.
    """
    if x.is_cuda or torch.compiler.is_compiling():
        return x.sqrt()
    return x.double().sqrt_().float()


@cache
def compiled_update() -> Callable[..., None]:
    """Return `update`, compiled for any number of elements, and again for each number of tensors. Its bits are the
    same.
    """
    return torch.compile(update, dynamic=True, options=exact_options())


def exact_options() -> dict[str, bool]:
    """Return the compiler options that round each product and each sum, and divide on a GPU as IEEE 754 requires.

    Leave out options that this version of PyTorch does not have.
    """
    from torch._inductor import config

    exact = {"emulate_precision_casts": True, "eager_numerics.division_rounding": True}
    known = config.get_config_copy()
    return {name: value for name, value in exact.items() if name in known}


def compiles(device: torch.device, elements: int) -> bool:
    """Return True if the update of `elements` elements is compiled: there is a compiler, and compiling pays off."""
    if device.type == "meta":
        return False
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return has_triton()
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return elements >= _WORTH_COMPILING and compiler is not None and headers.exists()


@dataclass(frozen=True)
class _Part:
    """Elements that are updated together.

    Attributes:
        at: their positions in the shard.
        rows: the rows of their tensors in `RoundedAdamW._places`.
        one_row: True if the elements of each tensor are within one row.
    """

    weight: Tensor
    at: slice
    rows: slice
    one_row: bool


class RoundedAdamW(torch.optim.Optimizer):
    """AdamW with moments in bf16. It computes the update in fp32 and rounds the moments stochastically.

    It has the interface of PyTorch's fused AdamW under GradScaler, and never makes the host wait.

    Args:
        groups: as for any PyTorch optimizer.
        slices: the tensors that each weight's elements belong to. Padding belongs to none and does not change.

    Attributes:
        param_groups: each has the step's number as `number`; the random bits depend on it.
        found_inf: if it is not 0, the step changes nothing.
        grad_scale: the divisor of the gradients, or None.
        compiled: True if the update is compiled.
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
        self.found_inf: Tensor = torch.zeros(())
        self.grad_scale: Tensor | None = None
        self._device = next(iter(slices)).device
        self.compiled = compiles(self._device, sum(weight.numel() for weight in slices))
        self._names: list[str] = []
        self._parts: dict[Tensor, list[_Part]] = {}
        places = [place for weight, of in slices.items() for place in self._divide(weight, of)]
        self._places = self._on_device(places)
        constants = (betas[0], 1 - betas[0], betas[1], 1 - betas[1])
        self._constants = torch.tensor(constants, dtype=torch.float32).to(self._device).unbind()

    def _divide(self, weight: Tensor, slices: Sequence[TensorSlice]) -> list[Place]:
        """Add the tensors and parts of a weight, and return the places of the tensors."""
        places = []
        for together in _together(slices, _MOST_TENSORS if self.compiled else 1):
            origin, rows = together[0].at.start, len(self._names)
            of_part = [Place.of(piece, origin) for piece in together]
            self._names += [piece.tensor.name for piece in together]
            part = _Part(
                weight,
                slice(origin, together[-1].at.stop),
                slice(rows, len(self._names)),
                all(place.jump == 0 for place in of_part),
            )
            self._parts.setdefault(weight, []).append(part)
            places += of_part
        return places

    def _on_device(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Copy integers to the device as int32. The host does not wait for the copy."""
        pinned = self._device.type == "cuda"
        return torch.tensor(rows, dtype=torch.int32, pin_memory=pinned).to(self._device, non_blocking=True)

    @torch.no_grad()
    def step(self) -> None:
        """Update every weight once from its `grad`."""
        group = self.param_groups[0]
        made = self.state[group["params"][0]]["step"].double() + 1
        corrections = [1 - beta**made for beta in group["betas"]]
        width = corrections[1].sqrt()
        eps = (group["eps"] * width).float()
        scale = None if self.grad_scale is None else self.grad_scale.float()
        tensor_keys = self._on_device([keys(name, group["number"]) for name in self._names])
        for group in self.param_groups:
            rate = (group["lr"] * width / corrections[0]).float()
            decay = torch.full_like(rate, 1 - group["lr"] * group["weight_decay"])
            scalars = Scalars(*self._constants, eps, decay, rate, self.found_inf, scale)
            for part in (part for weight in group["params"] for part in self._parts[weight]):
                self._update(part, tensor_keys[part.rows], scalars)

    def _update(self, part: _Part, tensor_keys: Tensor, scalars: Scalars) -> None:
        state, places = self.state[part.weight], self._places[part.rows]
        buffers = (part.weight, part.weight.grad, state["exp_avg"], state["exp_avg_sq"])
        whole = [x[part.at] for x in buffers]
        if self.compiled:
            compiled_update()(*whole, places, tensor_keys, scalars, part.one_row, None)
            return
        kind = kind_of(self._device)
        most = _CHUNK[kind] * (torch.get_num_threads() if kind == "cpu" else 1)
        for first in range(0, whole[0].numel(), most):
            chunk = [x[first : first + most] for x in whole]
            update(*chunk, places, tensor_keys, scalars, part.one_row, first)


def _together(slices: Sequence[TensorSlice], most: int) -> Iterator[list[TensorSlice]]:
    """Yield groups of neighbouring slices, each of at most `most` slices and `_MOST_ELEMENTS` elements."""
    part: list[TensorSlice] = []
    for piece in (chunk for whole in slices for chunk in whole.chunks(_MOST_ELEMENTS)):
        fits = part and part[-1].at.stop == piece.at.start and piece.at.stop - part[0].at.start <= _MOST_ELEMENTS
        if part and not (fits and len(part) < most):
            yield part
            part = []
        part.append(piece)
    if part:
        yield part
