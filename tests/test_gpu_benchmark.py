"""The measurement of a GPU in one command, small and on the CPU: every part, and one that fails."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from benchmarks import gpu


def in_this_process(words: list[str], **settings: Any) -> Any:
    """A part as `python -m benchmarks` would run it; a job of torch as a process all the same."""
    if "--part" not in words:
        return RUN(words, **settings)
    try:
        gpu.main(words[words.index("gpu") + 1 :])
    except Exception as error:
        return SimpleNamespace(returncode=1, stderr=str(error))
    return SimpleNamespace(returncode=0)


RUN = subprocess.run


def test_every_part_runs_on_a_cpu_and_a_failure_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "traces").write_text("no folder")  # of the capture that is explained
    monkeypatch.setattr(subprocess, "run", in_this_process)
    gpu.main([str(tmp_path), "--device", "cpu"])
    said = dict(line.split(": ", 1) for line in capfd.readouterr().out.splitlines()[:-1])
    assert {part for part, what in said.items() if what != "done"} == {"explain"}
    page = (tmp_path / "README.md").read_text()
    assert "- explain failed: " in page and "matrix_flop_per_s" in page
    step, peak = json.loads((tmp_path / "train.json").read_text())
    assert step["measured"] > 0 and step["predicted"] > 0
    assert peak["dry_run"] > 0 and peak["predicted"] > 0
    for row in (
        *json.loads((tmp_path / "kernels.json").read_text()),
        *json.loads((tmp_path / "decode.json").read_text()),
    ):
        assert row["measured"] > 0
        assert f"| {row['what']} | " in page
