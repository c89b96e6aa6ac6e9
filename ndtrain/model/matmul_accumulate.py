"""Matmul that accumulates into a tensor of the same or a wider precision."""

import torch
from torch import Tensor

from ndtrain.model.device_kind import on_gpu


def accumulate_product(total: Tensor, a: Tensor, b: Tensor, fresh: bool = False) -> None:
    """total [m, n] += a [m, k] @ b [k, n]. If `fresh`, the product overwrites `total` instead.

    If `total` is wider than `a`, a GPU accumulates in the precision of `total`. A CPU has no such matmul: it rounds the
    product to the precision of `a` first.
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
