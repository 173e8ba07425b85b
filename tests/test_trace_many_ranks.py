"""Captures of many ranks: the same answers from columns that are kept beside them."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from data_tables import TRACES
from jobs import Job, write_job
from kineto import kernel, write_trace
from meshwise.report.trace import picture
from meshwise.trace import read
from meshwise.trace.breakdown import PARTS, Partition
from meshwise.trace.columns import FOLDER
from meshwise.trace.critical_path import critical_path
from meshwise.trace.summary import all_sections, outliers, summarize_paths
from test_trace_merge import check_nests

JOBS = {
    "marked": Job(8, 10, "slow device", rank=2, has_marks=True, has_numbers=True, missing=(5,)),
    "drifting": Job(4, 10, "late rank", rank=1, clock_s=1.0, drift_ppm=50.0),
    "host": Job(3, 8, "pause", rank=1, on_cpu=True, has_host=True),
}


@pytest.fixture
def kept(monkeypatch):
    """Columns are kept of every capture."""
    pytest.importorskip("polars")
    monkeypatch.setattr(read, "KEPT_BYTES", 0)


@pytest.fixture(params=["gloo4", *JOBS])
def capture(request, tmp_path):
    if request.param == "gloo4":
        return Path(shutil.copytree(TRACES / "gloo4", tmp_path / "gloo4"))
    write_job(tmp_path, JOBS[request.param])
    return tmp_path


@pytest.mark.parametrize("steps", ["", "complete"])
def test_columns_give_the_same_answers(capture, monkeypatch, steps):
    """To the last digit, the second time without a look at the traces."""
    pytest.importorskip("polars")
    alone = summarize_paths([capture], steps=steps)
    sections, path = all_sections(alone), critical_path(alone)
    monkeypatch.setattr(read, "KEPT_BYTES", 0)
    for _ in range(2):
        found = summarize_paths([capture], steps=steps)
        assert found.traces.are_kept and found.to_json() == alone.to_json()
        assert all_sections(found) == sections and critical_path(found) == path
        monkeypatch.setattr(read, "read_trace", None)  # nobody decodes a trace again


def test_a_capture_that_was_stopped_goes_on_and_a_new_trace_is_read(tmp_path, kept, monkeypatch):
    write_job(tmp_path, Job(4, 4, has_marks=True))
    summarize_paths([tmp_path])
    changed = tmp_path / "rank-2.json"
    changed.write_text(changed.read_text().replace("gemm_a", "gemm_x"))
    files = sorted((tmp_path / FOLDER).glob("*.parquet"))
    files[0].unlink()
    asked = []
    real = read.read_trace
    monkeypatch.setattr(read, "read_trace", lambda *files: asked.append(files) or real(*files))
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    found = summarize_paths([tmp_path])
    assert 1 <= len(asked) <= 2 and "gemm_x" in {one.name for one in found.kernels}


def test_missing_and_damaged_ranks_are_named_and_the_others_answered(tmp_path, kept):
    write_job(tmp_path, Job(8, 10, "late rank", rank=6, has_marks=True, has_numbers=True, missing=(3,)))
    (tmp_path / "rank-1.json").write_text("no trace at all")
    cut = (tmp_path / "rank-2.json").read_text()
    (tmp_path / "rank-2.json").write_text(cut[: len(cut) * 9 // 10])
    write_trace(tmp_path / "again.json", [], 4)
    for _ in range(2):  # as told the second time
        found = summarize_paths([tmp_path])
        told = " ".join(one.text for one in found.problems)
        assert found.findings[0].ranks == (6,), found.findings
        assert "rank-1.json: not a trace" in told and "rank-2.json: it is left out" in told
        assert "no trace of ranks 1-3 of 8" in told and found.traces.ranks == [0, 4, 5, 6, 7]


def test_sql_over_all_ranks(tmp_path, meshwise):
    """Of a small capture too; its columns are then kept."""
    pytest.importorskip("polars")
    write_job(tmp_path, Job(4, 6, "slow device", rank=1, has_marks=True, has_numbers=True))
    alone = summarize_paths([tmp_path])
    sql = "SELECT name, count(*) AS n, sum(duration_ns) AS ns, min(start_s) AS first_s FROM events "
    sql += "WHERE kind = 'compute' GROUP BY name ORDER BY name"
    rows = meshwise("trace", "query", str(tmp_path), sql, "--json").document["rows"]
    kernels = sorted((one.name, one.count, one.total_s) for one in alone.kernels if one.kind == "compute")
    assert [(name, n, ns / 1e9) for name, n, ns, _ in rows] == kernels and min(row[3] for row in rows) >= 0
    joined = "SELECT c.rank, r.span_s, sum(c.wait_s) AS w FROM collectives c JOIN ranks r ON c.rank = r.rank "
    joined += "GROUP BY c.rank, r.span_s ORDER BY w LIMIT 1"
    ((rank, span_s, _),) = meshwise("trace", "query", str(tmp_path), joined, "--json").document["rows"]
    assert (rank, span_s) == (1, alone.ranks[1].span_s)
    steps = "SELECT step, max(rank) AS most FROM steps WHERE part = 'whole' GROUP BY step"
    shown = meshwise("trace", "query", str(tmp_path), steps, "--csv", str(tmp_path / "steps.csv"))
    assert shown.code == 0 and (tmp_path / "steps.csv").read_text().startswith("step,most")


def test_sql_over_tables_without_rows(tmp_path, meshwise):
    """No step is marked and no rank calls another: the tables have their columns all the same."""
    pytest.importorskip("polars")
    path = str(write_trace(tmp_path / "rank-0.json", [kernel("gemm", 0, 5)], 0))
    for table, column in (("steps", "span_s"), ("collectives", "wait_s")):
        done = meshwise("trace", "query", path, f"SELECT * FROM {table} WHERE {column} > 0")
        assert done.code == 0 and "0 of 0 rows" in done.out and column in done.out


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """40 ranks on 5 hosts of which one is slow throughout, and another rank by itself."""
    folder = tmp_path_factory.mktemp("many")
    job = Job(40, 8, "slow device", rank=3, size=0.6, has_marks=True, has_numbers=True)
    write_job(folder, job, slow_hosts={4: 1.2})
    return folder


def test_of_many_ranks_what_stands_out_is_shown(many, meshwise, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    compute = [(of.kind, of.name) for of in summarize_paths([many]).outliers if of.part == "compute"]
    assert compute == [("rank", "3"), ("node", "host-4")]
    shown = meshwise("trace", "summary", str(many)).out
    assert "node host-4" in shown and "32-39" in shown and max(map(len, shown.splitlines())) <= 80
    assert len(shown.splitlines()) < 60


@pytest.mark.parametrize(
    ("kind", "name", "slow"),
    [("node", "b", range(8, 16)), ("rail", "2", range(2, 24, 8)), ("stage", "1", range(1, 24, 3))],
)
def test_what_slow_ranks_have_in_common_is_told_once(kind, name, slow):
    """24 ranks on three hosts; each three that follow one another are the stages of a pipeline."""
    seconds = [dict.fromkeys(PARTS, 0.1) | {"compute": 1.0 + 0.3 * (rank in slow)} for rank in range(24)]
    pairs = ((rank, rank + 1) for rank in range(24) if rank % 3 < 2)
    messages = [SimpleNamespace(name="send_recv", members=pair) for pair in pairs]
    hosts = {rank: "abc"[rank // 8] for rank in range(24)}
    (found,) = outliers([Partition(rank, of, None) for rank, of in enumerate(seconds)], hosts, messages)
    assert (found.kind, found.name, found.ranks) == (kind, name, tuple(slow))
    assert found.part == "compute" and found.excess_s == pytest.approx(0.3)


def test_a_timeline_of_the_worst_ranks(many, meshwise, tmp_path):
    whole, few = tmp_path / "all.json", tmp_path / "few.json"
    done = meshwise("trace", "merge", str(many), "--ranks", "worst:2", "-o", str(few), "--json")
    assert done.document["num_ranks"] == 2
    meshwise("trace", "merge", str(many), "-o", str(whole))
    events = [json.loads(path.read_text())["traceEvents"] for path in (whole, few)]
    shown = {event["pid"] for event in events[1]}
    assert len(shown) == 2 and 3 in shown
    check_nests(events[1])

    def slices(of):
        """Arrows and lanes are numbered by what is shown."""
        return [(e["pid"], e["name"], e["ts"], e["dur"]) for e in of if e["ph"] == "X" and e["pid"] in shown]

    assert slices(events[1]) == slices(events[0])


def test_many_ranks_are_a_map_of_ranks_and_steps(many, tmp_path, meshwise):
    pytest.importorskip("matplotlib")
    pytest.importorskip("plotly")
    lanes = picture(summarize_paths([many])).rows[0][0].marks[0]
    late, grid = list(lanes.kinds), lanes.grid[:, 1:]
    assert grid.shape == (40, 7)
    assert (grid[3] >= late.index("20 to 50 %")).all()
    assert (grid[32:40] >= late.index("10 to 20 %")).mean() > 0.9
    assert (np.delete(grid, [3, *range(32, 40)], axis=0) <= late.index("5 to 10 %")).mean() > 0.95
    assert meshwise("trace", "plot", str(many), "-o", str(tmp_path / "ranks.png")).code == 0
    assert meshwise("trace", "report", str(many), "-o", str(tmp_path / "ranks.html")).code == 0
