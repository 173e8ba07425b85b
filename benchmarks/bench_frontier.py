"""How fast the frontier search is: `python benchmarks/bench_frontier.py [CHIP]`, on one core.

A curve has 111 training computes from 1e22 to 1e33 FLOP; at each, every plan of the grid is considered
(tp_in, tp_out, pp, microbatch tokens; dp in closed form). The best of three is printed.
"""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

import numpy as np

from meshwise.published.frontier.assumptions import Assumptions, sizes
from meshwise.published.frontier.device import find_device
from meshwise.published.frontier.layer import LinearLayer, layer_times
from meshwise.published.frontier.run import CURVE_FLOP, RUN_UTILIZATION, best_runs, frontier, search_grid


def best_of_three(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    device = find_device(sys.argv[1] if len(sys.argv) > 1 else "h100-80g-sxm", utilization=RUN_UTILIZATION)
    run = Assumptions()
    grid = search_grid(device, run)
    per_stage = np.size(grid.tp_in) * np.size(grid.tp_out) * np.size(grid.tokens)
    stages = np.ravel(grid.pp)[:, None] <= np.ravel(sizes(run, CURVE_FLOP).layers)
    plans = per_stage * int(stages.sum())
    curve_s = best_of_three(lambda: best_runs(device, run, CURVE_FLOP))
    whole_s = best_of_three(lambda: frontier(device))
    print(f"curve of {len(CURVE_FLOP)} training computes: {curve_s:.2f} s")
    print(f"  {plans / 1e6:.1f} M plans (dp apart), {curve_s / plans * 1e9:.0f} ns each")
    print(f"curve without and with failures, limits refined: {whole_s:.2f} s")

    layer = LinearLayer(d_in=16384, d_out=81920, tp_in=2.0 ** np.arange(12), tp_out=np.ones((1000, 1)))
    layers_s = best_of_three(lambda: layer_times(device, layer, 32768.0).fwd_bwd_s)
    print(f"12,000 layers in one call: {layers_s * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
