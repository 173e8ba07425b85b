"""Captures of 8 to 512 ranks: CPU time a rank, a second look, memory; and a task in a process or on Ray.

The traces are those of the tests' writer of jobs, 2.4 MB a rank; columns are kept (`meshwise.trace.columns`).
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from benchmarks.bench_traces import measured
from meshwise.core.each import each, on_ray

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from jobs import Job, write_job

NUM_RANKS = (8, 64, 512)
NUM_ITEMS = 200

SUMMARY = """
import json, sys
from meshwise.trace import read
from meshwise.trace.summary import summarize_paths
read.KEPT_BYTES = 0
print(json.dumps([summarize_paths([sys.argv[1]]).findings[0].ranks]))
"""


def main() -> None:
    """Print the curve over the number of ranks, and the cost of a task."""
    each_ms = {}
    for num in NUM_RANKS:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            job = Job(
                num, 40, "slow device", rank=num // 3, has_marks=True, has_numbers=True, num_operators=400
            )
            write_job(folder, job)
            size_bytes = sum(path.stat().st_size for path in folder.iterdir())
            first, again = (measured(sys.executable, SUMMARY, folder) for _ in range(2))
        assert first[2] == again[2] == [[num // 3]]
        each_ms[num] = 1e3 * first[0] / num
        ratio = each_ms[num] / each_ms[NUM_RANKS[0]]
        print(
            f"{num} ranks, {size_bytes / 1e6:.0f} MB: {each_ms[num]:.0f} ms of CPU time a rank, {ratio:.2f} "
            f"times that of {NUM_RANKS[0]} ranks, {first[1] / 1e6:.0f} MB of memory; a second look takes "
            f"{again[0] / first[0]:.2f} of it"
        )
    here_s = _seconds(1, nullcontext())
    print(
        f"a task: {1e3 * (_seconds(2, nullcontext()) - here_s) / NUM_ITEMS:.2f} ms in two processes", end=""
    )
    if importlib.util.find_spec("ray"):
        print(f", {1e3 * (_seconds(2, on_ray('local')) - here_s) / NUM_ITEMS:.2f} ms on Ray", end="")
    print()


def _seconds(jobs: int, where: AbstractContextManager[None]) -> float:
    """How long the items take; what starts is not counted."""
    with where:
        dict(each(abs, range(8), jobs=jobs))
        begin = time.perf_counter()
        dict(each(abs, range(NUM_ITEMS), jobs=jobs))
        return time.perf_counter() - begin
