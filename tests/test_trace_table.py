"""The profiler's table, sections, differences and the ledger; PyTorch's own table is the oracle."""

from pathlib import Path

import pytest

from kineto import all_reduce, host, kernel, write_trace
from meshwise.core.ledger import Ledger
from meshwise.trace.kernels import kernel_changes
from meshwise.trace.operators import joint_sections, operator_totals
from meshwise.trace.read import read_trace
from meshwise.trace.rows import profile_ledger
from meshwise.trace.summary import all_sections, summarize_paths

GLOO4 = str(Path(__file__).parent / "data" / "traces" / "gloo4")


def test_as_pytorch_prints_it(tmp_path):
    """Every row of key_averages(): calls, CPU total and self, memory total and self, to the printed digit."""
    torch = pytest.importorskip("torch")
    from torch.profiler import ProfilerActivity, profile, record_function

    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
    model(torch.ones(4, 32)).sum().backward()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True) as prof:
        for _ in range(3):
            with record_function("TransformerDecoder"):
                x = torch.ones(16, 32)
                with record_function("FFN/inner"):
                    y = model(x)
                del x
            y.sum().backward()
    prof.export_chrome_trace(str(tmp_path / "rank-0.json"))
    trace, _ = read_trace(tmp_path / "rank-0.json")
    ours = {row.name: row for row in operator_totals(trace)}
    theirs = {row.key: row for row in prof.key_averages()}
    del theirs["[memory]"]
    assert set(ours) == set(theirs)
    for name, row in theirs.items():
        assert ours[name].count == row.count
        assert ours[name].cpu_s * 1e6 == pytest.approx(row.cpu_time_total, abs=0.01)
        assert ours[name].self_cpu_s * 1e6 == pytest.approx(row.self_cpu_time_total, abs=0.01)
        assert ours[name].cpu_bytes == row.cpu_memory_usage
        assert ours[name].self_cpu_bytes == row.self_cpu_memory_usage
    assert ours["TransformerDecoder"].cpu_bytes > 0


def _gpu_events(slower=1.0):
    return [
        host("user_annotation", "MoELayer", 0, 100),
        host(
            "cpu_op",
            "aten::linear",
            5,
            40,
            **{"External id": 1, "Input Dims": [[8, 4]], "Input type": ["half"]},
        ),
        host("cpu_op", "aten::addmm", 10, 30, **{"External id": 2}),
        host("cuda_runtime", "cudaLaunchKernel", 20, 5, correlation=11),
        host("cpu_op", "c10d::alltoall_base_", 50, 20, **{"External id": 3}),
        host("cuda_runtime", "cudaLaunchKernelExC", 55, 5, correlation=12),
        host("cpu_op", "aten::copy_", 120, 10, **{"External id": 4}),
        kernel("gemm", 40, 60 * slower, correlation=11),
        all_reduce(110, 200, 1024, [0, 1], correlation=12),
        kernel("Memcpy DtoH", 400, 7, **{"External id": 4}),
    ]


def test_kernels_belong_to_operators_and_sections(tmp_path):
    trace, _ = read_trace(write_trace(tmp_path / "a.json", _gpu_events(), 0))
    rows = {row.name: row for row in operator_totals(trace)}
    device = {name: (round(row.self_device_s * 1e6), round(row.device_s * 1e6)) for name, row in rows.items()}
    assert device["aten::linear"] == (0, 60) and device["aten::addmm"] == (60, 60)
    assert device["c10d::alltoall_base_"] == (200, 200) and device["MoELayer"] == (0, 260)
    assert device["aten::copy_"] == (7, 7) and device["gemm"] == (60, 60)
    assert rows["aten::linear"].self_cpu_s == pytest.approx(10e-6)
    assert rows["MoELayer"].self_cpu_s == pytest.approx(40e-6)


def test_section_holds_its_communication(tmp_path):
    """The all-reduce launched inside MoELayer is its own, and the 150 µs that it waited for rank 1 too."""
    write_trace(tmp_path / "rank-0.json", _gpu_events(), 0)
    late = [host("user_annotation", "MoELayer", 0, 50), all_reduce(260, 50, 1024, [0, 1])]
    write_trace(tmp_path / "rank-1.json", late, 1)
    found = {(row.name, row.rank): row for row in all_sections(summarize_paths([tmp_path]))}
    moe = found["MoELayer", 0]
    assert (moe.count, moe.cpu_s) == (1, pytest.approx(100e-6))
    assert moe.compute_s == pytest.approx(60e-6) and moe.communication_s == pytest.approx(200e-6)
    assert moe.wait_s == pytest.approx(150e-6)
    joint = {(row.name, row.quantity): row for row in joint_sections(list(found.values()))}
    assert joint["MoELayer", "cpu"].imbalance == pytest.approx(100 / 75)
    assert joint["MoELayer", "cpu"].straggler == 0 and joint["MoELayer", "cpu"].min_s == pytest.approx(50e-6)


def test_differences_add_up(tmp_path):
    before = summarize_paths([write_trace(tmp_path / "a.json", _gpu_events(), 0)])
    events = [*_gpu_events(1.5), kernel("new", 900, 5)]
    after = summarize_paths([write_trace(tmp_path / "b.json", events, 0)])
    rows = {row.name[:4]: row for row in kernel_changes(before.kernels, after.kernels)}
    assert rows["gemm"].change_s == pytest.approx(30e-6) and rows["new"].count_before == 0
    assert sum(row.change_s for row in rows.values()) == pytest.approx(35e-6)


def test_profile_is_a_ledger(tmp_path):
    write_trace(tmp_path / "rank-0.json", _gpu_events(), 0)
    ledger = profile_ledger(summarize_paths([tmp_path]))
    assert isinstance(ledger, Ledger) and set(ledger["origin"]) == {"profile"}
    linear = next(iter(ledger.where(op="aten::linear").rows()))
    assert linear["shape"] == "8x4" and linear["dtype"] == "half" and linear["module"] == "MoELayer"
    gemm = next(iter(ledger.where(op="gemm").rows()))
    assert gemm["compute_s"] == pytest.approx(60e-6) and gemm["module"] == "MoELayer"
    one = next(iter(ledger.where(collective="all_reduce").rows()))
    assert one["payload_bytes"] == 2048 and one["group_size"] == 2 and one["sent_bytes"] == 2048


def test_command_line(meshwise, tmp_path):
    done = meshwise("trace", "summary", GLOO4, "--json")
    assert done.code == 0
    document = done.document
    assert set(document) >= {"ranks", "kernels", "alignment", "collectives", "problems"}
    keys = {"rank", "span_s", "compute_s", "communication_s", "memory_s", "idle_s"}
    assert set(document["ranks"][0]) >= keys | {"exposed_communication_s", "overlap_frac"}
    assert set(document["kernels"][0]) >= {"name", "count", "total_s", "mean_s"}
    assert set(document["alignment"]) >= {"method", "residual_s", "offsets_s"}
    assert set(document["alignment"]["offsets_s"]) == {"0", "1", "2", "3"}
    one = document["collectives"][0]
    assert set(one) >= {"name", "index", "bytes", "wire_s", "wait_s", "last_rank"}
    for verb in (("summary",), ("sections",), ("table", "--limit", "3"), ("ledger",)):
        assert meshwise("trace", *verb, GLOO4).code == 0
    assert meshwise("trace", "merge", GLOO4, "-o", str(tmp_path / "all.json.gz")).code == 0
    same = meshwise("trace", "diff", GLOO4, GLOO4, "--json").document
    assert {row["change_s"] for row in same["kernels"]} == {0}


def test_command_line_refuses(meshwise, tmp_path):
    (tmp_path / "rank-0.json").write_bytes(b"")
    done = meshwise("trace", "summary", str(tmp_path), "--json")
    assert done.code == 2 and "the file is empty" in done.err
    assert done.document["problems"] == [
        {"file": str(tmp_path / "rank-0.json"), "reason": "the file is empty"}
    ]
    done = meshwise("trace", "summary", str(tmp_path / "none"))
    assert done.code == 2 and done.err.count("\n") == 1
