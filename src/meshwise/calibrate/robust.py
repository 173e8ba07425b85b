"""Robust regression: constants that make predictions meet measurements, where a few rows are odd.

Near given constants, the log of predicted over measured is taken as linear in the logs of the constants.
`minimise` finds the step that minimises

    sum of w |miss| / sum of w  +  pull x sum of log(constant / start)^2

over the rows whose |miss| is below `CAP`, by iteratively reweighted least squares (Holland and Welsch,
Communications in Statistics A6, 1977), with each constant kept between its limits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

CAP = 0.4
"""Misses (of a log) beyond which a row no longer moves the constants."""

PULL = 0.002
"""How strongly a constant is held to its start: it decides only where the rows do not."""

SMALL = 0.005
"""Misses below this count as squares, as they are below the noise of measuring twice (3 %)."""


@dataclass(frozen=True, slots=True)
class Linear:
    """Misses near a point: `miss` [rows] there, `slopes` [rows, constants], by logs; `weights` [rows]."""

    miss: Array
    slopes: Array
    weights: Array

    def where(self, keep: NDArray[np.bool_]) -> Linear:
        """The rows to keep."""
        return Linear(self.miss[keep], self.slopes[keep], self.weights[keep])


def loss(miss: Array, weights: Array, bent: Array) -> float:
    """What is minimised; `bent` are the logs of the constants over their starts."""
    capped = np.minimum(np.abs(miss), CAP)
    return float(weights @ capped / weights.sum() + PULL * (bent @ bent))


def minimise(linear: Linear, bent: Array, least: Array, most: Array, *, rounds: int = 60) -> Array:
    """The logs by which to multiply the constants, between `least` and `most`.

    `bent` are the logs of the constants over their starts.
    """
    step = np.clip(np.zeros_like(bent), least, most)
    for _ in range(rounds):
        miss = linear.miss + linear.slopes @ step
        weights = linear.weights / linear.weights.sum() / np.maximum(np.abs(miss), SMALL)
        weights = np.where(np.abs(miss) < CAP, weights, 0.0)
        matrix = linear.slopes.T @ (linear.slopes * weights[:, None]) + 2 * PULL * np.eye(len(bent))
        right = -(linear.slopes.T @ (weights * linear.miss) + 2 * PULL * bent)
        new = _bounded(matrix, right, least, most)
        if np.abs(new - step).max(initial=0.0) < 1e-5:
            break
        step = new
    return step


def _bounded(matrix: Array, right: Array, least: Array, most: Array) -> Array:
    """The minimum of x A x / 2 - b x between limits, by projected Gauss-Seidel."""
    x = np.clip(np.linalg.solve(matrix, right), least, most)
    for _ in range(200):
        before = x.copy()
        for i in range(len(x)):
            rest = right[i] - matrix[i] @ x + matrix[i, i] * x[i]
            x[i] = min(max(rest / matrix[i, i], least[i]), most[i])
        if np.abs(x - before).max(initial=0.0) < 1e-7:
            break
    return x
