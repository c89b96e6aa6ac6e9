"""Newton-Schulz iterations, which replace a matrix U S V^T by about U V^T with products alone.

Each step applies an odd polynomial to the singular values: X <- a X + b (X X^T) X + c (X X^T)^2 X. Three ways:

- `classic`: the same polynomial in each step (Jordan, 2024, https://kellerjordan.github.io/posts/muon), as in
  `torch.optim.Muon`. The singular values of the result are between 0.7 and 1.2.
- `polar_express`: the best polynomial for each step (Amsel et al., 2025, arXiv:2505.16932, section 4.4).
- `gram`: the polynomials of `polar_express`, applied to the smaller Gram matrix X X^T (Zhang et al., 2026,
  https://tridao.me/blog/2026/gram-newton-schulz). The matrix itself is then in two products per restart, not per step.
"""

from collections.abc import Sequence
from itertools import repeat

import torch
from torch import Tensor

Polynomial = tuple[float, float, float]

_CLASSIC = (3.4445, -4.7750, 2.0315)
# best for singular values in [0.001, 1]; the last one is the limit, which all later steps use
_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
_SAFETY = 1.01  # room for rounding errors that move a singular value above 1, where the polynomials would grow it
_RESTART = 2  # steps on a Gram matrix before rounding errors make it worth recomputing it
_EPS = 1e-7  # added to no norm, but its least value


def polynomials(ns: str, steps: int) -> list[Polynomial]:
    """Return the polynomial of each step of `optim.ns`."""
    if ns == "classic":
        return list(repeat(_CLASSIC, steps))
    safe = [(a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _POLAR_EXPRESS[:-1]]
    return [*safe, *repeat(_POLAR_EXPRESS[-1], steps)][:steps]


def flops_of(ns: str, steps: int, shape: tuple[int, ...]) -> float:
    """Return the FLOPs of the iterations on a matrix."""
    m, n = min(shape), max(shape)
    if ns == "gram" and m < n:
        restarts = -(-steps // _RESTART)
        return 2.0 * m * m * (2 * n * restarts + m * (steps + 3 * (steps - restarts)))
    return 2.0 * m * m * (2 * n + m) * steps


def workspace_of(ns: str, shape: tuple[int, ...]) -> int:
    """Return the elements that `orthogonalise` allocates at most for matrices [k, A, B], its result included."""
    k, m, n = shape[0], min(shape[1:]), max(shape[1:])
    matrix, square = k * m * n, k * m * m
    if ns == "gram" and m < n:
        return max(matrix + 5 * square, 2 * matrix + 3 * square)
    return 2 * matrix + 2 * square


def orthogonalise(x: Tensor, ns: str, steps: int) -> Tensor:
    """Return about U V^T of each matrix U S V^T, in the dtype of the matrices.

    Args:
        x: [k, A, B]. It is changed.
        ns: classic | polar_express | gram.
    """
    if len(x) == 1:  # a product of two matrices is faster, and has the same bits as in `torch.optim.Muon`
        return _orthogonalise(x[0], ns, steps)[None]
    return _orthogonalise(x, ns, steps)


def _orthogonalise(x: Tensor, ns: str, steps: int) -> Tensor:
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) if x.ndim > 2 else x.norm()
    x.div_((norm if ns == "classic" else norm * _SAFETY).clamp(min=_EPS))
    on_gram = ns == "gram" and x.shape[-2] < x.shape[-1]
    result = (_iterate_gram if on_gram else _iterate)(x, polynomials(ns, steps))
    return result if wide else result.mT


def _iterate(x: Tensor, of_steps: Sequence[Polynomial]) -> Tensor:
    for a, b, c in of_steps:
        gram = x @ x.mT
        x = _add_product(x, _add_product(gram, gram, gram, b, c), x, a)
    return x


def _iterate_gram(x: Tensor, of_steps: Sequence[Polynomial]) -> Tensor:
    """Collect the factor by which x is multiplied, which commutes with the Gram matrix, and multiply only before a
    restart and at the end."""
    for first in range(0, len(of_steps), _RESTART):
        gram, factor = x @ x.mT, None
        part = of_steps[first : first + _RESTART]
        for i, (a, b, c) in enumerate(part):
            step = _add_product(gram, gram, gram, b, c)
            step.diagonal(dim1=-2, dim2=-1).add_(a)
            factor = step if factor is None else step @ factor
            if i + 1 < len(part):
                gram = step @ gram @ step
        x = factor @ x
    return x


def _add_product(x: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float = 1.0) -> Tensor:
    """Return beta x + alpha left right."""
    add = torch.addmm if x.ndim == 2 else torch.baddbmm
    return add(x, left, right, beta=beta, alpha=alpha)
