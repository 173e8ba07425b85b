"""Predicted beside measured: both sides sum to their step; a trace of the prediction differs nowhere."""

from pathlib import Path

import pytest

import meshwise as mw
from kineto import all_reduce, host, kernel, write_trace

GLOO4 = Path(__file__).parent / "data" / "traces" / "gloo4"
JOB = ("qwen3-0.6b", "a100-80g-sxm:2", "tp=2")
PATTERNS = {
    "matmul": "gemm",
    "attention": "flash_fwd",
    "optimizer": "multi_tensor_adam",
    "other kernels": "norm",
}


def _sums_up(found):
    assert sum(row.measured_s for row in found.rows) == pytest.approx(found.measured_s)
    if found.predicted_s is not None:
        assert sum(row.predicted_s for row in found.rows) == pytest.approx(found.predicted_s)


def _played(folder, classes, slower=1.0):
    """Two ranks that do what the rows predict, twice; matmuls take `slower` times as long."""
    for rank in range(2):
        now, events = 0.0, []
        for step in range(2):
            begin = now
            for op, seconds in classes.items():
                length = round(seconds * 1e6 * (slower if op == "matmul" else 1.0), 3)
                if op in PATTERNS:
                    events.append(kernel(PATTERNS[op], now, length))
                else:
                    name = op.replace("_", "")
                    events.append(all_reduce(now, length, 100, [0, 1]))
                    events[-1]["args"]["Collective name"] = name
                number = len(events)
                events[-1]["args"]["correlation"] = number
                events.append(host("cuda_runtime", "cudaLaunchKernel", now, 1, correlation=number))
                now += length
            events.append(host("user_annotation", f"ProfilerStep#{step}", begin, now - begin))
        write_trace(folder / f"rank-{rank}.json", events, rank, host_name="node")


@pytest.mark.parametrize("slower", [1.0, 1.5])
def test_a_trace_of_the_prediction(tmp_path, slower):
    expected = mw.estimate(*JOB, batch=2, seq=512)
    bare = mw.explain(GLOO4, *JOB, batch=2, seq=512)
    classes = {row.op: row.predicted_s for row in bare.rows if row.predicted_s}
    idle = {op: classes.pop(op) for op in ("waiting", "idle", "bubble") if op in classes}
    _played(tmp_path, classes, slower)
    found = mw.explain(tmp_path, *JOB, batch=2, seq=512)
    _sums_up(found)
    assert found.predicted_s == pytest.approx(expected.step_s)
    for row in found.rows:
        times = slower if row.op == "matmul" else 0.0 if row.op in idle else 1.0
        assert row.measured_s == pytest.approx(times * row.predicted_s, rel=1e-4, abs=1e-8)
    if slower > 1:
        assert found.rows[0].op == "matmul" and "matmul" in found.findings[1]


def test_measured_alone(meshwise):
    found = mw.explain(GLOO4)
    _sums_up(found)
    assert found.predicted_s is None and any("rank 3" in text for text in found.findings)
    done = meshwise("explain", str(GLOO4), "--json")
    assert done.code == 0 and set(done.document) == {"rows", "step_s", "findings"}
    assert set(done.document["rows"][0]) == {"module", "op", "phase", "predicted_s", "measured_s"}
    assert meshwise("explain", str(GLOO4), "--model", "qwen3-0.6b").code == 2
    assert "predicted" in meshwise("explain", str(GLOO4), "--model", JOB[0], "--cluster", JOB[1]).out
