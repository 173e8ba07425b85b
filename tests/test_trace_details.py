"""Critical path, memory, rates, bandwidths: known answers, properties, a page."""

import itertools
import json

import pytest
from hypothesis import given, settings, strategies as st

from data_tables import GLOO4, table
from jobs import Job, write_job
from kineto import all_reduce, host, kernel, launched, message, operator, summary_of, write_trace
from meshwise.machine.hardware import find_chip, find_cluster
from meshwise.trace.breakdown import CAUSES
from meshwise.trace.critical_path import critical_path
from meshwise.trace.intervals import length
from meshwise.trace.memory import memory_peaks
from meshwise.trace.rates import bandwidths, op_rates
from meshwise.trace.summary import summarize_paths


def _played(folder, job):
    write_job(folder, job)
    return summarize_paths([folder])


def test_the_path_leads_over_the_late_rank(tmp_path):
    """Most of it is spent there, though that rank does a fraction of the job's work."""
    found = critical_path(_played(tmp_path, Job(8, 12, "slow device", 1, 0.3, 7, has_host=True)))
    assert sum(one.by_rank.get(1, 0.0) for one in found.pieces) > 0.5 * found.span_s


@settings(max_examples=30)
@given(st.integers(2, 6), st.sampled_from(["none", "pause", "slow link", "late rank"]), st.integers(0, 99))
def test_the_path_has_no_gap(tmp_path_factory, num_ranks, fault, seed):
    """Pieces sum to the path; it is no longer than the job; idle time is that of its causes."""
    job = Job(2 * (num_ranks // 2), 3, fault, 0, 0.3, seed)
    found_in = _played(tmp_path_factory.mktemp("job"), job)
    found = critical_path(found_in)
    assert sum(one.seconds for one in found.pieces) == pytest.approx(found.span_s)
    assert sum(one.share_frac for one in found.pieces) == pytest.approx(1.0)
    assert all(sum(one.by_rank.values()) == pytest.approx(one.seconds) for one in found.pieces)
    for part, one in zip(found_in.intervals(), found_in.partitions, strict=True):
        by_cause = sum(length(part.idle(cause)) for cause in CAUSES)
        assert by_cause / 1e9 == pytest.approx(one.seconds["idle"])


def test_calls_in_another_order_on_each_rank_end_the_path(tmp_path):
    """Each waits for the other: a loop, which is walked once."""
    events = [
        [all_reduce(at, 10, 64, [0, 1], **{"Process Group Name": group, "Seq": 1}) for at, group in calls]
        for calls in (((0, "0"), (10, "1")), ((0, "1"), (10, "0")))
    ]
    summary = summary_of(tmp_path, events, host_name="one")
    assert len([one for one in summary.collectives if one.num_ranks == 2]) == 2
    assert critical_path(summary).span_s == pytest.approx(10e-6)


def test_idle_time_by_cause(tmp_path):
    """A gap before a late launch, one behind another stream, one between queued kernels."""
    times = ((0, 0, 10), (30, 25, 10), (41, 1, 9), (100, 2, 10))  # start, launch, duration
    events = []
    for number, (start, launch, lasts) in enumerate(times, start=1):
        events += launched("gemm", launch, start, lasts, number)
    found = summary_of(tmp_path, [events])
    idle = {"host": 20_000, "device": 1000, "dependency": 50_000, "unknown": 0}
    assert {cause: length(next(found.intervals()).idle(cause)) for cause in CAUSES} == idle


def _memory(ts, delta, total, address, device=0):
    args = {"Bytes": delta, "Total Allocated": total, "Total Reserved": 2 * total, "Addr": address}
    args |= {"Device Type": 1, "Device Id": device}
    return {"ph": "i", "name": "[memory]", "pid": 100, "tid": 1, "ts": ts, "args": args}


def test_who_holds_memory_at_the_peak(tmp_path, meshwise):
    """100 B from before; the peak is in `aten::add`, with what `aten::mm` of a section still holds."""
    sections = [("user_annotation", "layer 0", 0, 50), ("cpu_op", "aten::linear", 5, 20)]
    sections += [("cpu_op", "aten::mm", 10, 10), ("cpu_op", "aten::add", 60, 20)]
    memory = [(12, 400, 500, 1), (13, 50, 550, 2), (20, -50, 500, 2), (65, 300, 800, 2), (70, -400, 400, 1)]
    events = [*itertools.starmap(host, sections), *itertools.starmap(_memory, memory)]
    path = write_trace(tmp_path / "rank-0.json", events, 0)
    (found,) = memory_peaks(summarize_paths([path]).traces)
    assert (found.device, found.peak_bytes, found.reserved_bytes) == ("device 0", 800, 1600)
    assert (found.operator, found.held_before_bytes) == ("aten::add", 100)
    held = [(one.name, one.bytes) for one in found.holders]
    assert held == [("layer 0: aten::linear", 400), ("aten::add", 300)]
    assert meshwise("trace", "memory", str(path), "--json").document["peaks"][0]["peak_bytes"] == 800
    bare = write_trace(tmp_path / "bare.json", [kernel("gemm", 0, 1)], 0)
    done = meshwise("trace", "memory", str(bare))
    assert done.code == 2 and "profile_memory=True" in done.err


def test_rates_against_the_roof(tmp_path, meshwise):
    """A matmul of 4096^3 in bf16 in 200 us is 687 TFLOP/s; causal attention counts half of the pairs."""
    q = [2, 16, 1024, 128]
    attention, values = "aten::_scaled_dot_product_flash_attention", ["", "", "", "0.", "True"]
    events = [
        operator("aten::mm", 1000, 20, [[4096, 4096], [4096, 4096]]),
        *launched("k", 1005, 1050, 200, 1),
        operator(attention, 2000, 20, [q, q, q, [], []], **{"Concrete Inputs": values}),
        *launched("k", 2005, 2050, 50, 2),
        operator("aten::add", 3000, 20, [[1 << 20], [1 << 20]], "float"),
        *launched("k", 3005, 3050, 10, 3),
    ]
    path = write_trace(tmp_path / "rank-0.json", events, 0)
    wrapped = [operator("aten::add", k, 20 - 2 * k, [[64 >> k], [64 >> k]], "float") for k in (0, 1)]
    (inner,) = op_rates(summarize_paths([write_trace(tmp_path / "d.json", wrapped, 0)]).traces)
    assert inner.shape == "32"  # a DTensor's operator runs the same on its shard
    found = {row.kind: row for row in op_rates(summarize_paths([path]).traces, find_chip("h100-80g-sxm"))}
    assert found["matmul"].flop_per_s == pytest.approx(2 * 4096**3 / 200e-6)
    assert found["matmul"].roof_frac == pytest.approx(2 * 4096**3 / 200e-6 / 989e12, rel=0.01)
    pairs = 1024 * 1024 / 2
    assert found["attention"].flop == pytest.approx(4 * 2 * 16 * 128 * pairs, rel=0.01)
    assert found["elementwise"].bytes_per_s == pytest.approx(3 * 4 * 2**20 / 10e-6)
    done = meshwise("trace", "rates", str(path), "--cluster", "h100-80g-sxm:8", "--json")
    assert {row["kind"] for row in done.document["operators"]} == {"matmul", "attention", "elementwise"}
    assert meshwise("trace", "rates", str(GLOO4.parent / "hta" / "rank-70.json.gz")).code == 2


def test_bus_bandwidth_is_that_of_nccl_tests(tmp_path, meshwise):
    """All-reduce of n ranks: bus = algorithm x 2 (n-1)/n; of the link of the level that joins the group."""
    events = [all_reduce(1000.0 * step, 100.0, 5_000_000, [0, 1, 2, 3]) for step in range(3)]
    (found,) = bandwidths(summary_of(tmp_path, [events] * 4, host_name="node").collectives)
    assert found.count == 3 and found.algorithm_bytes_per_s == pytest.approx(1e7 / 100e-6)
    assert found.bus_bytes_per_s == pytest.approx(1.5 * found.algorithm_bytes_per_s)
    done = meshwise("trace", "bandwidth", str(tmp_path), "--cluster", "a100-80g-sxm:8", "--json")
    (row,) = done.document["collectives"]
    assert row["link_frac"] == pytest.approx(found.bus_bytes_per_s / 300e9) and row["predicted_s"] > 0


def test_a_call_is_predicted_over_the_links_that_join_its_ranks(tmp_path):
    """A message from 4 to 8 leaves the host as one from 0 to 8 does, though only four ranks lie between."""
    events = [[] for _ in range(9)]
    for a, b in ((0, 8), (4, 8), (0, 4)):
        events[a].append(message("send", 1000.0 * (a + b), 700.0, 8_000_000, b))
        events[b].append(message("recv", 1000.0 * (a + b), 700.0, 8_000_000, a))
    rows = bandwidths(summary_of(tmp_path, events).collectives, find_cluster("h100-80g-sxm:16"))
    found = {row.group: row.predicted_s for row in rows}
    assert found["4->8"] == found["0->8"] > 32e6 / 50e9 and found["0->4"] < 32e6 / 300e9


def test_one_page_of_all(tmp_path, meshwise):
    """Findings, path, memory and rates in one file; a name is text, not markup."""
    pytest.importorskip("plotly")
    pytest.importorskip("matplotlib")
    drawn = meshwise("trace", "plot", str(GLOO4), "-o", str(tmp_path / "a.svg"), "--json").document
    assert drawn["findings"][0]["ranks"] == [3] and "Rank 3 is late" in (tmp_path / "a.svg").read_text()
    name = "<script>alert(1)</script>"
    trace = write_trace(tmp_path / "rank-0.json", [kernel(name, 0, 10), kernel("gemm", 20, 5)], 0)
    page = tmp_path / "report.html"
    assert meshwise("trace", "report", str(trace), "-o", str(page)).code == 0
    assert "roofline" not in page.read_text()  # there is no roof without a chip
    assert name not in page.read_text() and "&lt;script&gt;alert(1)" in page.read_text()
    done = meshwise("trace", "report", str(GLOO4), "-o", str(page), "--cluster", "a100-80g-sxm:4", "--json")
    assert json.loads(done.out) == {"file": str(page), "num_ranks": 4}
    for text in table("tables")["trace"]["page"]:
        assert text in page.read_text(), text
