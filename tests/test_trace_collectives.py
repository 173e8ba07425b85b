"""Matching collectives across ranks, aligning clocks, and splitting waiting from transfer."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from data_tables import GLOO4, TRACES
from kineto import SEND_RECV, all_reduce, host, kernel, message, summary_of, write_trace
from meshwise.trace.operators import joint_sections
from meshwise.trace.summary import all_sections, summarize_paths

WIRE_US = 10.0


def _job(folder, arrivals, offsets_us, skip=0):
    """Ranks that meet in one all-reduce a step: `arrivals[step][rank]` in µs on clocks `offsets_us` ahead."""
    ranks = list(range(len(offsets_us)))
    events = [[] for _ in ranks]
    for rank, clock in enumerate(offsets_us):
        for step, at in list(enumerate(arrivals))[skip * rank :]:
            start = at[rank] + 1000.0 * step + clock
            events[rank].append(kernel("gemm", start - 5, 5))
            events[rank].append(all_reduce(start, max(at) - at[rank] + WIRE_US, 1_000_000, ranks))
    return summary_of(folder, events)


def _calls(starts, ends):
    """All-reduces of three ranks, by their starts and ends on each rank [µs]."""
    spans = [np.stack([at, end - at], axis=1).round(3) for at, end in zip(starts, ends, strict=True)]
    return [[all_reduce(*map(float, of), 10, [0, 1, 2]) for of in own] for own in spans]


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
    waited_s, awaited_s = np.sum([(row.waited_s, row.awaited_s) for row in found.stragglers], axis=0)
    assert waited_s == pytest.approx(awaited_s)


@settings(max_examples=15)
@given(st.lists(st.integers(-80, 80), min_size=3, max_size=3), st.integers(0, 2**32 - 1))
def test_waits_need_no_steady_clocks(tmp_path_factory, drifts_ppm, seed):
    """Calls over 60 s with 1 µs of noise, on clocks that drift apart by 10 ms: waits are told to 5 µs."""
    folder, random = tmp_path_factory.mktemp("job"), np.random.default_rng(seed)
    arrivals = random.uniform(0, 500, (120, 3))
    begin, clocks = 5e5 * np.arange(120), [1 + ppm * 1e-6 for ppm in drifts_ppm]
    starts = [(begin + arrivals[:, rank]) * clock for rank, clock in enumerate(clocks)]
    left = [begin + arrivals.max(axis=1) + WIRE_US + random.uniform(0, 1, 120) for _ in clocks]
    ends = [end * clock for end, clock in zip(left, clocks, strict=True)]
    found = summary_of(folder, _calls(starts, ends))
    for one, at in zip(found.collectives, arrivals, strict=True):
        assert [one.wait_s[r] * 1e6 for r in range(3)] == pytest.approx((at.max() - at).tolist(), abs=5)


def test_a_lost_kernel_shifts_no_clock(tmp_path):
    """Rank 1 lost one of 12 calls in the middle: its others are still matched, and its clock is told."""
    rng = np.random.default_rng(1)
    begin, arrivals = 50_000.0 * np.arange(12) + rng.uniform(0, 100, 12), rng.uniform(0, 500, (12, 3))
    clocks_us, last = (0.0, 3e6, -2e6), begin + arrivals.max(axis=1) + WIRE_US
    starts = [begin + arrivals[:, rank] + clock for rank, clock in enumerate(clocks_us)]
    calls = _calls(starts, [last + clock for clock in clocks_us])
    del calls[1][6]
    found = summary_of(tmp_path, calls)
    assert [found.alignment.offsets_s[rank] for rank in range(3)] == pytest.approx([0.0, 3.0, -2.0], abs=1e-6)
    assert sorted(one.num_ranks for one in found.collectives) == [2] + [3] * 11


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
    first = [all_reduce(100.0 * n, 50, 10, [0, 1], Seq=n) for n in (1, 2, 3, 4, 5)]
    second = [all_reduce(100.0 * n + 3, 47, 10, [0, 1], Seq=n) for n in (1, 3, 5)]
    found = {one.index: one for one in summary_of(tmp_path, [first, second]).collectives}
    assert {index: one.num_ranks for index, one in found.items()} == {1: 2, 2: 1, 3: 2, 4: 1, 5: 2}
    assert found[3].wait_s == {0: pytest.approx(3e-6), 1: 0.0} and found[3].last_rank == 1
    assert summarize_paths([tmp_path]).problems[0].text.startswith("2 of 5 collectives were not found")


@pytest.mark.parametrize("swapped", [False, True])
def test_late_ends_and_another_order_change_no_match(tmp_path, swapped):
    """Gloo on a busy host: rank 1 often leaves long after rank 0, and begins two calls in another order."""
    events = ([], [])
    for rank, number in itertools.product(range(2), range(40)):
        call = number ^ 1 if swapped and rank and number in (20, 21) else number
        left = 30_000.0 + 1000 * rank * max(number % 9 - 3, 0) ** 2
        events[rank].append(all_reduce(20_000.0 * number, left, 10 + call % 4, [0, 1]))
    found = summary_of(tmp_path, events, host_name="node")
    assert [one.num_ranks for one in found.collectives] == [2] * 40 and found.problems == []


def test_groups_chain_the_clocks(tmp_path):
    """Ranks 0-1 and 2-3 meet in pairs, 1 and 2 in another group: all four get one clock."""
    offsets = [0.0, 11.0, -23.0, 500.0]
    events = [[] for _ in offsets]
    for step, (k, pair) in itertools.product(range(4), enumerate(([0, 1], [2, 3], [1, 2]))):
        for rank in pair:
            events[rank].append(all_reduce(1000.0 * step + 200 * k + offsets[rank], 50, 10, pair))
    found = summary_of(tmp_path, events)
    assert [found.alignment.offsets_s[r] * 1e6 for r in range(4)] == pytest.approx(offsets, abs=0.01)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 400)), min_size=1, max_size=6), st.data())
def test_messages_of_a_pipeline(tmp_path_factory, arrivals, data):
    """Four stages, each sends forward and back, on clocks seconds apart that only the messages link."""
    folder = tmp_path_factory.mktemp("job")
    clocks = data.draw(st.lists(st.integers(-5_000_000, 5_000_000), min_size=4, max_size=4))
    events = [[] for _ in range(4)]
    for step, (sender, receiver) in enumerate(arrivals):
        for hop, (a, b) in enumerate(((0, 1), (1, 2), (2, 3), (3, 2), (2, 1), (1, 0))):
            at = 10_000.0 * step + 1000.0 * hop
            end = at + max(sender, receiver) + WIRE_US
            numbers = {"Seq": 100 * a + step}  # of one rank: of no use to the other
            for rank, kind, start, peer in ((a, "send", sender, b), (b, "recv", receiver, a)):
                args = (at + start + clocks[rank], end - at - start, 250 * (hop + 1), peer)
                events[rank].append(message(kind, *args, **numbers))
    found = summary_of(folder, events)
    assert found.problems == []
    for rank, clock in enumerate(clocks):
        assert found.alignment.offsets_s[rank] == pytest.approx((clock - clocks[0]) / 1e6, abs=2e-9)
    assert len(found.collectives) == 6 * len(arrivals)
    for one in found.collectives:
        a, b = map(int, one.group.split("->"))
        sender, receiver = arrivals[one.index]
        wire_s = pytest.approx(WIRE_US / 1e6, abs=4e-9)
        assert (one.name, one.num_ranks, one.wire_s) == ("send_recv", 2, wire_s)
        assert one.wait_s[a] == pytest.approx(max(0, receiver - sender) / 1e6, abs=4e-9)
        assert one.wait_s[b] == pytest.approx(max(0, sender - receiver) / 1e6, abs=4e-9)
        assert one.sent_bytes_per_s == pytest.approx(one.bytes / one.wire_s)
        assert one.bytes == 1000 * (1 + ["0->1", "1->2", "2->3", "3->2", "2->1", "1->0"].index(one.group))


@pytest.mark.parametrize("stages", [(0, 1), (1, 3)])
def test_buffered_messages(tmp_path, stages):
    """Gloo: a send is over at once; the receiver's waiting is what passed before the send began.

    The calls number the ranks of their group, which only its description as a pipeline's tells.
    """
    record = [{"profiling_name": "gloo:all_reduce", "process_group": ["7", "pp"]}]
    about = {"meshwise": {"groups": {"7": list(stages)}}, "meshwise_collectives": record}
    peer = {"Input Dims": [[[250]], [], [], []], "Input type": ["TensorList", "", "Scalar", "Scalar"]}
    shape = {"Input Dims": [[250]], "Input type": ["float"]}
    starts = {0: ("send", 100.0, 3.0, 1), 1: ("recv", 40.0, 85.0, 0)}
    for rank, (kind, start, length, other) in starts.items():
        call = peer | {"Concrete Inputs": ["", "", str(other), "0"]}
        name = "c10d::send" if kind == "send" else "c10d::recv_"
        events = [host("cpu_op", name, start - 2, 4, **call)]
        events.append(host("user_annotation", f"gloo:{kind}", start, length, **shape))
        path = tmp_path / f"rank-{stages[rank]}.json"
        write_trace(path, events, stages[rank], host_name="one", **about)
    (one,) = summarize_paths([tmp_path]).collectives
    group = f"{stages[0]}->{stages[1]}"
    assert (one.name, one.group, one.bytes, one.last_rank) == ("send_recv", group, 1000, stages[0])
    assert one.wait_s == {stages[0]: 0.0, stages[1]: pytest.approx(60e-6)}
    assert one.wire_s == pytest.approx(25e-6)


def test_uneven_all_to_all(tmp_path):
    """Ranks send different amounts; without sequence numbers the calls match all the same."""
    splits = [[100, 300], [250, 150], [50, 350], [200, 200]]
    events = ([], [])
    for rank, (step, split) in itertools.product(range(2), enumerate(splits)):
        about = {"Collective name": "all_to_allv", "In msg nelems": split[rank], "Out msg nelems": 200}
        about |= {"dtype": "Float", "Process Group Ranks": "[0, 1]", "Group size": 2}
        late = 7.0 * step * rank
        events[rank].append(kernel(SEND_RECV, 1000.0 * step + late, 60 - late, 20, **about))
    found = summary_of(tmp_path, events).collectives
    assert [one.name for one in found] == ["all_to_all"] * 4 and {one.num_ranks for one in found} == {2}
    for one, split in zip(found, splits, strict=True):
        assert one.bytes == 4 * max(split)
        uneven = {0: 4.0 * split[0], 1: 4.0 * split[1]} if split[0] != split[1] else None
        assert one.bytes_by_rank == uneven


def test_two_groups_of_the_same_ranks(tmp_path):
    """Each counts its own calls; the same number in both is not the same call."""
    events = ([], [])
    for rank, k, (g, name) in itertools.product(range(2), range(3), enumerate(("11", "12"))):
        about, late = {"Seq": k, "Process Group Name": name}, 5 * rank * (g + 1)
        events[rank].append(all_reduce(1000.0 * k + 300 * g + late, 50 - late, 10 * (g + 1), [0, 1], **about))
    found = summary_of(tmp_path, events).collectives
    named = [(f"0,1 ({name})", k) for k in range(3) for name in ("11", "12")]
    assert [(one.group, one.index) for one in found] == named
    assert {(one.bytes, round(one.wait_s[0] * 1e6)) for one in found} == {(20, 5), (40, 10)}


def test_calls_that_never_met_are_told(tmp_path):
    met = [all_reduce(100.0 * n, 5, 10, [0, 1], Seq=n) for n in range(9)]
    last = (all_reduce(at, 5, 10, [0, 1], Seq=9) for at in (2000.0, 5_002_000.0))
    found = summary_of(tmp_path, [[*met, one] for one in last])
    assert len(found.collectives) == 9 and "1 collectives do not overlap" in found.problems[0].reason


def test_real_ranks_without_metadata():
    """Two sampled ranks of a real job: NCCL's names only, calls missing; NTP kept the clocks within 1 ms."""
    found = summarize_paths([TRACES / "hta" / "sampled"])
    assert found.alignment.num_collectives >= 3
    assert abs(found.alignment.offsets_s[1]) < 1e-3 and found.alignment.residual_s < 1e-3


def test_real_gloo_ranks():
    """Captured on CPU: groups and sizes from the flight recorder; rank 3 slept, the others waited."""
    found = summarize_paths([GLOO4])
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


def test_gloo_reduces_all_to_scatter(tmp_path):
    """Its event is named after what goes over the wire, the call after what was asked for."""
    events = [
        host("cpu_op", "c10d::_reduce_scatter_base_", 0, 5),
        host("user_annotation", "gloo:all_reduce", 2, 40, tid=2),
        host("cpu_op", "c10d::allreduce_", 50, 5),
        host("user_annotation", "gloo:all_reduce", 52, 40, tid=2),
    ]
    found = summary_of(tmp_path, [events, events]).collectives
    assert [one.name for one in found] == ["reduce_scatter", "all_reduce"]
