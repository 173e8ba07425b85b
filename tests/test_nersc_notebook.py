"""Convention nersc-2024-02 against every printed cell of the notebook, its totals, and its shares.

Source of tests/data/nersc_notebook.json: the transformer-estimates notebook (upstream commit cf96a49,
2024-01-31) at full precision.
"""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from meshwise.machine.hardware import find_cluster
from meshwise.model.find import find_model
from meshwise.plan.plan import parse_plan
from meshwise.plan.workload import Workload
from meshwise.published.convention import PublishedStep
from meshwise.published.nersc.notebook import COLUMNS, notebook

PRINTED = json.loads((Path(__file__).parent / "data" / "nersc_notebook.json").read_text())["seed"]
PRINTED_COMM_FRAC = {"mlp": 0.019904842740418795, "sa": 0.07962667242415632}  # as the notebook prints them
ARGUMENTS = (
    *("estimate", "gpt3-175b", "--cluster", "nersc-notebook", "--plan", "tp=4,sp=1", "--batch", "1"),
    *("--seq", "2048", "--convention", "nersc-2024-02", "--per-layer"),
)


def priced(plan: str = "tp=4,sp=1") -> PublishedStep:
    cluster = find_cluster("nersc-notebook")
    return notebook(find_model("gpt3-175b"), cluster, parse_plan(plan), Workload(batch=1, seq=2048))


def table_of(name: str, plan: str = "tp=4,sp=1") -> Any:
    return priced(plan).to_json()["tables"][name]


def check_same(ours: Any, printed: Any, where: str) -> None:
    if isinstance(printed, float | int):
        assert ours == pytest.approx(printed, rel=1e-9, abs=0.0), where
    else:
        assert (ours or None) == printed, where


@pytest.mark.parametrize("table", ["mlp", "sa"])
def test_totals_and_share_of_communication(table: str) -> None:
    ours = table_of(table)["totals"]
    printed = PRINTED["sums_times_depth"][table]
    assert set(ours) == set(printed)
    for name, value in printed.items():
        check_same(ours[name], value, name)
    check_same(table_of(table)["comm_frac"], PRINTED_COMM_FRAC[table], "time spend in comms")


def test_every_cell_that_the_command_writes(meshwise, tmp_path: Path) -> None:
    path = tmp_path / "tables.csv"
    done = meshwise(*ARGUMENTS, "--csv", str(path), "--json")
    assert done.code == 0
    assert done.document["tables"]["mlp"]["totals"]["t_total_fwd"] == pytest.approx(
        404.5781112174999, rel=1e-9
    )
    rows = list(csv.DictReader(io.StringIO(path.read_text())))
    assert [row["table"] for row in rows] == ["mlp"] * 5 + ["sa"] * 9
    for row, printed in zip(rows, PRINTED["mlp"] + PRINTED["sa"], strict=True):
        assert set(printed) == set(COLUMNS)
        for column, cell in printed.items():
            text = row[column]
            check_same(float(text) if text and isinstance(cell, float) else text, cell, column)


def test_ledger_holds_the_same_totals() -> None:
    of = priced()
    depth = of.model.num_layers
    forward = of.ledger.where(phase="forward").total("flop") / 1e12
    assert forward * depth == pytest.approx(
        sum(table_of(t)["totals"]["flops_fwd"] for t in ("mlp", "sa")), rel=1e-12
    )
    seconds = of.ledger.total("time_s") * depth
    assert seconds == pytest.approx(of.to_json()["step_s"], rel=1e-12)
