"""Eight ranks read and broken down beside HolisticTraceAnalysis, each in a process of its own.

`HTA_PYTHON` names a Python that has HolisticTraceAnalysis (it needs old packages, so not this one); without
it only meshwise is measured. CPU time and memory are those of all processes, memory the largest sum of
proportional set sizes, looked at 20 times a second.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

NUM_RANKS, NUM_STEPS, KERNELS_PER_STEP = 8, 20, 1000

OURS = """
import json, sys
from meshwise.trace.breakdown import breakdown
from meshwise.trace.operators import kernels_of, kernel_totals
from meshwise.trace.read import read_traces
traces, _ = read_traces([sys.argv[1]])
rows = [breakdown(trace) for trace in traces]
kernel_totals(runs for trace in traces for runs in kernels_of(trace))
print(json.dumps([[row.idle_s * 1e6, row.compute_s * 1e6, row.non_compute_s * 1e6] for row in rows]))
"""

HTA = """
import contextlib, io, json, logging, sys
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
with contextlib.redirect_stdout(io.StringIO()):
    found = TraceAnalysis(trace_dir=sys.argv[1], include_last_profiler_step=True)
    rows = found.get_temporal_breakdown(visualize=False)
    found.get_comm_comp_overlap(visualize=False)
    found.get_gpu_kernel_breakdown(visualize=False)
names = ["idle_time(us)", "compute_time(us)", "non_compute_time(us)"]
print(json.dumps(rows.sort_values("rank")[names].astype(float).values.tolist()))
"""


def main() -> None:
    """Print CPU seconds and memory of both, and how far their figures are apart."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for rank in range(NUM_RANKS):
            _write(folder / f"rank-{rank}.json", rank)
        size_bytes = sum(path.stat().st_size for path in folder.iterdir())
        ours = measured(sys.executable, OURS, folder)
        print(f"{NUM_RANKS} ranks, {size_bytes / 1e6:.0f} MB: {_text(ours)}")
        if python := os.environ.get("HTA_PYTHON"):
            theirs = measured(python, HTA, folder)
            apart = np.abs(np.array(ours[2]) - np.array(theirs[2])).max()
            ratios = f"{theirs[0] / ours[0]:.1f} times the CPU time, {theirs[1] / ours[1]:.1f} the memory"
            print(f"HolisticTraceAnalysis: {_text(theirs)}: {ratios}; figures {apart:.3g} us apart")


def _text(found: tuple[float, float, list[list[float]]]) -> str:
    return f"{found[0]:.1f} s of CPU time, {found[1] / 1e6:.0f} MB"


def measured(python: str, code: str, folder: Path) -> tuple[float, float, list[list[float]]]:
    """CPU seconds, largest bytes of memory, and what the process printed."""
    environment = os.environ | {"HTA_DISABLE_NS_ROUNDING": "1"}
    words = [python, "-W", "ignore", "-c", code, str(folder)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
    peak = [0.0]

    def watch() -> None:
        while process.returncode is None:
            peak[0] = max(peak[0], _memory_bytes(process.pid))
            time.sleep(0.05)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    assert process.stdout is not None
    printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = status
    watcher.join()
    if status:
        raise SystemExit(f"{python} failed")
    return usage.ru_utime + usage.ru_stime, peak[0], json.loads(printed)


def _memory_bytes(pid: int) -> float:
    """Proportional set size of a process and its children."""
    total = 0.0
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        total = 1024.0 * int(text.split("Pss:")[1].split()[0])
        for task in Path(f"/proc/{pid}/task").iterdir():  # a thread's processes are its own
            children = (task / "children").read_text().split()
            total += sum(_memory_bytes(int(child)) for child in children)
    return total


def _write(path: Path, rank: int) -> None:
    """A trace as Kineto writes it: operators, launches, kernels; every tenth kernel is an all-reduce."""
    random = np.random.default_rng(rank)
    events, now, number = [], 0.0, 0
    for step in range(NUM_STEPS):
        begin = now
        for k in range(KERNELS_PER_STEP):
            number += 1
            length = round(float(random.uniform(3, 90)), 3)
            is_call, at = k % 10 == 9, round(now, 3)
            name = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL" if is_call else f"void gemm_{k % 40}<float>()"
            host = {"ph": "X", "pid": 100, "tid": 1}
            shapes = {"Input Dims": [[1024, 1024 + k], [1024 + k, 64]], "Input type": ["float", "float"]}
            events += [
                host | {"cat": "cpu_op", "name": "aten::mm", "ts": at, "dur": 8.0}
                | {"args": {"External id": number, "Record function id": 0, **shapes}},
                host | {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": round(at + 2, 3), "dur": 3.0}
                | {"args": {"External id": number, "correlation": number, "cbid": 211}},
                {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 20 if is_call else 7}
                | {"ts": round(at + 9, 3), "dur": length}
                | {"args": {"External id": number, "correlation": number, "device": 0, "context": 1}
                   | {"stream": 20 if is_call else 7, "grid": [64, 1, 1], "block": [256, 1, 1]}},
            ]  # fmt: skip
            now += length + float(random.uniform(0, 4)) if not is_call else length / 2
        mark = {"ph": "X", "cat": "user_annotation", "pid": 100, "tid": 1, "args": {"External id": 0}}
        events.append(
            mark | {"name": f"ProfilerStep#{step}", "ts": round(begin, 3), "dur": round(now - begin, 3)}
        )
    head = {"schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": NUM_RANKS}}
    path.write_text(json.dumps(head | {"traceEvents": events}, indent=1))
