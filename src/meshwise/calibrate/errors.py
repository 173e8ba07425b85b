"""Statistics of errors: how far predictions lie from measurements, over all rows and by group.

An error is (predicted - measured) / measured. Its mean is the bias; the mean, median and 90th percentile
of its absolute value say how wrong a prediction usually is. *Order* asks the question of a search: among
runs of one model, batch and number of GPUs, how much slower than the fastest was the plan that the
prediction ranks first?
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


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


def summarize(errors: Sequence[float | None]) -> ErrorSummary:
    """The summary of `errors`; None is a row that could not be expressed."""
    known = np.array([error for error in errors if error is not None], dtype=np.float64)
    if not len(known):
        return ErrorSummary(len(errors), 0, None, None, None, None, None)
    size = np.abs(known)
    return ErrorSummary(
        num_rows=len(errors),
        num_expressed=len(known),
        median_abs_frac=float(np.median(size)),
        mean_abs_frac=float(np.mean(size)),
        p90_abs_frac=float(np.quantile(size, 0.9)),
        max_abs_frac=float(np.max(size)),
        mean_signed_frac=float(np.mean(known)),
    )


def percentiles(ratios: NDArray[np.float64], groups: Sequence[Hashable]) -> tuple[float, float]:
    """10th and 90th percentile of `ratios`; each group counts once, however many it has."""
    num = Counter(groups)
    weights = np.array([1.0 / num[group] for group in groups])
    return quantile(ratios, weights, 0.1), quantile(ratios, weights, 0.9)


def quantile(values: NDArray[np.float64], weights: NDArray[np.float64], share: float) -> float:
    """The value below which a `share` of the weights lies."""
    order = np.argsort(values)
    below = np.cumsum(weights[order])
    return float(np.interp(share, (below - 0.5 * weights[order]) / below[-1], values[order]))


def is_held_out(row_id: str) -> bool:
    """Whether a row only judges (half of them do), by a hash of its id; the others may fit constants."""
    return zlib.crc32(row_id.encode()) % 2 == 0


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """`items` by `key`, in the order of first appearance."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def order_loss(measured: Sequence[float], predicted: Sequence[float]) -> float:
    """How much slower than the fastest the run was that the prediction ranks first: 0 is the right choice."""
    return measured[int(np.argmin(predicted))] / min(measured) - 1.0
