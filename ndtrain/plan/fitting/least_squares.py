"""Robust nonlinear least squares of a few positive parameters, in numpy."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

Array = np.ndarray
_STEP = 0.03  # of a logarithm, for the differences that make the Jacobian
_TURN = 0.15  # residuals beyond it count linearly (Huber, 1964)


class Parameter(NamedTuple):
    """A positive parameter. Its fit moves it on a logarithmic scale.

    Attributes:
        start: what is believed beforehand.
        least, most: it stays between them.
    """

    start: float
    least: float
    most: float


class Linear(NamedTuple):
    """What residuals do near where the parameters start.

    Attributes:
        residuals: there, [N].
        jacobian: by logarithms of the parameters, [N, P].
    """

    residuals: Array
    jacobian: Array

    def of(self, rows: Sequence[int]) -> "Linear":
        """That of some residuals."""
        return Linear(self.residuals[rows], self.jacobian[rows])


def at_start(residuals: Callable[[Array], Array], parameters: list[Parameter]) -> Linear:
    """The residuals where the parameters start, and their slopes by differences, away from the upper bounds."""
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
    """The parameters with the least weighted Huber loss of the residuals, by Levenberg's damped Gauss-Newton steps. The
    Jacobian is made once, and then follows the steps (Broyden, 1965).

    Args:
        residuals: parameters [P] -> residuals [N].
        weights: [N] of the squared residuals.
        begin: what `at_start` gives; None: it is called.
        pull: holds parameters that the residuals say little about where they start: a parameter that is e times its
            start costs as much as one residual of this size and of weight 1.
        tolerance: the relative gain of a round below which it is the last one.
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
