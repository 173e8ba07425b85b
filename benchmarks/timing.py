"""How the benchmarks time: warm up once, repeat, quote the median."""

import statistics
import time
from collections.abc import Callable


def median_s(
    action: Callable[[], object], repeats: int = 7, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Median time [s] of `action` after one run that is not counted: wall time, or that of `clock`."""
    action()
    times = []
    for _ in range(repeats):
        start = clock()
        action()
        times.append(clock() - start)
    return statistics.median(times)


def report(name: str, seconds: float, target_s: float | None = None) -> None:
    """One line: the figure, and the target it is held against."""
    against = "" if target_s is None else f"   target {target_s * 1e3:g} ms, {seconds / target_s:.2f} of it"
    print(f"{name:<60} {seconds * 1e3:10.2f} ms{against}")
