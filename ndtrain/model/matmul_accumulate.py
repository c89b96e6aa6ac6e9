"""Matmul that accumulates into a tensor of the same or a wider precision."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ndtrain.device.kind import on_gpu


def accumulate_product(total: Tensor, a: Tensor, b: Tensor, fresh: bool = False) -> None:
    """Compute total [m, n] += a [m, k] @ b [k, n]. If `fresh`, the product overwrites `total` instead.

    If `total` is wider than `a`, a GPU accumulates in the precision of `total`. PyTorch has no such matmul on a CPU,
    which first rounds the product to the precision of `a`.
    """
    beta = 0 if fresh else 1
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=beta)
    elif on_gpu(a):
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    elif fresh:
        total.copy_(a @ b)
    else:
        total.add_(a @ b)


def accumulate_by_expert(
    total_XOI: Tensor, a_MO: Tensor, b_MI: Tensor, sizes: Sequence[int], fresh: bool = False
) -> None:
    """Compute total[x] += a[rows].T @ b[rows] for the rows of each expert x, as `accumulate_product` does.

    Args:
        sizes: the number of rows of each expert, which may be 0.
    """
    of_experts = zip(total_XOI.unbind(), a_MO.t().split(sizes, 1), b_MI.split(sizes), strict=True)
    for total_OI, a_OR, b_RI in of_experts:
        if len(b_RI):
            accumulate_product(total_OI, a_OR, b_RI, fresh)
        elif fresh:
            total_OI.zero_()
