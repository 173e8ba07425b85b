"""The cause in words: jobs with a known fault, the parts of each rank's time, copies, the picture."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs import Job, write_job
from kineto import all_reduce, host, kernel, write_trace
from meshwise.trace.breakdown import PARTS, breakdown, partition
from meshwise.trace.read import read_trace
from meshwise.trace.summary import summarize_paths


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
    assert tuple(found.seconds) == PARTS


def test_picture(meshwise, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "job").mkdir()
    write_job(tmp_path / "job", Job(16, 5, "slow device", rank=5, size=0.5))
    done = meshwise("trace", "plot", str(tmp_path / "job"), "-o", str(tmp_path / "a.svg"), "--json")
    assert done.code == 0 and done.document["findings"][0]["ranks"] == [5]
    drawn = (tmp_path / "a.svg").read_text()
    assert "Rank 5 is late in 4 of 4 steps" in drawn
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


def test_calls_around_a_launch_name_what_the_kernel_does(tmp_path):
    """NCCL's kernel says SendRecv, its call all-to-all; two calls are too few, and who came last is told."""
    for rank in range(4):
        events = []
        for number, start in enumerate((0, 1000), start=1):
            arrived, end = start + (900 if rank == 2 else 100 + rank), start + 950
            shapes = {"Input Dims": [[250 + rank]], "Input type": ["float"]}
            events += [
                host("cpu_op", "c10d::alltoall_base_", arrived - 10, 9),
                host("user_annotation", "nccl:all_to_all", arrived - 9, 7, **shapes),
                host("cuda_runtime", "cudaLaunchKernel", arrived - 8, 2, correlation=number),
                kernel("ncclKernel_SendRecv_RING", arrived, end - arrived, 24, correlation=number),
            ]
        write_trace(tmp_path / f"rank-{rank}.json", events, rank, 4, host_name="node")
    found = summarize_paths([tmp_path])
    calls = [(one.name, one.num_ranks, one.bytes) for one in found.collectives]
    assert calls == [("all_to_all", 4, 1012)] * 2
    assert found.findings[0].kind == "undecided" and "longest for rank 2 (last in 2" in found.findings[0].text
