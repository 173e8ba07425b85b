"""The profiler's table, sections, differences, the ledger, and where the time went."""

from dataclasses import asdict

import pytest

from data_tables import TRACES, table
from kineto import all_reduce, host, kernel, launched, operator, summary_of, write_trace
from meshwise.core.ledger import Ledger
from meshwise.trace.breakdown import breakdown
from meshwise.trace.difference import difference
from meshwise.trace.events import Kind, collective_kind, kind_of
from meshwise.trace.operators import joint_sections, kernel_totals, kernels_of, operator_totals as totals
from meshwise.trace.read import read_trace
from meshwise.trace.rows import profile_ledger
from meshwise.trace.summary import all_sections, summarize_paths

GLOO4 = str(TRACES / "gloo4")
KEYS = {
    "ranks": "rank span_s compute_s communication_s memory_s idle_s exposed_communication_s overlap_frac",
    **{"kernels": "name count total_s mean_s", "collectives": "name index bytes wire_s wait_s last_rank"},
}


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
    ours = {row.name: row for row in totals(trace)}
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
        operator("aten::linear", 5, 40, [[8, 4]], "half", **{"External id": 1}),
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
    rows = {row.name: row for row in totals(trace)}
    device = {name: (round(row.self_device_s * 1e6), round(row.device_s * 1e6)) for name, row in rows.items()}
    assert device["aten::linear"] == (0, 60) and device["aten::addmm"] == (60, 60)
    assert device["c10d::alltoall_base_"] == (200, 200) and device["MoELayer"] == (0, 260)
    assert device["aten::copy_"] == (7, 7) and device["gemm"] == (60, 60)
    assert rows["aten::linear"].self_cpu_s == pytest.approx(10e-6)
    assert rows["MoELayer"].self_cpu_s == pytest.approx(40e-6)


def test_what_ends_at_the_start_of_a_section_is_not_around_it(tmp_path):
    """Dispatch modes (the recorder's, FlopCounterMode) overlap the first microseconds of what they see."""
    events = [
        host("user_annotation", "program", 0, 100),
        host("cpu_op", "PythonDispatchMode", 10, 4),
        host("user_annotation", "layer", 12, 80),
        host("cpu_op", "aten::mm", 20, 60),
    ]
    rows = {row.name: row for row in totals(read_trace(write_trace(tmp_path / "a.json", events, 0))[0])}
    own_us = {name: round(row.self_cpu_s * 1e6) for name, row in rows.items()}
    assert own_us == {"program": 16, "PythonDispatchMode": 4, "layer": 20, "aten::mm": 60}


def test_section_holds_its_communication(tmp_path):
    """The all-reduce launched inside MoELayer is its own, and the 150 µs that it waited for rank 1 too."""
    late = [host("user_annotation", "MoELayer", 0, 50), all_reduce(260, 50, 1024, [0, 1])]
    rows = all_sections(summary_of(tmp_path, [_gpu_events(), late]))
    found = {(row.name, row.rank): row for row in rows}
    moe = found["MoELayer", 0]
    assert (moe.count, moe.cpu_s) == (1, pytest.approx(100e-6))
    assert moe.compute_s == pytest.approx(60e-6) and moe.communication_s == pytest.approx(200e-6)
    assert moe.wait_s == pytest.approx(150e-6)
    joint = {(row.name, row.quantity): row for row in joint_sections(list(found.values()))}
    assert joint["MoELayer", "cpu"].imbalance == pytest.approx(100 / 75)
    assert joint["MoELayer", "cpu"].straggler == 0 and joint["MoELayer", "cpu"].min_s == pytest.approx(50e-6)


def test_differences_are_of_a_step_of_the_mean_rank(tmp_path):
    """4 steps on 1 rank, then 7 on 2, in which the matmul takes 10 us more, and a kernel of 5 us is new."""
    sides = []
    for num_ranks, num_steps in ((1, 4), (2, 7)):
        events = []
        for n, at in enumerate(range(0, 1000 * num_steps, 1000)):
            events.append(host("user_annotation", f"ProfilerStep#{n}", at, 1000))
            events += launched("gemm", at, at + 1, 50 + 10 * num_ranks, 2 * n + 1)
            events += launched("new", at, at + 80, 5, 2 * n + 2) * (num_ranks - 1)
        (tmp_path / f"{num_ranks}").mkdir()
        sides.append(summary_of(tmp_path / f"{num_ranks}", [events] * num_ranks))
    found = difference(*sides)
    changes = {row.name: (row.count_after, round(1e6 * row.change_s, 6)) for row in found.kernels}
    assert changes == {"gemm": (1, 10), "new": (1, 5)} and found.num_steps == [3, 6]
    assert found.step_s == [pytest.approx(1e-3)] * 2
    assert sum(row.change_s for row in found.classes) == pytest.approx(0, abs=1e-12)
    whole = difference(sides[0], summarize_paths([write_trace(tmp_path / "a.json", [kernel("gemm", 0, 9)])]))
    assert whole.num_steps == [0, 0] and whole.step_s == [pytest.approx(3060e-6), pytest.approx(9e-6)]


def test_profile_is_a_ledger(tmp_path):
    ledger = profile_ledger(summary_of(tmp_path, [_gpu_events()]))
    assert isinstance(ledger, Ledger) and set(ledger["origin"]) == {"profile"}
    linear = next(iter(ledger.where(op="aten::linear").rows()))
    assert linear["shape"] == "8x4" and linear["dtype"] == "half" and linear["module"] == "MoELayer"
    gemm = next(iter(ledger.where(op="gemm").rows()))
    assert gemm["compute_s"] == pytest.approx(60e-6) and gemm["module"] == "MoELayer"
    one = next(iter(ledger.where(collective="all_reduce").rows()))
    assert one["payload_bytes"] == 2048 and one["group_size"] == 2 and one["sent_bytes"] == 2048


def test_command_line(meshwise):
    done = meshwise("trace", "summary", GLOO4, "--json")
    assert done.code == 0
    document = done.document
    for name, keys in KEYS.items():
        assert document[name][0].keys() >= {*keys.split()}
    assert document.keys() >= {"alignment", "problems"}
    assert document["alignment"].keys() >= {"method", "residual_s", "offsets_s"}
    assert set(document["alignment"]["offsets_s"]) == {"0", "1", "2", "3"}
    for verb in (("summary",), ("sections",), ("table", "--limit", "3"), ("ledger",)):
        assert meshwise("trace", *verb, GLOO4).code == 0
    same = meshwise("trace", "diff", GLOO4, GLOO4, "--json").document
    assert {row["change_s"] for row in same["kernels"]} == {0} and same["findings"][0]["ranks"] == [3]


def test_command_line_refuses(meshwise, tmp_path):
    (tmp_path / "rank-0.json").write_bytes(b"")
    done = meshwise("trace", "summary", str(tmp_path), "--json")
    assert done.code == 2 and "the file is empty" in done.err
    (problem,) = done.document["problems"]
    assert problem == {"file": str(tmp_path / "rank-0.json"), "reason": "the file is empty"}


# --- where the time went ----------------------------------------------------------------------------


@pytest.mark.parametrize("file, idle, compute, non_compute, span, overlap", table("tables")["trace"]["hta"])
def test_as_holistic_trace_analysis(file, idle, compute, non_compute, span, overlap):
    found = breakdown(read_trace(TRACES / file)[0])
    seconds = found.idle_s, found.compute_s, found.non_compute_s, found.span_s
    assert seconds == pytest.approx([us / 1e6 for us in (idle, compute, non_compute, span)], abs=1e-9)
    assert (found.overlap_frac is None) == (overlap == "")
    assert overlap == "" or found.overlap_frac * 100 == pytest.approx(overlap, abs=0.005)


def test_known_streams(tmp_path):
    """Two streams: compute 0-40 and 60-70, an all-reduce 30-65 half hidden, a copy 80-90."""
    sync = kernel("Stream Sync", 0, 500, 7) | {"cat": "cuda_sync"}
    events = [host("cpu_op", "aten::mm", -500, 1000), sync, kernel("gemm", 0, 40), kernel("gemm", 60, 10)]
    events += [all_reduce(30, 35, 1024, [0, 1]), kernel("Memcpy DtoH (Device -> Pinned)", 80, 10, 7)]
    trace = read_trace(write_trace(tmp_path / "a.json", events, 0))[0]
    found = asdict(breakdown(trace))
    assert found.pop("device") == "gpu" and found.pop("overlap_frac") == pytest.approx(15 / 35)
    expected_us = {"span_s": 90, "compute_s": 50, "communication_s": 35, "memory_s": 10, "busy_s": 80}
    expected_us |= {"idle_s": 10, "non_compute_s": 30, "exposed_communication_s": 20, "rank": 0}
    assert {name: round(value * 1e6, 6) for name, value in found.items()} == expected_us
    kernels = kernel_totals(kernels_of(trace))
    kinds = [("gemm", "compute", 2), ("nccl", "communication", 1), ("Memc", "memory", 1)]
    assert [(one.name[:4], one.kind, one.count) for one in kernels] == kinds
    assert [round(1e6 * s) for one in kernels for s in (one.total_s, one.mean_s)] == [50, 25, 35, 35, 10, 10]


@pytest.mark.parametrize(("name", "does"), table("tables")["trace"]["kernels"])
def test_what_kernels_do(name, does):
    assert does == (collective_kind(name) if kind_of("kernel", name) == Kind.COMMUNICATION else "compute")


def test_cpu_trace_counts_operators_and_gloo(tmp_path):
    of_aten = [("matmul", 0, 40), ("mm", 5, 30), ("add", 90, 20)]
    events = [host("cpu_op", f"aten::{name}", *times) for name, *times in of_aten]
    gloo = host("user_annotation", "gloo:all_reduce", 52, 48, tid=2)
    events += [host("cpu_op", "c10d::allreduce_", 50, 5), gloo]
    found = breakdown(read_trace(write_trace(tmp_path / "a.json", events, 0))[0])
    assert found.device == "cpu" and found.span_s == pytest.approx(110e-6)
    assert found.compute_s == pytest.approx(60e-6) and found.communication_s == pytest.approx(48e-6)
    assert found.overlap_frac == pytest.approx(10 / 48)
