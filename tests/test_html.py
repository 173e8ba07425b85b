"""Pages as self-contained files: everything inside, what users write escaped, whole or not at all."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

import meshwise as mw
from data_tables import GLOO4, table
from kineto import kernel, write_trace
from meshwise.report.answer import Bars, Chart, Lanes, Page, PageLink, Series, Text
from meshwise.report.estimate import compare_page
from meshwise.report.html import html_body
from meshwise.report.pages import page_of
from meshwise.report.table import Table

pytest.importorskip("plotly")

JOB = ("llama3-8b", "--cluster", "h100-80g-sxm:16", "--plan", "tp=4,pp=2", "--batch", "32")


def figures(html: str) -> list[dict[str, Any]]:
    """The plotly figures inside a page."""
    found = re.findall(r'<script type="application/json">(.*?)</script>', html, re.DOTALL)
    return [json.loads(text) for text in found]


@given(st.text(min_size=1))
def test_what_a_user_writes_is_never_markup(text: str) -> None:
    hostile = f"<img src=x onerror=alert(1)>{text}</script>\"'"
    table = Table(hostile, [hostile, "b"], [[hostile, PageLink(hostile, f"javascript:{hostile}")]])
    chart = Chart(hostile, [Series([1.0], [1.0], hostile)], finding=hostile)
    body = html_body(Page(hostile, hostile, [Text(hostile, [hostile]), table, chart]))
    assert "<img" not in body
    assert "javascript:" not in re.sub(r"&[^;]*;", "", "".join(re.findall(r'href="[^"]*"', body)))
    [figure] = figures(body)
    assert figure["data"][0]["name"] == hostile
    assert body.count("<script") == body.count("</script>") == 1


def test_an_estimate_as_one_file(meshwise: Any, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    done = meshwise("estimate", *JOB, "--html", str(path), "--json")
    assert done.code == 0, done.err
    html = path.read_text()
    assert "default-src 'none'" in html  # so the browser fetches nothing, whatever a script says
    markup = re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL)
    assert not re.findall(r'(?:src|href)="(?!data:)', markup)
    time, memory, *_ = figures(html)
    document = json.loads(done.out)
    assert time["data"][0]["x"][-1] == pytest.approx(document["step_s"])
    assert memory["data"][0]["x"][-1] == pytest.approx(document["memory_bytes"]["total"])


def test_the_timeline_shows_what_the_pipeline_does() -> None:
    for plan in ("pp=4", "pp=4,schedule=zb-h1", "pp=4,vpp=2"):
        found = page_of(mw.estimate("llama3-8b", "h100-80g-sxm:4", plan, batch=16, seq=2048))
        charts = (one for one in found.sections if isinstance(one, Chart))
        chart = next(one for one in charts if "Pipeline over" in one.title)
        assert chart.table is not None
        [lanes] = chart.marks
        assert isinstance(lanes, Lanes)
        assert [*lanes.kinds][-1] == "waits"  # and is drawn with a colour and a key: no gap is unexplained
        shown = (lanes.grid < len(lanes.kinds) - 1).mean()
        stated = [float(str(row[1]).rstrip("%")) / 100 for row in chart.table.rows]
        assert shown == pytest.approx(sum(stated) / len(stated), abs=0.01)


def test_two_plans_side_by_side_differ_by_what_their_terms_do() -> None:
    job = {"batch": 32, "seq": 4096}
    left, right = (mw.estimate("llama3-8b", "h100-80g-sxm:16", plan, **job) for plan in ("tp=4", "tp=2,pp=2"))
    page = compare_page(left, right)
    bars = next(one for one in page.sections if isinstance(one, Chart)).marks
    sums = [sum(one.values) for one in bars if isinstance(one, Bars)]
    assert sums == pytest.approx([left.step_s, right.step_s])
    change = abs(right.step_s / left.step_s - 1)
    assert f"{change:.1%} {'more' if right.step_s > left.step_s else 'less'} than A" in page.headline


TRACES = str(GLOO4)
GEMM = [kernel("gemm", 0, 1000)]


@pytest.mark.parametrize(("words", "titles"), table("pages")["results"].items())
def test_every_result_is_a_page(meshwise: Any, tmp_path: Path, words: str, titles: list[str]) -> None:
    from meshwise.calibrate.runs import published_runs

    runs, path = tmp_path / "runs.csv", tmp_path / "x.html"
    runs.write_text("\n".join(published_runs().read_text().splitlines()[:5]))
    trace = str(write_trace(tmp_path / "rank-0.json", GEMM, 0))
    named = {"RUNS": str(runs), "TRACE": trace, "TRACES": TRACES}
    told = (named.get(word, word) for word in words.split())
    done = meshwise(*told, "--plot" if words.startswith("frontier") else "--html", str(path))
    assert done.code == 0, done.err
    html = path.read_text()
    assert len(figures(html)) >= len(titles)
    for title in titles:
        assert f"<h2>{title}" in html


def test_a_result_without_a_page_of_its_own_is_its_parts(tmp_path: Path) -> None:
    mw.collective("all_reduce", "h100:8", [1e6]).to_html(tmp_path / "x.html")
    assert "<title>Collective Times" in (tmp_path / "x.html").read_text()


def test_the_sample_of_a_space_is_of_its_plans() -> None:
    found = mw.search("llama3-8b", "h100-80g-sxm:8", "zero=1", batch=8, seq=2048)
    best, sample = found.best[0], found.sample(10**6)
    assert len(sample) == found.plans_considered
    assert sum(one.memory_bytes <= found.capacity_bytes for one in sample) >= found.plans_feasible > 0
    assert min(one.step_s for one in sample if one.memory_bytes <= found.capacity_bytes) == best.step_s
    for one in sample[:200]:
        again = mw.estimate(best.model, best.cluster, one.text, batch=8, seq=2048, microbatch=one.microbatch)
        assert again.step_s == one.step_s
