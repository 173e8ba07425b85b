"""The measurement of a GPU in one command, small and on the CPU: every part, and one that fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[1]


def test_every_part_runs_on_a_cpu_and_a_failure_leaves_the_others(tmp_path: Path) -> None:
    (tmp_path / "traces").write_text("no folder")  # of the capture that is explained
    words = [sys.executable, "-m", "benchmarks", "gpu", str(tmp_path), "--device", "cpu"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines()[:-1])
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
