"""Captures of many ranks: the same answers from columns that are kept beside them."""

import shutil
from pathlib import Path

import pytest

from jobs import Job, write_job
from kineto import write_trace
from meshwise.trace import read
from meshwise.trace.columns import FOLDER, KeptTraces
from meshwise.trace.critical_path import critical_path
from meshwise.trace.read import read_traces
from meshwise.trace.summary import all_sections, summarize_paths

DATA = Path(__file__).parent / "data" / "traces"
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
        return Path(shutil.copytree(DATA / "gloo4", tmp_path / "gloo4"))
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
        assert isinstance(found.traces, KeptTraces) and found.to_json() == alone.to_json()
        assert all_sections(found) == sections and critical_path(found) == path
        monkeypatch.setattr(read, "read_trace", None)  # nobody decodes a trace again


def test_a_capture_that_was_stopped_goes_on_and_a_new_trace_is_read(tmp_path, kept, monkeypatch):
    write_job(tmp_path, Job(4, 4, has_marks=True))
    summarize_paths([tmp_path])
    (tmp_path / "rank-2.json").write_bytes(
        (tmp_path / "rank-2.json").read_bytes().replace(b"gemm_a", b"gemm_x")
    )
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
        assert "rank-1.json: not a trace" in told and "rank-2.json: the file ends in the middle" in told
        assert "no trace of rank 1, 3 of 8" in told


def test_one_rank_at_a_time_is_in_memory(tmp_path, kept):
    write_job(tmp_path, Job(4, 4))
    traces, _ = read_traces([tmp_path])
    assert [one.rank for one in traces] == [0, 1, 2, 3] and [one.rank for one in traces[2:]] == [2, 3]
    assert traces[0] is traces[0] and traces[1].rank == 1 and traces[-1].rank == 3
