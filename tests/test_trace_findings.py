"""The cause in words: jobs with a known fault, the parts of each rank's time, copies, the picture."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kineto import all_reduce, host, kernel, write_trace
from meshwise.trace.breakdown import breakdown
from meshwise.trace.copies import copy_kind
from meshwise.trace.intervals import difference, length, merged
from meshwise.trace.partition import PARTS, partition
from meshwise.trace.read import read_trace
from meshwise.trace.summary import summarize_paths

GLOO4 = Path(__file__).parent / "data" / "traces" / "gloo4"
STEPS = 5


def _job(folder, fault, num_ranks=16):
    """Pairs reduce, then all; every step: two kernels of 400 µs, a pair's call, a call of groups of four."""
    rng = np.random.default_rng(0)
    clock = rng.normal(0, 1e6, num_ranks).round()
    now, asked = np.zeros(num_ranks), np.zeros(num_ranks)
    events = {rank: [] for rank in range(num_ranks)}

    def compute(rank, name, length, at_least=0.0):
        asked[rank] = max(asked[rank] + 5, at_least)
        now[rank] = max(now[rank], asked[rank] + 5)
        number = len(events[rank]) + 1
        events[rank] += [
            host("cuda_runtime", "cudaLaunchKernel", asked[rank] + clock[rank], 4, correlation=number),
            kernel(name, now[rank] + clock[rank], length, correlation=number),
        ]
        now[rank] += length

    def reduce(ranks, wire, sequence):
        end = now[ranks].max() + wire
        for rank in ranks:
            args = (now[rank] + clock[rank], end - now[rank], 1_000_000, ranks)
            events[rank].append(all_reduce(*args, Seq=sequence))
            now[rank] = end

    for step in range(STEPS):
        for rank in range(num_ranks):
            slow = 1.5 if (fault, rank) == ("slow device", 5) else 1.0
            late = now[rank] + 300 if (fault, rank) == ("slow host", 6) else 0.0
            if (fault, rank, step) == ("pause", 7, 2):
                late = now[rank] + 3000
            compute(rank, "gemm", 400 * slow, late)
            compute(rank, "flash", (1200 if (fault, rank) == ("larger work", 9) else 400) * slow)
            if (fault, rank) == ("more work", 8):
                compute(rank, "expert", 500)
        for first in range(0, num_ranks, 2):
            pair = [first, first + 1]
            reduce(pair, 300 if (fault, first) == ("slow link", 4) else 100, step)
        for first in range(4):
            reduce(list(range(first, num_ranks, 4)), 50, step)
    for rank, found in events.items():
        write_trace(folder / f"rank-{rank}.json", found, rank)
    return summarize_paths([folder])


@pytest.mark.parametrize(
    ("fault", "ranks", "cost_us"),
    [
        ("slow device", (5,), STEPS * 400),
        ("slow host", (6,), STEPS * 300),
        ("pause", (7,), 3000),
        ("more work", (8,), STEPS * 500),
        ("larger work", (9,), STEPS * 800),
        ("slow link", (4, 5), STEPS * 200),
    ],
)
def test_the_cause_is_named(tmp_path, fault, ranks, cost_us):
    """The first finding is the fault, its ranks and what it costs; on clocks a second apart."""
    found = _job(tmp_path, fault)
    assert found.problems == []
    first, *others = found.findings
    assert (first.kind, first.ranks) == (fault, ranks)
    assert first.seconds == pytest.approx(cost_us / 1e6, rel=0.02)
    span = max(rank.span_s for rank in found.ranks)
    assert first.span_frac == pytest.approx(first.seconds / span) and str(ranks[-1]) in first.text
    assert not [other for other in others if len(other.ranks) < 16]


def test_no_fault_no_finding(tmp_path):
    found = _job(tmp_path, "none")
    assert [one.kind for one in found.findings] == ["exposed communication"]


def test_parts_of_a_rank(tmp_path):
    """Compute 0-40, a call 30-100 that waits until 60, a copy 90-120, a kernel 150-160 launched late."""
    events = [
        kernel("gemm", 0, 40, correlation=1),
        all_reduce(30, 70, 10, [0, 1]),
        kernel("Memcpy HtoD (Pinned -> Device)", 90, 30, 9, bytes=3000),
        host("cuda_runtime", "cudaLaunchKernel", 130, 4, correlation=2),
        kernel("gemm", 150, 10, correlation=2),
    ]
    trace, _ = read_trace(write_trace(tmp_path / "a.json", events, 0))
    found = partition(trace, {1: 30_000})
    in_us = {part: round(seconds * 1e6) for part, seconds in found.seconds.items()}
    assert in_us == {"compute": 50, "transfer": 40, "memory": 20, "wait": 20, "idle": 30}
    assert found.host_bound_s == pytest.approx(30e-6)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["gemm", "ncclX", "Memcpy"]),
            st.integers(0, 300),
            st.integers(1, 80),
            st.floats(0, 1),
        ),
        min_size=1,
        max_size=15,
    )
)
def test_parts_sum_to_the_span(tmp_path_factory, kernels):
    """Whatever overlaps, no moment is counted twice or left out; compute and idle are the breakdown's."""
    events = [kernel(name, start, dur, stream) for stream, (name, start, dur, _) in enumerate(kernels)]
    path = write_trace(tmp_path_factory.mktemp("t") / "a.json", events, 0)
    trace, _ = read_trace(path)
    waits = {i: int(trace.duration_ns[i] * kernels[int(trace.stream[i])][3]) for i in range(len(trace))}
    found, usual = partition(trace, waits), breakdown(trace)
    assert sum(found.seconds.values()) == pytest.approx(usual.span_s, abs=1e-12)
    assert found.seconds["compute"] == pytest.approx(usual.compute_s, abs=1e-12)
    assert found.seconds["idle"] == pytest.approx(usual.idle_s, abs=1e-12)
    exposed = found.seconds["transfer"] + found.seconds["wait"]
    assert exposed <= usual.exposed_communication_s + 1e-12
    assert set(found.spans) == set(PARTS)


spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 15)), max_size=12)


@given(spans, spans)
def test_difference_as_sets_of_points(a, b):
    def union(found):
        start = np.array([s for s, _ in found], dtype=np.int64)
        return merged(start, start + np.array([d for _, d in found], dtype=np.int64))

    def points(pair):
        return {t for s, e in zip(*pair, strict=True) for t in range(s, e)}

    rest = difference(union(a), union(b))
    assert points(rest) == points(union(a)) - points(union(b)) and length(rest) == len(points(rest))


def test_copies_by_kind(tmp_path):
    events = [
        kernel("Memcpy HtoD (Pinned -> Device)", 0, 10, bytes=1000),
        kernel("Memcpy HtoD (Pageable -> Device)", 20, 30, bytes=7000),
        kernel("Memcpy DtoH (Device -> Pageable)", 60, 5),
        kernel("Memset (Device)", 80, 1, bytes=64),
    ]
    found = {c.kind: c for c in summarize_paths([write_trace(tmp_path / "rank0.json", events)]).copies}
    one = found["Memcpy HtoD"]
    assert (one.count, one.bytes, one.min_bytes, one.max_bytes) == (2, 8000, 1000, 7000)
    assert one.bytes_per_s == pytest.approx(8000 / 40e-6)
    assert found["Memcpy DtoH"].bytes is None and found["Memset"].median_bytes == 64
    assert copy_kind("dma_request") == "dma_request"


def test_real_ranks():
    """Rank 3 of the gloo ranks slept before every exchange."""
    first = summarize_paths([GLOO4]).findings[0]
    assert first.ranks == (3,) and first.seconds == pytest.approx(0.08, rel=0.2)


def test_picture(meshwise, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "job").mkdir()
    _job(tmp_path / "job", "slow device")
    done = meshwise("trace", "plot", str(tmp_path / "job"), "-o", str(tmp_path / "a.svg"), "--json")
    assert done.code == 0 and done.document["findings"][0]["ranks"] == [5]
    drawn = (tmp_path / "a.svg").read_text()
    assert "Rank 5 holds the others up" in drawn
    assert meshwise("trace", "plot", str(tmp_path / "job"), "-o", str(tmp_path / "a.txt")).code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.svg", "job"]


def test_messages_without_ends_tell_nothing(tmp_path):
    """A pipeline of three stages, the second slow, whose kernels name neither sender nor receiver."""
    name = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
    events, now = {rank: [] for rank in range(3)}, [0.0] * 3
    for _ in range(24):
        ready = 0.0
        for rank, own in events.items():
            if rank:
                own.append(kernel(name, now[rank], max(ready, now[rank]) + 20 - now[rank], 24))
                now[rank] = max(ready, now[rank]) + 20
            own.append(kernel("gemm", now[rank], 450.0 if rank == 1 else 300.0))
            now[rank] += 450.0 if rank == 1 else 300.0
            if rank < 2:
                own.append(kernel(name, now[rank], 20, 24))
                now[rank] += 20
            ready = now[rank]
    for rank, own in events.items():
        write_trace(tmp_path / f"rank-{rank}.json", own, rank, world_size=3, host_name="node")
    first = summarize_paths([tmp_path]).findings[0]
    assert first.kind == "undecided" and not first.ranks and "cannot be told" in first.text
