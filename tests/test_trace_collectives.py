"""Matching collectives across ranks, aligning clocks, and splitting waiting from transfer."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kineto import all_reduce, kernel, write_trace
from meshwise.trace.sections import joint_sections
from meshwise.trace.summary import all_sections, summarize_paths
from meshwise.trace.transfers import collective_kind

DATA = Path(__file__).parent / "data" / "traces"
WIRE_US = 10.0


def _job(folder, arrivals, offsets_us, elements=1_000_000, skip=0, **args):
    """Ranks that meet in one all-reduce a step: `arrivals[step][rank]` in µs on clocks `offsets_us` ahead."""
    num_ranks = len(offsets_us)
    for rank in range(num_ranks):
        events = []
        for step, at in enumerate(arrivals):
            end = max(at) + WIRE_US + 1000.0 * step
            start = at[rank] + 1000.0 * step
            if step >= skip * rank:
                clock = offsets_us[rank]
                events.append(kernel("gemm", start - 5 + clock, 5))
                events.append(
                    all_reduce(start + clock, end - start, elements, list(range(num_ranks)), **args)
                )
        write_trace(folder / f"rank-{rank}.json", events, rank)
    return summarize_paths([folder])


arrival = st.lists(st.lists(st.integers(0, 500), min_size=3, max_size=3), min_size=3, max_size=8)


@given(arrival, st.lists(st.integers(-5_000_000, 5_000_000), min_size=3, max_size=3))
def test_clocks_and_waits_are_recovered(tmp_path_factory, arrivals, offsets):
    """Whatever the clocks say, waits are the differences of arrival, the last to arrive waits for none."""
    found = _job(tmp_path_factory.mktemp("job"), arrivals, offsets)
    for rank, offset in enumerate(offsets):
        assert found.alignment.offsets_s[rank] == pytest.approx((offset - offsets[0]) / 1e6, abs=2e-9)
    assert found.alignment.residual_s == pytest.approx(0.0, abs=4e-9)
    assert len(found.collectives) == len(arrivals)
    for one, at in zip(found.collectives, arrivals, strict=True):
        assert one.name == "all_reduce" and one.bytes == 2_000_000 and one.group == "0-2"
        assert one.wire_s == pytest.approx(WIRE_US / 1e6, abs=4e-9)
        for rank in range(3):
            assert one.wait_s[rank] == pytest.approx((max(at) - at[rank]) / 1e6, abs=4e-9)
        assert at[one.last_rank] == max(at)
    assert sum(row.waited_s for row in found.stragglers) == pytest.approx(
        sum(row.awaited_s for row in found.stragglers)
    )


def test_ring_all_reduce_speed(tmp_path):
    """2 V (n-1)/n bytes leave a rank in the time on the wire."""
    found = _job(tmp_path, [[0, 3, 1, 2]] * 3, [0, 0, 0, 0])
    assert found.collectives[0].sent_bytes_per_s == pytest.approx(2 * 2e6 * 3 / 4 / 10e-6)


def test_profilers_that_start_apart(tmp_path):
    """Rank r's profile lacks the first r calls; the others still find each other."""
    rng = np.random.default_rng(0)
    arrivals = rng.integers(0, 300, (20, 3)).tolist()
    found = _job(tmp_path, arrivals, [0, 40_000, -7_000], skip=1)
    full = [one for one in found.collectives if one.num_ranks == 3]
    assert len(full) == 18 and found.problems == []
    for one, at in zip(full, arrivals[2:], strict=True):
        assert one.last_rank == int(np.argmax(at)) or max(at) == at[one.last_rank]
    assert found.alignment.offsets_s[2] == pytest.approx(-7e-3, abs=1e-8)


def test_sequence_numbers_win(tmp_path):
    """With sequence numbers, calls match by number even where one rank lost some in the middle."""
    for rank, kept in ((0, [1, 2, 3, 4, 5]), (1, [1, 3, 5])):
        events = [all_reduce(100.0 * n + 3 * rank, 50 - 3 * rank, 10, [0, 1], Seq=n) for n in kept]
        write_trace(tmp_path / f"rank-{rank}.json", events, rank)
    found = {one.index: one for one in summarize_paths([tmp_path]).collectives}
    assert {index: one.num_ranks for index, one in found.items()} == {1: 2, 2: 1, 3: 2, 4: 1, 5: 2}
    assert found[3].wait_s == {0: pytest.approx(3e-6), 1: 0.0} and found[3].last_rank == 1


def test_groups_chain_the_clocks(tmp_path):
    """Ranks 0-1 and 2-3 meet in pairs, 1 and 2 in another group: all four get one clock."""
    offsets = [0.0, 11.0, -23.0, 500.0]
    pairs = [[0, 1], [2, 3], [1, 2]]
    for rank in range(4):
        events = [
            all_reduce(1000.0 * step + 200 * k + offsets[rank], 50, 10, pair)
            for step in range(4)
            for k, pair in enumerate(pairs)
            if rank in pair
        ]
        write_trace(tmp_path / f"rank-{rank}.json", events, rank)
    found = summarize_paths([tmp_path])
    assert [found.alignment.offsets_s[r] * 1e6 for r in range(4)] == pytest.approx(offsets, abs=0.01)


def test_calls_that_never_met_are_told(tmp_path):
    for rank, at in ((0, 0.0), (1, 5_000_000.0)):
        events = [all_reduce(100.0 * n, 5, 10, [0, 1], Seq=n) for n in range(9)]
        events.append(all_reduce(2000.0 + at, 5, 10, [0, 1], Seq=9))
        write_trace(tmp_path / f"rank-{rank}.json", events, rank)
    found = summarize_paths([tmp_path])
    assert len(found.collectives) == 9 and "1 collectives do not overlap" in found.problems[0].reason


def test_one_rank_alone_cannot_be_split(tmp_path):
    path = write_trace(tmp_path / "a.json", [all_reduce(0, 50, 10, [0, 1])], 0)
    found = summarize_paths([path])
    assert found.alignment.method == "one rank" and found.collectives[0].num_ranks == 1
    assert found.collectives[0].wire_s == pytest.approx(50e-6) and found.stragglers == []


def test_real_ranks_without_metadata():
    """Two sampled ranks of a real job: NCCL's names only, calls missing; NTP kept the clocks within 1 ms."""
    found = summarize_paths([DATA / "hta" / "sampled"])
    assert found.alignment.num_collectives >= 3
    assert abs(found.alignment.offsets_s[1]) < 1e-3 and found.alignment.residual_s < 1e-3


def test_real_gloo_ranks():
    """Captured on CPU: groups and sizes from the flight recorder; rank 3 slept, the others waited."""
    found = summarize_paths([DATA / "gloo4"])
    assert found.problems == [] and found.alignment.method == "one host, one clock"
    exchanges = [one for one in found.collectives if one.name == "all_to_all"]
    assert len(exchanges) == 3 and all(one.last_rank == 3 and one.num_ranks == 4 for one in exchanges)
    assert all(one.bytes == 64 * 64 * 4 and max(one.wait_s.values()) > 0.02 for one in exchanges)
    pairs = [one for one in found.collectives if one.group in ("0,1", "2,3")]
    assert len(pairs) == 6 and all(one.name == "all_reduce" and one.num_ranks == 2 for one in pairs)
    gathered = next(one for one in found.collectives if one.name == "all_gather")
    assert gathered.bytes == 4 * 64 * 64 * 4
    assert max(found.stragglers, key=lambda row: row.awaited_s).rank == 3
    joint = {(row.name, row.quantity): row.straggler for row in joint_sections(all_sections(found))}
    assert joint["MoELayer", "wait"] == joint["MoELayer", "communication"] == 3
    layers = [row for row in all_sections(found) if row.name == "MoELayer"]
    assert [row.count for row in layers] == [3] * 4
    for row in layers:
        waited = sum(one.wait_s[row.rank] for one in exchanges)
        spent = sum(one.wait_s[row.rank] + one.wire_s for one in exchanges)
        assert row.wait_s == pytest.approx(waited) and row.communication_s == pytest.approx(spent)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_gather"),
        ("ncclKernel_ReduceScatter_TREE_LL_Sum_half", "reduce_scatter"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", "send_recv"),
        ("_allgather_base", "all_gather"),
        ("gloo:all_to_all", "all_to_all"),
        ("c10d::alltoall_base_", "all_to_all"),
        ("nccl:broadcast", "broadcast"),
        ("ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)", "unknown"),
    ],
)
def test_names_of_collectives(name, kind):
    assert collective_kind(name) == kind
