"""Who holds the others up, and the cause in words: synthetic jobs whose answer is known."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from data_tables import table
from faults import draw, judge
from jobs import FAULTS, Job, write_job
from kineto import SEND_RECV, all_reduce, host, kernel, launched, message, summary_of, write_trace
from meshwise.trace.breakdown import PARTS, breakdown, intervals
from meshwise.trace.read import read_trace
from meshwise.trace.summary import summarize_paths

WRONG = table("wrong_inputs")


def _single(found):
    return [one for one in found.findings if 0 < len(one.ranks) < len(found.ranks)]


@pytest.mark.parametrize("fault", ["none", *FAULTS])
def test_the_injected_rank_is_named(tmp_path_factory, fault):
    """Random jobs of up to 16 ranks: the rank, its cause and the clocks; of healthy ones nobody."""
    for seed in range(6):
        verdict = judge(draw(fault, seed, most_ranks=16), tmp_path_factory.mktemp("job"))
        assert verdict.is_right and verdict.has_cause, verdict
        assert verdict.clock_error_s < 2e-6 or verdict.job.on_cpu, verdict


JOBS = [Job(n, 12, of, 1, names_calls=False, has_host=True) for n in (2, 8) for of in ("none", *FAULTS[:5:2])]
JOBS += [Job(2, 6, of, 1, 0.32, has_marks=True, overlaps=True) for of in ("none", "slow device")]


@pytest.mark.parametrize("job", [*JOBS, Job(2, 1500, "none"), Job(2, 1500, "late rank", 1)])
def test_calls_without_a_name_and_traces_of_many_or_few_steps(tmp_path, job):
    """Groups follow from which calls overlap; many steps: more than binomials of floats hold."""
    verdict = judge(job, tmp_path)
    assert verdict.is_right and verdict.has_cause, verdict


@pytest.mark.parametrize("fault", ["slow link", "late rank"])
def test_a_rank_without_a_trace_is_not_taken_for_a_slow_link(tmp_path, fault):
    """Rank 2 is late, or its link to rank 3 slow; the trace of rank 2 is missing."""
    write_job(tmp_path, Job(8, 12, fault, rank=2, size=0.5, has_numbers=True, has_host=True, missing=(2,)))
    first = _single(found := summarize_paths([tmp_path]))[0]
    assert "on the wire or waiting for rank 2, of which there is no trace" in found.findings[-1].text
    assert first.ranks == (3,) and first.kind == "slow link or missing rank"
    assert "lateness of rank 2 (without a trace) or a slow link" in first.text


@pytest.mark.parametrize(("seed", "on_cpu"), [(0, False), (1, False), (3, False), (0, True), (1, True)])
def test_nobody_is_blamed_for_the_pause_of_a_rank_without_a_trace(tmp_path, seed, on_cpu):
    write_job(tmp_path, Job(8, 10, "pause", 3, 0.3, seed, has_host=on_cpu, on_cpu=on_cpu, missing=(3,)))
    found = summarize_paths([tmp_path])
    assert not [one for one in found.findings if 0 < len(one.ranks) < 7]
    assert not on_cpu or max(row.awaited_s for row in found.stragglers) < 0.02
    alone = summarize_paths([tmp_path / "rank-0.json"]).findings
    assert on_cpu or alone[-1].text.endswith("waiting for ranks 1-7, of which there is no trace")


@pytest.mark.parametrize(("core_wait_s", "is_named"), [(0.0, True), (0.02, True), (0.5, False)])
def test_want_of_a_core_is_no_slow_rank(tmp_path, core_wait_s, is_named):
    """Rank 1 is late by 4 to 5 ms a step for 11 steps, and its threads had no core for so long."""
    write_job(tmp_path, Job(4, 12, "late rank", rank=1, size=0.3, on_cpu=True, has_host=True))
    for path in tmp_path.iterdir():
        about = {"meshwise": {"core_wait_s": 0.1 + core_wait_s * ("rank-1" in path.name), "num_cores": 2}}
        path.write_text(json.dumps(json.loads(path.read_text()) | about))
    found = summarize_paths([tmp_path])
    shared = [one.text for one in found.findings if one.kind == "shared cores"]
    assert [one.ranks for one in _single(found)] == [(1,)] * is_named and len(shared) == 1 - is_named
    assert all("4 ranks and whatever else runs share 2 cores" in text for text in shared)


def _until(events, now, rank, name, end, stream=7, **about):
    events[rank].append(kernel(name, now[rank], end - now[rank], stream, **about))
    now[rank] = end


def _all_reduce(events, ranks, starts, wire):
    for rank, start in zip(ranks, starts, strict=True):
        events[rank].append(all_reduce(start, max(starts) + wire - start, 10 * wire, [*ranks]))
    return max(starts) + wire


def _pipeline(folder, slower, *, num_stages=4, num_microbatches=8, num_steps=10):
    """Stages that compute and pass on what they receive, stage 2 `slower` times as long; then all reduce."""
    random, ranks = np.random.default_rng(0), range(num_stages)
    now, events = np.zeros(num_stages), [[] for _ in ranks]

    def pass_on(rank, peer):
        end = max(now[rank], now[peer]) + 10
        for kind, one, other in (("send", rank, peer), ("recv", peer, rank)):
            events[one].append(message(kind, now[one], end - now[one], 512, other))
            now[one] = end

    for _ in range(num_steps):
        for order, name, usual in ((ranks, "gemm", 100.0), (ranks[::-1], "dgrad", 200.0)):
            for _ in range(num_microbatches):
                for place, rank in enumerate(order):
                    length = usual * random.normal(1, 0.02) * (slower if rank == 2 else 1)
                    _until(events, now, rank, name, now[rank] + length)
                    if place + 1 < num_stages:
                        pass_on(rank, order[place + 1])
        now[:] = _all_reduce(events, ranks, now, 20)
    return summary_of(folder, events, host_name="node")


@pytest.mark.parametrize("slower", [1.0, 1.4])
def test_a_slow_stage_is_named_and_the_first_is_not_because_it_ends_last(tmp_path, slower):
    found = _pipeline(tmp_path, slower)
    assert [(one.ranks, one.kind) for one in _single(found)] == [((2,), "slow device")] * (slower > 1)
    first, *_, last = [one.text for one in found.findings * 2]
    assert ("up to" in first) == (slower > 1) and "the bubble" in last


@pytest.mark.parametrize("cut", [(0, 0), (1, 0), (0, 1), (2, 1)])
def test_one_host_is_one_clock(tmp_path, cut):
    """Waits as long as a step do not shift the calls of a rank, even if its profile lacks some."""
    random = np.random.default_rng(sum(cut))
    ends = 1000.0 * np.arange(12) + 900 + random.uniform(0, 80, 12)
    left = [(length, np.round(ends + random.uniform(0, 30, 12), 3).tolist()) for length in (700.0, 40.0)]
    first, second = ([all_reduce(end - length, length, 10, [0, 1]) for end in of] for length, of in left)
    found = summary_of(tmp_path, [first, second[cut[0] : 12 - cut[1]]], host_name="node")
    assert found.alignment.method == "one host, one clock" and set(found.alignment.offsets_ns.values()) == {0}
    met = [one for one in found.collectives if one.num_ranks == 2]
    assert len(met) == 12 - sum(cut) and _single(found)[0].ranks == (1,)


@pytest.mark.parametrize("slow", [{}, {5: (100, 0, 91)}, {2: (120, 0, 1), 13: (100, 90, 1)}])
def test_late_ranks_cost_what_the_job_would_gain(tmp_path, slow):
    """Pairs reduce after each layer, buckets beside the next one: partners of slow ranks are not blamed."""
    now, sent, events = np.zeros(16), np.zeros(16), [[] for _ in range(16)]
    for step, layer in itertools.product(range(10), range(6)):
        for rank in range(16):
            paused = 100, 300 * (rank == step + 1), 1
            length, idle, copy = slow.get(rank, (100, 0, 1)) if slow and step != 5 else paused
            if layer == 0:
                events[rank].append(host("user_annotation", f"ProfilerStep#{step}", now[rank], 1))
                now[rank] += idle
                _until(events, now, rank, "Memcpy HtoD", now[rank] + copy, bytes=900)
            _until(events, now, rank, "gemm", now[rank] + length)
        for low in range(0, 16, 2):
            now[low : low + 2] = _all_reduce(events, [low, low + 1], now[low : low + 2], 5)
        for low in range(2):
            sent[low::2] = _all_reduce(events, [*range(low, 16, 2)], np.maximum(now, sent)[low::2], 40)
        now[:] = sent.max() if layer == 5 else now
    found = summary_of(tmp_path, events, host_name="node")
    if not slow:
        assert not _single(found) and "(now for one, now for another" in found.findings[-1].text
        return
    first, lost_us = _single(found)[0], now[0] - 10 * 671 - 300
    assert first.ranks == (*slow,) and "late in 8 of 9 steps (1-4,6-9)" in first.text
    assert ("rank 13 host side: in all idle" if 13 in slow else "copies take 82 times") in first.text
    assert first.seconds == pytest.approx(lost_us / 1e6, rel=0.02)
    waited = [one.seconds["wait"] for one in found.partitions]
    assert [one.waited_s for one in found.stragglers] == pytest.approx(waited)


@pytest.mark.parametrize(
    ("late", "in_steps", "more", "idle", "slower", "text"),
    [
        ((4, 5, 6, 7), (1, 3, 5, 7), 0, 40, 1.0, "late in 4 of 8 steps (13,15,17,19): 40 µs of each"),
        ((5,), (0, 1, 2), 2, 0, 1.2, "late in 3 of 3 steps: 40 µs of each 447 µs step, device side: matmuls"),
    ],
)
def test_some_steps_and_three_whole_ones_tell(tmp_path, late, in_steps, more, idle, slower, text):
    """A host late every second step; a clock that slows matmuls alone, half the ranks with `more` steps."""
    now, events, marked = np.zeros(16), [[] for _ in range(16)], 400 + 22 * more
    for step in range(max(in_steps) + 1 + more):
        for rank in (ranks := [*range(16 if step <= max(in_steps) else 8)]):
            events[rank].append(host("user_annotation", f"ProfilerStep#{12 + step}", now[rank], marked))
            is_late = rank in late and (step in in_steps or step > max(in_steps))
            now[rank] += idle * is_late + rank % 3
            for name, length in (("gemm_a", 100), ("norm", 200), ("gemm_b", 100)):
                times = slower if is_late and name != "norm" else 1.0
                _until(events, now, rank, name, now[rank] + length * times)
        now[ranks] = _all_reduce(events, ranks, now[ranks], 5)
    first = _single(found := summary_of(tmp_path, events, host_name="node"))[0]
    assert first.ranks == late and text in first.text and bool(more) == bool(found.problems)
    assert first.seconds == pytest.approx(40e-6 * len(in_steps), rel=0.1)


@pytest.mark.parametrize(("fault", "kind", "text"), WRONG["causes"])
def test_the_cause_on_cpus(tmp_path, fault, kind, text):
    """Rank 1 of two is late by 3 to 4 ms of each 10 ms step, and its trace says why, as far as it can."""
    events = ([], [])
    for rank, step in itertools.product(range(2), range(8)):
        times = 2.5 if rank and fault in ("uneven", "unrecorded") else 1.0
        work = [("aten::mm", 2000 * times), ("aten::relu", 500 * times), ("aten::mm", 3000.0)]
        fetched = 100 + 3000 * rank * (fault == "loader" or (fault, step) == ("pause", 4))
        loads = "enumerate(DataLoader)#_SingleProcess.__next__"
        events[rank].append(host("user_annotation", loads, 10_000.0 * step, fetched))
        now = 10_000.0 * step + fetched
        for name, length in work[: 3 if rank and fault == "more" else 2]:
            sizes = {"Input Dims": [[int(32 * times), 8], [8, 8]], "Input type": ["float"] * 2}
            events[rank].append(host("cpu_op", name, now, length, **({} if fault == "unrecorded" else sizes)))
            now += length
        events[rank].append(host("user_annotation", "gloo:all_reduce", now, 10_000.0 * step + 9000 - now, 2))
    first = summary_of(tmp_path, events, host_name="node").findings[0]
    assert first.ranks == (1,) and first.kind == kind and text in first.text, first.text
    assert ("or its inputs are larger" in first.text) == (fault == "unrecorded")


def test_steps_are_no_shorter_than_those_of_the_optimizer(tmp_path):
    """FSDP gathers twice a step and longest in all; a step is still what ends with an update."""
    names = [("FSDP::all_gather (2)", 300), ("FSDP::all_gather (2)", 300), ("Optimizer.step#SGD.step", 50)]
    starts = [(of, 1000.0 * n + 310 * k, dur) for n in range(4) for k, (of, dur) in enumerate(names)]
    events = [[host("user_annotation", *of), host("cpu_op", "aten::mm", of[1] + 5, 10)] for of in starts]
    assert len(summary_of(tmp_path, [list(itertools.chain(*events))]).steps) == 4


def test_the_last_step_of_a_short_section_is_as_long_as_its_work(tmp_path):
    """A loader that takes 20 of 1,000 us, and then a kernel."""
    loads = [host("user_annotation", "enumerate(DataLoader)", 1000 * n, 20) for n in range(4)]
    runs = [one for n in range(4) for one in launched("gemm", 1000 * n + 30, 1000 * n + 40, 900, n + 1)]
    steps = summary_of(tmp_path, [loads + runs]).steps
    assert [one.breakdown.compute_s for one in steps] == pytest.approx([900e-6] * 4)
    assert steps[-1].part == "whole"


def test_steps_of_a_compiled_program_are_whole(tmp_path):
    """The section of its backward, longest in all, begins inside an operator; compiling is no compute."""
    names = [("cpu_op", "CompiledFunctionBackward", 0, 800), ("cpu_op", "aten::add_", 860, 30)]
    names += [("user_annotation", "## Call CompiledFxGraph f6x ##", 10, 780)]
    names += [("user_annotation", "Optimizer.step#SGD.step", 850, 50)]
    events = [host(*of, 1000 * n + start, dur) for n in range(4) for *of, start, dur in names]
    compiler = [("async_compile.wait (dynamo_timed)", 20, 500), ("aten::mm", 30, 400)]
    found = summary_of(tmp_path, [[*events, *(host("cpu_op", *of) for of in compiler)]])
    assert found.ranks[0].compute_s == pytest.approx(1e-6 * (4 * 830 - 500))
    assert [one.breakdown.compute_s for one in found.steps[:3]] == pytest.approx([830e-6] * 3)
    assert [(one.kind, one.seconds) for one in found.findings] == [("compiling", pytest.approx(500e-6))]


@settings(max_examples=20)
@given(st.integers(3, 7), st.integers(0, 3), st.integers(0, 3))
def test_steps_sum_to_what_they_hold(tmp_path_factory, num_steps, first, more):
    """A choice of steps has the kernels of these steps; `complete` all but those launched in the last one."""
    folder = tmp_path_factory.mktemp("job")
    write_job(folder, Job(2, num_steps, has_marks=True, has_host=True))
    every = summarize_paths([folder])
    numbers = sorted({step.number for step in every.steps})
    assert numbers == list(range(2, 2 + num_steps)) and len(every.steps) == 2 * num_steps
    chosen = numbers[min(first, num_steps - 1) : min(first, num_steps - 1) + 1 + more]
    some = summarize_paths([folder], steps=f"{chosen[0]}-{chosen[-1]}")
    whole = summarize_paths([folder], steps="complete")
    assert {step.number for step in some.steps} == set(chosen)
    assert {step.number for step in whole.steps} == set(numbers[:-1])
    for found, count in ((every, num_steps), (some, len(chosen)), (whole, num_steps - 1)):
        assert {kernel.name: kernel.count for kernel in found.kernels}["flash"] == 2 * count
        assert len(found.collectives) == count
    whole, *steps = every.ranks[0], *(one.breakdown for one in every.steps if one.breakdown.rank == 0)
    sums = np.sum([(one.compute_s, one.span_s) for one in steps], axis=0)  # times are rounded to ns
    marked_s = whole.span_s + 5e-6  # the first mark is 5 us before the first kernel
    assert sums == pytest.approx([whole.compute_s, marked_s], abs=1e-7)


def test_work_that_runs_ahead_does_not_lengthen_its_step(tmp_path):
    """The host is half a step ahead; the copy for each step runs under the compute of the one before."""
    events = [host("user_annotation", f"ProfilerStep#{n}", 1000 * n, 990) for n in range(5)]
    for n, (k, name, length) in itertools.product(range(5), ((0, "Memcpy", 300), (1, "gemm", 1000))):
        events += launched(name, 1000 * n + 10 + k, 1000 * n + 100 + 400 * k, length, 2 * n + k)
    path = write_trace(tmp_path / "rank-0.json", events, 0)
    steps = [one.breakdown for one in summarize_paths([path]).steps]
    assert [(one.span_s, one.idle_s) for one in steps[1:]] == [(pytest.approx(1e-3), 0.0)] * 4
    assert sum(one.compute_s for one in steps) == pytest.approx(5e-3)
    chosen = summarize_paths([path], steps="2-3").ranks[0]
    assert (chosen.span_s, chosen.idle_s) == (pytest.approx(2e-3), 0.0)


def test_complete_as_holistic_trace_analysis(tmp_path):
    """Its last step begins where the device's copy of the mark does; a kernel needs its launching call."""
    events = [host("user_annotation", f"ProfilerStep#{n}", 100 * n, 90) for n in (1, 2)]
    events += [kernel("gemm", 500, 5, correlation=9, **{"External id": 1})]
    for number, launch in enumerate((110, 210, 260), start=1):
        events += launched("gemm", launch, launch + 200, 10, number)
    path = write_trace(tmp_path / "rank-0.json", events, 0)
    assert summarize_paths([path], steps="complete").kernels[0].count == 1
    write_trace(path, [*events, kernel("ProfilerStep#2", 250, 80) | {"cat": "gpu_user_annotation"}], 0)
    assert summarize_paths([path], steps="complete").kernels[0].count == 2


def test_what_is_not_there_or_makes_no_sense_is_refused(meshwise, tmp_path):
    write_job(tmp_path, Job(2, 3, has_marks=True))
    for verb, *asked, words in WRONG["traces"]:
        done = meshwise("trace", verb, str(tmp_path), *asked)
        assert done.code == 2 and words in done.err and "FAILED" not in done.err
    assert len(meshwise("trace", "summary", str(tmp_path), "--steps", "3", "--json").document["steps"]) == 2


# --- the parts of each rank's time, and the picture -------------------------------------------------


def test_parts_of_a_rank(tmp_path):
    """Compute 0-40, a call 30-100 that waits until 60, a copy 90-120, a kernel 150-160 launched late."""
    copy = kernel("Memcpy HtoD (Pinned -> Device)", 90, 30, 9, bytes=3000)
    events = [kernel("gemm", 0, 40, correlation=1), all_reduce(30, 70, 10, [0, 1]), copy]
    events += launched("gemm", 130, 150, 10, 2)
    trace, _ = read_trace(write_trace(tmp_path / "a.json", events, 0))
    found = intervals(trace, {1: 30_000}).partition
    in_us = {part: round(seconds * 1e6) for part, seconds in found.seconds.items()}
    assert in_us == {"compute": 50, "transfer": 40, "memory": 20, "wait": 20, "idle": 30}
    assert found.host_bound_s == pytest.approx(30e-6)


NAMES = st.sampled_from(["gemm", "ncclX", "Memcpy"])
KERNELS = st.tuples(NAMES, st.integers(0, 300), st.integers(1, 80), st.floats(0, 1))


@given(st.lists(KERNELS, min_size=1, max_size=15))
def test_parts_sum_to_the_span(tmp_path_factory, kernels):
    """Whatever overlaps, no moment is counted twice or left out; compute and idle are the breakdown's."""
    events = [kernel(name, start, dur, stream) for stream, (name, start, dur, _) in enumerate(kernels)]
    trace, _ = read_trace(write_trace(tmp_path_factory.mktemp("t") / "a.json", events, 0))
    waits = {i: int(trace.duration_ns[i] * kernels[int(trace.stream[i])][3]) for i in range(len(trace))}
    found, usual = intervals(trace, waits).partition, breakdown(trace)
    assert sum(found.seconds.values()) == pytest.approx(usual.span_s, abs=1e-12)
    assert found.seconds["compute"] == pytest.approx(usual.compute_s, abs=1e-12)
    assert found.seconds["idle"] == pytest.approx(usual.idle_s, abs=1e-12)
    exposed = found.seconds["transfer"] + found.seconds["wait"]
    assert exposed <= usual.exposed_communication_s + 1e-12
    assert tuple(found.seconds) == PARTS
    assert found.host_bound_s == 0 or found.seconds["idle"]  # never idle: not bound by the host


def test_messages_without_ends_tell_nothing(tmp_path):
    """A pipeline of three stages, the second slow, whose kernels name neither sender nor receiver."""
    events, now = [[] for _ in range(3)], [0.0] * 3
    for rank in [0, 1, 2] * 24:
        if rank:
            _until(events, now, rank, SEND_RECV, max(now[rank - 1], now[rank]) + 20, 24)
        _until(events, now, rank, "gemm", now[rank] + (450.0 if rank == 1 else 300.0))
        if rank < 2:
            _until(events, now, rank, SEND_RECV, now[rank] + 20, 24)
    first = summary_of(tmp_path, events, host_name="node").findings[0]
    assert first.kind == "undecided" and not first.ranks and "cannot be told" in first.text


@pytest.mark.parametrize("num_marks", [0, 1, 2])
def test_layers_of_few_marked_steps_are_no_steps(tmp_path, num_marks):
    """Rank 1 is late by 50 us in each of 24 layers: of one or two marked steps it is no proof."""
    events = [[host("user_annotation", f"ProfilerStep#{n}", 2400 * n, 2390) for n in range(num_marks)]] * 2
    for rank, at in itertools.product(range(2), range(0, 4800, 200)):
        late = 100 + 50 * rank
        call = all_reduce(at + late, 190 - late, 5000, [0, 1])
        events[rank] = [*events[rank], kernel("gemm", at, late), call]
    first = summary_of(tmp_path, events, host_name="node").findings[0]
    if num_marks:
        assert first.kind == "undecided" and "longest for rank 1 (last in 24" in first.text
        assert "fewer than 4 steps" in first.text and "record more steps" in first.text
    else:
        assert "rank 1 is late in 23 of 23 rounds of coll" in first.text


def test_calls_around_a_launch_name_what_the_kernel_does(tmp_path):
    """NCCL's kernel says SendRecv, its call all-to-all; of two calls it is told who came last."""
    events = [[] for _ in range(4)]
    for rank, (number, start) in itertools.product(range(4), enumerate((0, 1000), start=1)):
        arrived, end = start + (900 if rank == 2 else 100 + rank), start + 950
        shapes = {"Input Dims": [[250 + rank]], "Input type": ["float"]}
        events[rank] += [
            host("cpu_op", "c10d::alltoall_base_", arrived - 10, 9),
            host("user_annotation", "nccl:all_to_all", arrived - 9, 7, **shapes),
            *launched("ncclKernel_SendRecv_RING", arrived - 8, arrived, end - arrived, number),
        ]
    found = summary_of(tmp_path, events, host_name="node")
    calls = [(one.name, one.num_ranks, one.bytes) for one in found.collectives]
    assert calls == [("all_to_all", 4, 1012)] * 2
    assert "longest for rank 2 (last in 2" in found.findings[0].text
