"""One timeline of all ranks: it nests, it keeps one clock, it is written whole or not at all."""

import gzip
import json
from collections import defaultdict

import pytest
from hypothesis import given, strategies as st

from data_tables import TRACES
from kineto import all_reduce, host, kernel, launched, summary_of, write_trace
from meshwise.trace.merge import write_merged
from meshwise.trace.summary import summarize_paths


def _merged(found, output):
    num_cut = write_merged(found, output)["cut"]
    content = output.read_bytes()
    document = json.loads(gzip.decompress(content) if output.suffix == ".gz" else content)
    return document["traceEvents"], num_cut


def check_nests(events):
    """Slices of a lane are disjoint or one inside the other, to the nanosecond."""
    lanes = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            start = round(e["ts"] * 1000)
            lanes[e["pid"], e["tid"]].append((start, -(start + round(e["dur"] * 1000))))
    for slices in lanes.values():
        ends = []
        for start, end in sorted(slices):
            while ends and ends[-1] <= start:
                ends.pop()
            assert not ends or -end <= ends[-1]
            ends.append(-end)


@pytest.mark.parametrize("folder", ["gloo4", "hta/sampled"])
@pytest.mark.parametrize("name", ["all.json", "all.json.gz"])
def test_real_ranks(tmp_path, folder, name):
    events, _ = _merged(summarize_paths([TRACES / folder]), tmp_path / name)
    check_nests(events)
    ranks = {e["pid"] for e in events}
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {rank: f"rank {rank}" for rank in ranks}
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} == named
    assert min(e["ts"] for e in events if e["ph"] == "X") == 0


def test_calls_under_way_together_have_lanes_of_their_own(tmp_path):
    """Three reductions of one group, each begun before the last has ended."""
    calls = (
        [all_reduce(100.0 * k + late, 250 - late, 10, [0, 1], Seq=k) for k in range(3)] for late in (0, 7)
    )
    events, _ = _merged(summary_of(tmp_path, calls, host_name="node"), tmp_path / "all.json")
    check_nests(events)
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"collectives of 0,1", "collectives of 0,1 (2)", "collectives of 0,1 (3)"} <= names


def test_ranks_share_one_clock(tmp_path):
    """Rank 1's clock is 3 ms ahead; in the timeline both leave the all-reduce together."""
    first = [*launched("gemm", 1, 10, 20, 9), all_reduce(30, 40, 64, [0, 1])]
    second = [*launched("gemm", 3001, 3010, 50, 9), all_reduce(3060, 10, 64, [0, 1])]
    events, num_cut = _merged(summary_of(tmp_path, [first, second]), tmp_path / "all.json")
    ends = [e["ts"] + e["dur"] for e in events if e["ph"] == "X" and e["name"].startswith("nccl")]
    assert ends == [69.0, 69.0] and num_cut == 0
    waits = [(e["pid"], e["ts"], e["dur"]) for e in events if e["name"] == "wait for rank 1"]
    assert waits == [(0, 29.0, 30.0)]
    late = [(e["ph"], e["pid"], e["ts"]) for e in events if e.get("cat") == "wait"]
    assert late == [("s", 1, 59.0), ("f", 0, 59.0)]
    arrows = [(e["ph"], e["pid"], e["ts"]) for e in events if e.get("cat") == "launch"]
    assert arrows == [("s", 0, 0.0), ("f", 0, 9.0), ("s", 1, 0.0), ("f", 1, 9.0)]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 30), st.integers(1, 2)), min_size=1, max_size=15)
)
def test_any_slices_are_made_to_nest(tmp_path_factory, slices):
    folder = tmp_path_factory.mktemp("t")
    events = [kernel(f"k{i}", start, dur, stream) for i, (start, dur, stream) in enumerate(slices)]
    merged, _ = _merged(summary_of(folder, [events]), folder / "out.json")
    check_nests(merged)
    starts = sorted(e["ts"] for e in merged if e["ph"] == "X")
    assert starts == sorted(float(s - min(x[0] for x in slices)) for s, _, _ in slices)


def test_counters_and_a_bound(tmp_path, meshwise):
    """Allocated bytes over time; of many slices the longest, and all communication."""
    events = [host("cpu_op", f"op{k}", 10 * k, 1 + k) for k in range(8)]
    events += [*launched("k", 1, 20, 5, 1), all_reduce(30, 0.5, 10, [0, 1])]
    memory = {"Bytes": 64, "Total Allocated": 64, "Device Type": 1, "Device Id": 0, "Addr": 1}
    events.append({"ph": "i", "name": "[memory]", "pid": 100, "tid": 1, "ts": 5, "args": memory})
    path, merged = write_trace(tmp_path / "rank-0.json", events, 0), tmp_path / "all.json"
    done = meshwise("trace", "merge", str(path), "-o", str(merged), "--max-slices", "4", "--json")
    found = json.loads(merged.read_text())["traceEvents"]
    names = {e["name"] for e in found if e["ph"] == "X"}
    assert names >= {"op7", "op6"} and "op0" not in names and any(name.startswith("nccl") for name in names)
    assert done.document["num_slices"] + done.document["num_left_out"] == 11
    assert sum(e["ph"] == "X" for e in found) == done.document["num_slices"] <= 5
    counters = [(e["name"], e["ts"], e["args"]["value"]) for e in found if e["ph"] == "C"]
    assert ("memory of device 0", 5.0, 64) in counters
