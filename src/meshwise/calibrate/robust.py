"""Robust regression: constants that make predictions meet measurements, where a few rows are odd.

Near given constants, the log of predicted over measured is taken as linear in the logs of the constants.
All runs of a source share its machine, its software and its ways of measuring, so a source may be off as a
whole: it has a shift of its own, and constants explain what is left. `minimise` finds the step and the shifts
that minimise

    sum of w |miss - shift| / sum of w  +  pull x (sum of log(constant / start)^2 + sum of (shift / SHIFT)^2)

over the rows whose |miss - shift| is below `CAP`, by iteratively reweighted least squares (Holland and
Welsch, Communications in Statistics A6, 1977), with each constant kept between its limits. What a source says
as a whole moves a constant little; what the runs within a source say, or several sources alike, moves it much
(a mixed model: Laird and Ware, Biometrics 38, 1982).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

CAP = 0.4
"""Misses (of a log) beyond which a row no longer moves the constants."""

PULL = 0.01
"""How strongly a constant is held to its start: a guess is good to some 30 %, and misses of 5 % by 30
independent runs are worth 0.05 / (2 x 0.3^2 x 30)."""

SHIFT = 1.0 / 3.0
"""A source's shift, typically 10 %, over the 30 % by which a guess of a constant is off."""

SMALL = 0.005
"""Misses below this count as squares, as they are below the noise of measuring twice (3 %)."""


@dataclass(frozen=True, slots=True)
class LinearMisses:
    """Misses near a point: `miss` [rows] there, `slopes` [rows, constants], by logs; `weights` [rows].

    `sources` [rows, sources] says with a 1 which source a row is of.
    """

    miss: Array
    slopes: Array
    weights: Array
    sources: Array

    def where(self, keep: NDArray[np.bool_]) -> LinearMisses:
        """The rows to keep."""
        return LinearMisses(self.miss[keep], self.slopes[keep], self.weights[keep], self.sources[keep])


def minimise(
    linear: LinearMisses, bent: Array, least: Array, most: Array, *, pull: float = PULL, cap: float = CAP
) -> Array:
    """The logs by which to multiply the constants, between `least` and `most`.

    `bent` are the logs of the constants over their starts.
    """
    slopes = np.hstack([linear.slopes, SHIFT * linear.sources])
    free = np.full(linear.sources.shape[1], np.inf)
    bent = np.concatenate([bent, np.zeros_like(free)])
    least, most = np.concatenate([least, -free]), np.concatenate([most, free])
    step = np.clip(np.zeros_like(bent), least, most)
    for _ in range(60):
        miss = linear.miss + slopes @ step
        weights = linear.weights / linear.weights.sum() / np.maximum(np.abs(miss), SMALL)
        weights = np.where(np.abs(miss) < cap, weights, 0.0)
        matrix = slopes.T @ (slopes * weights[:, None]) + 2 * pull * np.eye(len(bent))
        right = -(slopes.T @ (weights * linear.miss) + 2 * pull * bent)
        new = _bounded(matrix, right, least, most)
        if np.abs(new - step).max(initial=0.0) < 1e-5:
            break
        step = new
    return step[: linear.slopes.shape[1]]


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
