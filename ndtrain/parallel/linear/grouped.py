"""The experts' matmuls: rows sorted by expert times each expert's matrix, with gradients written straight into the flat
buffers.

The matrices of all experts that read one input are neighbours in their unit's buffer. They form one tensor [X, O, I],
where O counts the rows of all these matrices of one expert (`FusedWeights`). If PyTorch has a kernel for it, one
grouped product computes all experts: in bf16 on Hopper and Blackwell. Otherwise a loop does. The gradients of weights
are a loop everywhere: each expert's product accumulates in place, in the precision of the buffer. An expert without
rows gets a gradient of zeros.

Shape legend: M rows, X experts, I in, O out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, reduce
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ndtrain.device.kind import on_gpu
from ndtrain.model.moe.exchange import ExpertRows
from ndtrain.parallel.linear.product import Product

_ALIGNMENT = 16  # bytes, for a grouped product's factors and their rows


class _GroupedLinear(Product.function):
    """y = x @ w.T for rows sorted by expert."""


@dataclass(eq=False)
class GroupedProduct(Product):
    """The product of each expert's rows with its matrices. Each weight holds all experts, and its `rows` are one
    expert's.

    Attributes:
        expert_rows: the number of rows of each expert.
    """

    expert_rows: ExpertRows
    function: ClassVar = _GroupedLinear

    def outputs(self, x_MI: Tensor) -> Sequence[Tensor]:
        return [products(x_MI, w_XOI.transpose(1, 2), self.expert_rows) for w_XOI in self._matrices()]

    def gradients(self, x_MI: Tensor, dys_MO: Sequence[Tensor]) -> Tensor:
        dx_MI = sum_of_products(dys_MO, self._matrices(), self.expert_rows)
        for dy_MO, s in zip(dys_MO, self.weights, strict=True):
            self.accumulator.accumulate_by_expert(s.weight, dy_MO, x_MI, self.expert_rows.sizes)
        return dx_MI

    def _matrices(self) -> list[Tensor]:
        """Return each weight as one matrix for each expert, [X, O, I]."""
        return [s.weight.detach().unflatten(0, (len(self.expert_rows.sizes), -1)) for s in self.weights]


def products(x_MI: Tensor, w_XIO: Tensor, expert_rows: ExpertRows) -> Tensor:
    """Multiply each expert's rows by its matrix: [M, O]."""
    return sum_of_products([x_MI], [w_XIO], expert_rows)


def sum_of_products(xs_MI: Sequence[Tensor], ws_XIO: Sequence[Tensor], expert_rows: ExpertRows) -> Tensor:
    """Multiply each expert's rows of several tensors by its matrices, and sum the products: [M, O]."""
    if all(serves_grouped(t) for t in (*xs_MI, *ws_XIO)):
        return reduce(
            Tensor.add_, (F.grouped_mm(x, w, offs=expert_rows.ends) for x, w in zip(xs_MI, ws_XIO, strict=True))
        )
    y_MO = xs_MI[0].new_empty(len(xs_MI[0]), ws_XIO[0].shape[2])
    sizes = expert_rows.sizes
    # all views of a tensor in one call: with many small experts the host's time for slices counts
    factors = (zip(x.split(sizes), w.unbind(), strict=True) for x, w in zip(xs_MI, ws_XIO, strict=True))
    for y_RO, (x_RI, w_IO), *others in zip(y_MO.split(sizes), *factors, strict=True):
        if len(y_RO):
            torch.mm(x_RI, w_IO, out=y_RO)
            for other_RI, matrix_IO in others:
                y_RO.addmm_(other_RI, matrix_IO)
    return y_MO


def serves_grouped(x: Tensor) -> bool:
    """Return True if PyTorch's kernel for grouped products accepts this factor. Its rows (or columns) must be
    aligned."""
    if not on_gpu(x) or x.dtype != torch.bfloat16 or not _has_kernel(x.device):
        return False
    *_, rows, columns = x.stride()
    starts = (max(rows, columns), x.storage_offset())
    return 1 in (rows, columns) and all(n * x.element_size() % _ALIGNMENT == 0 for n in starts)


@cache
def _has_kernel(device: torch.device) -> bool:
    """Return True if the device has a kernel for grouped products. On other GPUs PyTorch waits until the host has read
    the offsets, and then loops as well."""
    return device.type == "meta" or torch.cuda.get_device_capability(device)[0] in (9, 10)
