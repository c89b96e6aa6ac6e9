"""Robust nonlinear least squares of a few positive parameters, in numpy."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

Array = np.ndarray
_STEP = 0.03  # of a logarithm, for the finite differences of the Jacobian
_TURN = 0.15  # larger residuals count linearly (Huber, 1964)


class Parameter(NamedTuple):
    """A positive parameter. The fit moves it on a logarithmic scale.

    Attributes:
        start: the value that is assumed before the fit.
        least, most: bounds of the fitted value.
    """

    start: float
    least: float
    most: float


class Linear(NamedTuple):
    """A linear model of the residuals near the start of the parameters.

    Attributes:
        residuals: residuals at the start, [N].
        jacobian: derivatives by the logarithms of the parameters, [N, P].
    """

    residuals: Array
    jacobian: Array

    def of(self, rows: Sequence[int]) -> "Linear":
        """Return the model of some of the residuals."""
        return Linear(self.residuals[rows], self.jacobian[rows])


def at_start(residuals: Callable[[Array], Array], parameters: list[Parameter]) -> Linear:
    """Return the residuals at the start of the parameters, and their derivatives by differences within the bounds."""
    x, r, columns = np.log([p.start for p in parameters]), residuals(np.array([p.start for p in parameters])), []
    for i, parameter in enumerate(parameters):
        h = -_STEP if x[i] + _STEP > np.log(parameter.most) else _STEP
        moved = x.copy()
        moved[i] += h
        columns.append((residuals(np.exp(moved)) - r) / h)
    return Linear(r, np.stack(columns, axis=1))


def fit(
    residuals: Callable[[Array], Array],
    parameters: list[Parameter],
    weights: Array,
    begin: Linear | None = None,
    pull: float = 0.15,
    rounds: int = 8,
    tolerance: float = 2e-4,
) -> Array:
    """Return the parameters with the least weighted Huber loss of the residuals, by Levenberg's damped Gauss-Newton
    steps. The Jacobian is computed once, and then updated from the steps (Broyden, 1965).

    Args:
        residuals: parameters [P] -> residuals [N].
        weights: weights of the squared residuals, [N].
        begin: the result of `at_start`; None: it is computed here.
        pull: keeps parameters near their start if the residuals hardly depend on them. A parameter that is e times its
            start costs the same as one residual of this size with weight 1.
        tolerance: the fit ends after a round with a smaller relative gain.
    """
    start = np.log([p.start for p in parameters])
    least, most = np.log([p.least for p in parameters]), np.log([p.most for p in parameters])
    loss = lambda x, r: float(weights @ _huber(r) + np.sum((pull * (x - start)) ** 2))
    x, damping = start, 1e-2
    r, jacobian = begin or at_start(residuals, parameters)
    jacobian = jacobian.copy()
    for _ in range(rounds):
        slopes = weights * np.minimum(1.0, _TURN / np.maximum(np.abs(r), 1e-12))
        gradient = jacobian.T @ (slopes * r) + pull**2 * (x - start)
        hessian = (jacobian.T * slopes) @ jacobian + pull**2 * np.eye(len(x))
        before = loss(x, r)
        for _ in range(6):
            step = np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), -gradient)
            tried = np.clip(x + np.clip(step, -0.7, 0.7), least, most)
            r_tried, moved = residuals(np.exp(tried)), tried - x
            jacobian += np.outer(r_tried - r - jacobian @ moved, moved) / max(float(moved @ moved), 1e-12)
            if loss(tried, r_tried) < before:
                x, r, damping = tried, r_tried, damping / 4
                break
            damping *= 6
        if before - loss(x, r) < tolerance * before:
            break
    return np.exp(x)


def _huber(r: Array) -> Array:
    size = np.abs(r)
    return np.where(size <= _TURN, r**2, 2 * _TURN * size - _TURN**2)
