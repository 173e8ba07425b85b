"""What an estimate looks like: the parts in the picture add up, no op is above a roof, names stand apart;
the timeline lasts as long as the step."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshwise as mw
from data_tables import GLOO4, table
from meshwise.estimate.one_plan import Estimate
from meshwise.report.answer import Bars, Bound, Chart, ChartAxis, Lanes, Names, Picture, Series
from meshwise.report.chart_picture import picture_figure
from meshwise.report.estimate import layer_ops
from meshwise.report.html import plotly_figure
from meshwise.report.pages import page_of, picture_of
from meshwise.report.timelines import timeline_events
from meshwise.trace.summary import summarize_paths

pytest.importorskip("matplotlib")

REAL = table("pages")["estimates"]


@pytest.fixture(params=REAL, scope="module")
def estimate(request: pytest.FixtureRequest) -> Estimate:
    *job, batch, seq = REAL[request.param]
    return mw.estimate(*job, batch=batch, seq=seq)


def chart(found: Any, title: str) -> Chart:
    """The chart of a result whose title begins so."""
    [one] = [one for one in page_of(found).sections if isinstance(one, Chart) and one.title.startswith(title)]
    return one


@pytest.mark.parametrize("what", ["Time of a step", "Memory of the fullest rank"])
def test_bars_start_where_the_last_one_ended_and_reach_the_total(estimate: Estimate, what: str) -> None:
    shown = chart(estimate, what)
    bars, *bounds = shown.marks
    assert isinstance(bars, Bars) and bars.starts is not None
    total = estimate.step_s if what.startswith("Time") else estimate.memory_bytes["total"]
    ends = np.cumsum(bars.values[:-1])
    assert bars.starts == pytest.approx([0.0, *ends[:-1], 0.0], abs=1e-9 * total)
    assert (ends[-1], bars.values[-1]) == pytest.approx((total, total))
    capacity, ends_of_step = estimate.cluster.chip.memory_bytes, [*estimate.step_s_interval]
    assert [bound.value for bound in bounds] == (ends_of_step if what.startswith("Time") else [capacity])
    assert shown.x.high > (total if what.startswith("Time") else max(total, capacity))


def test_no_op_is_above_a_roof(estimate: Estimate) -> None:
    marks = [one for one in chart(estimate, "Roofline").marks if isinstance(one, Series) and not one.line]
    x, y = (np.concatenate([getattr(one, axis) for one in marks]) for axis in "xy")
    assert len(x) == len(layer_ops(estimate))
    chip = estimate.cluster.chip
    roof = np.minimum(x * chip.memory_bytes_per_s, chip.matrix_peak(estimate.plan.dtype))
    assert (y <= roof * (1 + 1e-12)).all()


BARS = [Bars(["a", "b"], [1.0, 2.0], ["#111111"] * 2), Bars(["a", "b"], [2.0, 1.0], ["#222222"] * 2)]
LANES = Lanes(np.array([[0, -1, 1]]), np.arange(3.0), ["rank 0"], {"busy": "#111111", "idle": "#eeeeee"})
NAMED = Names([1.0], [1.0], ["x"], ["#111111"])
CHARTS = {
    "bars": BARS,
    "series": [Series([1, 2], [3, 4], "one", steps=True), Series([1.0], [2.0], "two", line="", size=9)],
    "lanes": [LANES],
    "bounds": [Series([1.0, 9.0], [1.0, 9.0]), Bound(2.0), Bound(3.0, "y"), NAMED],
}


@pytest.mark.parametrize("verb", ["estimate", "search", "serve", "rl", "frontier", "traces"])
def test_a_chart_has_a_title_units_and_a_key(verb: str) -> None:
    """Of every page and picture: the axes say what they are of, and each colour has a name."""
    gpus = "h100-80g-sxm:8"
    found: Any = {
        "estimate": lambda: mw.estimate("llama3-8b", gpus, "pp=4", batch=32),
        "search": lambda: mw.search("llama3-8b", gpus, "zero=1", batch=8, seq=2048),
        "serve": lambda: mw.serve("llama3-8b", gpus, pareto=True, rate=4, num_requests=50),
        "rl": lambda: mw.rl("llama3-8b", gpus, prompts=8, samples=4, output=64, mode="colocated"),
        "frontier": lambda: mw.frontier("h100-80g-sxm"),
        "traces": lambda: summarize_paths([GLOO4]),
    }[verb]()
    charts = [one for one in page_of(found).sections if isinstance(one, Chart)]
    charts += [one for row in picture_of(found).rows for one in row] if verb != "rl" else []
    assert charts
    for one in charts:
        assert one.title and one.x.title, one.title
        assert one.y.title or any(isinstance(mark, Bars | Lanes) for mark in one.marks), one.title
        series = {mark.color: mark.name for mark in one.marks if isinstance(mark, Series) and not mark.texts}
        assert len(series) < 2 or all(series.values()), one.title


@pytest.mark.parametrize("kind", CHARTS)
def test_page_and_picture_show_the_same_marks(kind: str) -> None:
    shown = Chart("title", CHARTS[kind], ChartAxis("x", "s"), ChartAxis("y"))
    figure = plotly_figure(shown)
    (axes,) = picture_figure(Picture([[shown]])).axes[:1]
    named = {trace["name"] for trace in figure["data"] if trace.get("name") and trace.get("showlegend", True)}
    assert named == set(axes.get_legend_handles_labels()[1])
    for trace in figure["data"]:
        if trace["type"] == "bar":
            widths = [bar.get_width() for container in axes.containers for bar in container]
            assert set(trace["x"]) <= set(widths)
        elif trace["type"] == "scatter" and trace.get("line"):
            assert any(list(line.get_xdata()) == list(trace["x"]) for line in axes.get_lines())
    assert all("x: %{x}<br>y: %{y}" in one["hovertemplate"] for one in figure["data"] if "customdata" in one)
    assert len(figure["layout"]["shapes"]) == sum(isinstance(mark, Bound) for mark in shown.marks)


@pytest.mark.parametrize(("suffix", "starts"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("PDF", b"%PDF")])
def test_the_ending_names_the_format(meshwise, tmp_path: Path, suffix: str, starts: bytes) -> None:
    path = tmp_path / f"step.{suffix}"
    done = meshwise("estimate", "llama3-8b", "--cluster", "h100-80g-sxm:8", "--plot", str(path), "--json")
    assert (done.code, done.err) == (0, "")
    assert path.read_bytes().startswith(starts)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def gpt3(plan: str) -> Estimate:
    return mw.estimate("gpt3-175b", "a100-80g-sxm:64", plan, batch=512, seq=2048)


@pytest.mark.parametrize("plan", table("pages")["pipelines"]["plans"])
def test_the_timeline_is_the_step(plan: str) -> None:
    step = gpt3(plan)
    events = timeline_events(step)
    work = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in work} == set(range(step.plan.pp))
    for once, seconds in (("optimizer", step.step.optimizer_s), ("comm_dp", step.step.comm_dp_s)):
        each = [event["dur"] / 1e6 for event in work if event["cat"] == once]
        assert each == pytest.approx([float(seconds)] * step.plan.pp, abs=1e-9)
    labels = [event["args"]["labels"] for event in events if event["name"] == "process_labels"]
    held = [int(part.split()[0]) for label in labels for part in label.split(" + ") if "layers" in part]
    assert sum(held) == (2 if "dualpipe," in f"{plan}," else 1) * step.model.num_layers
    forwards = [event for event in work if event["cat"] == "forward"]
    assert len(forwards) == int(step.mesh.num_microbatches) * step.plan.pp * step.plan.vpp
    # The closed form of the bubble takes the stages at their mean, which the ends of the model are not.
    end_s = max(event["ts"] + event["dur"] for event in work) / 1e6
    assert end_s == pytest.approx(step.step_s, rel=1e-6 if step.plan.pp == 1 else 0.03)
