"""Where the time went: known answers, HolisticTraceAnalysis's numbers, intervals by brute force."""

from dataclasses import asdict
from pathlib import Path

import pytest

from kineto import all_reduce, host, kernel, write_trace
from meshwise.trace.breakdown import breakdown
from meshwise.trace.kernels import kernel_runs, kernel_totals
from meshwise.trace.read import read_trace

DATA = Path(__file__).parent / "data" / "traces"

# idle, compute, non-compute, span in µs and the overlap in %, as HolisticTraceAnalysis 0.5.0 prints them
# (get_temporal_breakdown and get_comm_comp_overlap, without its filter of the last profiler step).
HTA = [
    ("hta/sampled/sampled_rank-0.json.gz", 675191.0, 210320.0, 337336.0, 1222847.0, 14.95),
    ("hta/sampled/sampled_rank-1.json.gz", 651136.0, 271973.0, 308077.0, 1231186.0, 19.93),
    ("hta/mi250.json.gz", 8762.845, 110.881, 38.161, 8911.887, None),
    ("hta/inference_rank_1.json.gz", 1599.0, 30.0, 0.0, 1629.0, None),
]


@pytest.mark.parametrize(
    ("file", "idle", "compute", "non_compute", "span", "overlap"), HTA, ids=lambda x: str(x)
)
def test_as_holistic_trace_analysis(file, idle, compute, non_compute, span, overlap):
    found = breakdown(read_trace(DATA / file)[0])
    assert found.idle_s == pytest.approx(idle / 1e6, abs=1e-9)
    assert found.compute_s == pytest.approx(compute / 1e6, abs=1e-9)
    assert found.non_compute_s == pytest.approx(non_compute / 1e6, abs=1e-9)
    assert found.span_s == pytest.approx(span / 1e6, abs=1e-9)
    assert (found.overlap_frac is None) == (overlap is None)
    assert overlap is None or found.overlap_frac * 100 == pytest.approx(overlap, abs=0.005)


def test_known_streams(tmp_path):
    """Two streams: compute 0-40 and 60-70, an all-reduce 30-65 half hidden, a copy 80-90."""
    events = [
        host("cpu_op", "aten::mm", -500, 1000),
        kernel("gemm", 0, 40),
        kernel("gemm", 60, 10),
        all_reduce(30, 35, 1024, [0, 1]),
        kernel("Memcpy DtoH (Device -> Pinned)", 80, 10, 7),
        {"ph": "X", "cat": "cuda_sync", "name": "Stream Sync", "pid": 0, "tid": 7, "ts": 0, "dur": 500},
    ]
    trace = read_trace(write_trace(tmp_path / "a.json", events, 0))[0]
    found = {
        k: v if not isinstance(v, float) else round(v * 1e6, 6) for k, v in asdict(breakdown(trace)).items()
    }
    assert found == {
        "rank": 0,
        "device": "gpu",
        "span_s": 90,
        "compute_s": 50,
        "communication_s": 35,
        "memory_s": 10,
        "busy_s": 80,
        "idle_s": 10,
        "non_compute_s": 30,
        "exposed_communication_s": 20,
        "overlap_frac": round(15 / 35 * 1e6, 6),
    }
    totals = {
        k.name[:4]: (k.kind, k.count, round(k.total_s * 1e6), round(k.mean_s * 1e6))
        for k in kernel_totals(kernel_runs(trace))
    }
    assert totals == {
        "gemm": ("compute", 2, 50, 25),
        "nccl": ("communication", 1, 35, 35),
        "Memc": ("memory", 1, 10, 10),
    }


def test_cpu_trace_counts_operators_and_gloo(tmp_path):
    events = [
        host("cpu_op", "aten::matmul", 0, 40),
        host("cpu_op", "aten::mm", 5, 30),
        host("cpu_op", "c10d::allreduce_", 50, 5),
        host("user_annotation", "gloo:all_reduce", 52, 48, tid=2),
        host("cpu_op", "aten::add", 90, 20),
    ]
    found = breakdown(read_trace(write_trace(tmp_path / "a.json", events, 0))[0])
    assert found.device == "cpu" and found.span_s == pytest.approx(110e-6)
    assert found.compute_s == pytest.approx(60e-6) and found.communication_s == pytest.approx(48e-6)
    assert found.overlap_frac == pytest.approx(10 / 48)


def test_no_work_is_zero(tmp_path):
    events = [{"ph": "X", "cat": "python_function", "name": "f", "pid": 1, "tid": 1, "ts": 1, "dur": 5}]
    found = breakdown(read_trace(write_trace(tmp_path / "a.json", events, 0))[0])
    assert found.span_s == found.busy_s == 0.0 and found.overlap_frac is None
