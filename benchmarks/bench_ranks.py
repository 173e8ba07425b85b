"""Captures of 8 to 1,024 ranks: CPU time a rank, a second look, memory; and a task in a process or on Ray.

The traces are those of the tests' writer of jobs, of 2.4 MB and of 22.5 MB a rank; columns are kept
(`meshwise.trace.columns`). Of 1,024 ranks the smaller ones take 2.5 GB of disk, the larger ones 25 GB and
quarter of an hour; those that would fill half of the disk are left out.
"""

import importlib.util
import shutil
import sys
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from benchmarks.bench_traces import measured
from meshwise.core.each import each, on_ray

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from jobs import Job, write_job

CAPTURES = {400: (8, 64, 512, 1024), 4000: (8, 64, 256, 1024)}
"""Numbers of ranks by operators a step, which make a trace small or as large as real ones."""
MAX_BYTES = 6200
"""Of a trace and its columns, by its operators a step."""
NUM_ITEMS = 200

SUMMARY = """
import json, sys
from meshwise.trace import read
from meshwise.trace.summary import summarize_paths
read.KEPT_BYTES = 0
print(json.dumps([summarize_paths([sys.argv[1]]).findings[0].ranks]))
"""


def main() -> None:
    """Print the curves over the number of ranks, and the cost of a task."""
    for num_operators, nums in CAPTURES.items():
        least_ms = _capture(nums[0], num_operators)
        room = shutil.disk_usage(tempfile.gettempdir()).free / 2
        for num in (num for num in nums[1:] if num * num_operators * MAX_BYTES < room):
            _capture(num, num_operators, least_ms, nums[0])
    here_s = _seconds(1, nullcontext())
    print(
        f"a task: {1e3 * (_seconds(2, nullcontext()) - here_s) / NUM_ITEMS:.2f} ms in two processes", end=""
    )
    if importlib.util.find_spec("ray"):
        print(f", {1e3 * (_seconds(2, on_ray('local')) - here_s) / NUM_ITEMS:.2f} ms on Ray", end="")
    print()


def _capture(num: int, num_operators: int, least_ms: float = 0.0, least_num: int = 0) -> float:
    """Print what a capture of `num` ranks costs beside the smallest; milliseconds of CPU time a rank."""
    job = Job(num, 40, "slow device", num // 3, has_marks=True, has_numbers=True, num_operators=num_operators)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_job(folder, job)
        size_bytes = sum(path.stat().st_size for path in folder.iterdir())
        first, again = (measured(sys.executable, SUMMARY, folder) for _ in range(2))
    assert first[2] == again[2] == [[num // 3]]
    each_ms = 1e3 * first[0] / num
    ratio = f", {each_ms / least_ms:.2f} times that of {least_num} ranks" if least_ms else ""
    print(
        f"{num} ranks of {size_bytes / num / 1e6:.1f} MB: {each_ms:.0f} ms of CPU time a rank{ratio}, "
        f"{each_ms * num * 1e6 / size_bytes:.0f} ms a MB, {first[1] / 1e6:.0f} MB of memory; a second "
        f"look takes {again[0] / first[0]:.2f} of it",
        flush=True,
    )
    return each_ms


def _seconds(jobs: int, where: AbstractContextManager[None]) -> float:
    """How long the items take; what starts is not counted."""
    with where:
        dict(each(abs, range(8), jobs=jobs))
        begin = time.perf_counter()
        dict(each(abs, range(NUM_ITEMS), jobs=jobs))
        return time.perf_counter() - begin
