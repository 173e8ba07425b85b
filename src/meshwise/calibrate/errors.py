"""Statistics of errors: how far predictions lie from measurements, over all rows and by group.

An error is (predicted - measured) / measured. Its mean is the bias; the mean, median and 90th percentile
of its absolute value say how wrong a prediction usually is. *Order* asks the question of a search: among
runs of one model, batch and number of GPUs, how much slower than the fastest was the plan that the
prediction ranks first?
"""

import zlib
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class ErrorSummary:
    """Errors of the expressed rows among `num_rows`; None where there are none."""

    num_rows: int
    num_expressed: int
    median_abs_frac: float | None
    mean_abs_frac: float | None
    p90_abs_frac: float | None
    max_abs_frac: float | None
    mean_signed_frac: float | None


@dataclass(frozen=True, slots=True)
class Progress:
    """Errors `before`, of a release, and of `now` on the rows of a quantity (of one kind) that it predicted.

    Rows that are no longer expressed count in `now.num_rows` alone.
    """

    quantity: str
    rows: str
    release: str
    before: ErrorSummary
    now: ErrorSummary


@dataclass(frozen=True, slots=True)
class Mend:
    """A constant, its `value`, the one that mends (`to`), and the mean error of the runs with each.

    `is_at_limit`: it would go on, but may not.
    """

    constant: str
    value: float
    to: float
    mean_abs_frac: float
    mended_mean_abs_frac: float
    num_runs: int
    is_at_limit: bool


def summarize(errors: Sequence[float | None]) -> ErrorSummary:
    """The summary of `errors`; None is a row that could not be expressed."""
    known = np.array([error for error in errors if error is not None], dtype=np.float64)
    if not len(known):
        return ErrorSummary(len(errors), 0, None, None, None, None, None)
    size = np.abs(known)
    figures = (np.median(size), np.mean(size), np.quantile(size, 0.9), np.max(size), np.mean(known))
    return ErrorSummary(len(errors), len(known), *map(float, figures))


def quantiles(values: NDArray[np.float64], groups: Sequence[Hashable], *shares: float) -> list[float]:
    """The values below which `shares` lie; each group counts once, however many values it has."""
    num, order = Counter(groups), np.argsort(values)
    weights = np.array([1.0 / num[group] for group in groups])[order]
    below = np.cumsum(weights)
    return np.interp(shares, (below - 0.5 * weights) / below[-1], values[order]).tolist()


def is_held_out(row_id: str) -> bool:
    """Whether a row only judges (half of them do), by a hash of its id; the others may fit constants."""
    return zlib.crc32(row_id.encode()) % 2 == 0


def order_loss(measured: Sequence[float], predicted: Sequence[float]) -> float:
    """How much slower than the fastest the run was that the prediction ranks first: 0 is the right choice."""
    return measured[int(np.argmin(predicted))] / min(measured) - 1.0
