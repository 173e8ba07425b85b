"""The simulated pipeline: equal to the closed forms where those hold, and right where they do not.

Times are whole numbers, so sums are exact and equal means equal.
"""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from data_tables import DOCS, table
from docs_scripts import docs_script
from meshwise.core.errors import PlanError
from meshwise.cost import schedule as closed_form
from meshwise.cost.simulate import KINDS, Timeline, _play, simulate

CHUNKED = ("interleaved", "zb-v", "dualpipe-v")
ticks = st.integers(10, 40)


@st.composite
def pipelines(draw: st.DrawFn, full: bool = False) -> tuple[str, int, int, int]:
    """A schedule that can run: name, pp, m, v; `full`: with microbatches to fill the pipe twice."""
    name = draw(st.sampled_from(closed_form.SCHEDULES))
    v = draw(st.integers(2, 4)) if name == "interleaved" else 2 if name in CHUNKED else 1
    pp = draw(st.integers(2, 9))
    m = draw(st.integers(2 * pp if full else 1, 40))
    if name == "interleaved":
        m = pp * draw(st.integers(2 if full else 1, 4))
    if name == "dualpipe":
        pp, m = 2 * pp, 2 * m
    assume(closed_form.valid(closed_form.SCHEDULES.index(name), pp, m, v))
    return name, pp, m, v


def chunks(name: str, v: int) -> int:
    return v if name in CHUNKED else 1


def played(
    plan: tuple[str, int, int, int], f: int, b: int, w: int, hop: int = 0, **options: object
) -> Timeline:
    """Chunk times f, b, w, so that a whole stage takes a whole number too."""
    name, pp, m, v = plan
    return simulate(name, f, b, w, pp=pp, m=m, v=v, p2p_s=hop, **options)  # type: ignore[arg-type]


def closed_s(plan: tuple[str, int, int, int], f: int, b: int, w: int, hop: int = 0) -> float:
    name, pp, m, v = plan
    k = chunks(name, v)
    work = m * k * (f + b + w)
    index = closed_form.SCHEDULES.index(name)
    return work + float(closed_form.bubble_s(index, pp, m, v, k * f, k * b, k * w, float(hop)))


@given(plan=pipelines(), f=ticks, b=ticks, w=ticks)
def test_time_of_equal_stages_is_the_closed_form(
    plan: tuple[str, int, int, int], f: int, b: int, w: int
) -> None:
    assume(plan[0] != "zb-h1" or plan[2] >= plan[1])
    timeline = played(plan, f, b, w)
    assert timeline.makespan_s == closed_s(plan, f, b, w)
    assert timeline.busy_s.tolist() == [plan[2] * chunks(plan[0], plan[3]) * (f + b + w)] * plan[1]


@given(plan=pipelines(full=True), f=ticks, b=ticks, w=ticks, hop=st.integers(1, 2))
def test_time_with_hops_is_the_closed_form(
    plan: tuple[str, int, int, int], f: int, b: int, w: int, hop: int
) -> None:
    assert played(plan, f, b, w, hop).makespan_s == closed_s(plan, f, b, w, hop)


@given(plan=pipelines())
def test_in_flight_peaks_are_the_closed_form(plan: tuple[str, int, int, int]) -> None:
    name, pp, m, v = plan
    peaks = closed_form.in_flight_microbatches(closed_form.SCHEDULES.index(name), pp, m, v, np.arange(pp))
    np.testing.assert_allclose(played(plan, 1, 1, 1).peak_in_flight, peaks, rtol=1e-15)


@given(pp=st.integers(2, 9), extra=st.integers(-1, 20), f=ticks)
def test_zb_v_leaves_no_rank_idle_between_its_own_ends(pp: int, extra: int, f: int) -> None:
    """arXiv 2401.10241 sec. 6: zero bubble for F = B = W."""
    timeline = played(("zb-v", pp, 2 * pp + extra, 2), f, f, f)
    own = [timeline.rank == rank for rank in range(pp)]
    spans_s = [timeline.end_s[rows].max() - timeline.start_s[rows].min() for rows in own]
    assert spans_s == timeline.busy_s.tolist()


slow_factors = st.lists(st.integers(1, 3), min_size=18, max_size=18)


@given(plan=pipelines(), slow=slow_factors, hop=st.integers(0, 30))
def test_every_action_waits_for_its_data_and_for_its_rank(
    plan: tuple[str, int, int, int], slow: list[int], hop: int
) -> None:
    """The two rules of a pipeline, checked from the outside on every action of the timeline."""
    name, pp, m, v = plan
    timeline = played(plan, 12, 15, 9, hop, slowdown=slow[:pp])
    rows = list(
        zip(
            *(column.tolist() for column in (timeline.rank, timeline.kind, timeline.stage, timeline.chunk)),
            *(column.tolist() for column in (timeline.microbatch, timeline.start_s, timeline.end_s)),
            strict=True,
        )
    )
    way = 2 if name == "dualpipe" else 1  # two directions are two pipelines
    last = pp * chunks(name, v) - 1
    done: dict[tuple[str, int, int, int], tuple[float, int]] = {}
    for rank, kind, stage, chunk, microbatch, _, end in rows:
        label = {"F": "F", "B": "B", "I": "B", "W": "W"}[KINDS[kind]]
        key = (label, chunk % way, stage, microbatch)
        assert key not in done
        done[key] = (end, rank)
    for rank, kind, stage, chunk, microbatch, start, _ in rows:
        wants = {
            "F": ("F", chunk % way, stage - 1, microbatch) if stage else None,
            "B": ("B", chunk % way, stage + 1, microbatch)
            if stage < last
            else ("F", chunk % way, stage, microbatch),
            "W": ("B", chunk % way, stage, microbatch),
        }["B" if KINDS[kind] == "I" else KINDS[kind]]
        if wants:
            ready, source = done[wants]
            assert start >= ready + (hop if source != rank else 0)
    for (rank, *_, end), (next_rank, *_, next_start, next_end) in pairwise(rows):
        if rank == next_rank:
            assert next_start >= end or next_end == end  # a pair shares its time
    num_forwards = sum(KINDS[row[1]] == "F" for row in rows)
    assert num_forwards == len([key for key in done if key[0] == "B"]) == pp * m * chunks(name, v)


@given(plan=pipelines(), rank=st.integers(0, 17), hop=st.integers(0, 5))
def test_a_straggler_never_helps(plan: tuple[str, int, int, int], rank: int, hop: int) -> None:
    slowdown = np.ones(plan[1])
    slowdown[rank % plan[1]] = 1.5
    even = played(plan, 12, 14, 10, hop).makespan_s
    slow = played(plan, 12, 14, 10, hop, slowdown=slowdown)
    assert even < slow.makespan_s <= 1.5 * even
    assert slow.makespan_s >= slow.busy_s.max() == 1.5 * slow.busy_s.min()


def test_orders_that_wait_for_each_other_are_an_error() -> None:
    """Rank 0 wants row 3 before it makes row 1, rank 1 wants row 1 before it makes row 3."""
    stops, source = np.array([2, 4]), np.array([3, -1, 1, -1])
    with pytest.raises(PlanError, match="ranks 0, 1 wait"):
        _play(stops, source, np.zeros(4), np.ones(4))


@pytest.mark.parametrize(("wrong", "says"), table("tables")["simulate"]["bad"])
def test_bad_times_are_refused(wrong: dict[str, object], says: str) -> None:
    arguments = {"f_s": 1.0, "b_s": 1.0, "w_s": 1.0, "pp": 4, "m": 8} | wrong
    with pytest.raises(PlanError, match=says):
        simulate("1f1b", **arguments)  # type: ignore[arg-type]


def test_page_shows_the_tables_that_the_figures_script_prints() -> None:
    page = (DOCS / "pipeline.md").read_text(encoding="utf-8")
    figures = docs_script("figures/pipeline")
    assert figures.table(8, 32) in page
    assert figures.hops_table(8, (16, 64, 256)) in page
