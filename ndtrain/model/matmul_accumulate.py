"""Matrix products added to a sum that may be wider than they are."""

import torch
from torch import Tensor


def accumulate_product(total: Tensor, a: Tensor, b: Tensor, fresh: bool = False) -> None:
    """total [m, n] += a [m, k] @ b [k, n]; if `fresh`, what it held is overwritten.

    Where `total` is wider, a GPU adds the product up in `total`'s precision; on a CPU it is rounded to that of `a`
    first, as there is no such matmul.
    """
    beta = 0 if fresh else 1
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=beta)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    elif fresh:
        total.copy_(a @ b)
    else:
        total.add_(a @ b)
