"""Conventions of NERSC: nersc-2024-10 against every number of the paper's own code, the check of a file
of such numbers, and nersc-2024-02 against every printed cell of the notebook.

Source of tests/data/nersc_final_cases.json: runs of ShashankSubramanian/transformer-perf-estimates at
54278b0 (2024-10-02), as its `about` says; the golden sums of one layer below are of the same code. Source of
tests/data/nersc_notebook.json: the transformer-estimates notebook (upstream commit cf96a49, 2024-01-31).
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_tables import DATA, csv_rows, lines, table, with_field
from meshwise.core.errors import DataError
from meshwise.machine.hardware import find_cluster
from meshwise.model.find import find_model
from meshwise.plan.plan import parse_plan
from meshwise.plan.workload import Workload
from meshwise.published.convention import PublishedStep
from meshwise.published.nersc.cases import TOLERANCE, check_cases
from meshwise.published.nersc.notebook import COLUMNS as NOTEBOOK_COLUMNS, notebook
from meshwise.published.nersc.paper import COLUMNS, PaperRun, paper_system, price
from meshwise.published.nersc.paper_ops import PaperCut
from meshwise.published.nersc.paper_plan import paper

FILE = DATA / "nersc_final_cases.json"
DOCUMENT = json.loads(FILE.read_text())
CHECKED = check_cases(FILE)
PLANS = table("tables")["nersc"]["plans"]
A100 = paper_system(find_cluster("nersc-a100"))


def gpt3(**sizes: Any) -> PaperCut:
    given = {"strategy": "1d", "microbatch": 1.0, "seq": 2048.0, "hidden": 12288.0, "ffn": 49152.0}
    return PaperCut(**(given | {"heads": 96.0, "m1": 4.0} | sizes))


def on_one_stage(cut: PaperCut, **mesh: Any) -> PaperRun:
    inside = {"tp1": np.minimum(cut.m1, 4.0), "tp2": 1.0, "dp": 1.0, "pp": 1.0}
    return PaperRun(
        **({"cut": cut, "num_layers": 96.0, "batch": 64.0, "dp": 1.0, "pp": 1.0} | mesh), inside=inside
    )


def changed(tmp_path: Path, *changes: tuple[str, Any]) -> Path:
    """The file of cases with other values at some dotted paths, at another place."""
    document = DOCUMENT
    for path, value in changes:
        document = with_field(document, path, value)
    (tmp_path / "cases.json").write_text(json.dumps(document))
    return tmp_path / "cases.json"


@pytest.mark.parametrize(("name", "worst"), CHECKED.cases, ids=[name for name, _ in CHECKED.cases])
def test_every_number_of_a_case(name: str, worst: Any) -> None:
    assert worst.rel <= TOLERANCE, f"{name}: {worst.where} is off by {worst.rel}"


@pytest.mark.parametrize(
    ("attention", "stored_gb", "forward_ms", "backward_ms"),
    [("separate", (18.723, 59.794), (539.67, 368.61), (1020.29, 648.70)),
     ("fused", (18.723, 12.702), (539.67, 307.03), (1020.29, 577.20))],
)  # fmt: skip
def test_gpt3_of_the_first_notebook_under_the_final_rules(
    attention: str, stored_gb: Any, forward_ms: Any, backward_ms: Any
) -> None:
    tables = price(on_one_stage(gpt3(attention=attention)), A100).tables
    for i, part in enumerate(("mlp", "sa")):
        sums = {
            name: 96 * sum(row[name] for row in tables[part])
            for name in ("activation_buffer", "t_fwd", "t_bwd")
        }
        assert sums["activation_buffer"] == pytest.approx(stored_gb[i], abs=5e-4)
        assert 1e3 * sums["t_fwd"] == pytest.approx(forward_ms[i], abs=5e-3)
        assert 1e3 * sums["t_bwd"] == pytest.approx(backward_ms[i], abs=5e-3)


# --- Properties -------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["1d", "2d", "2d-seqp"])
def test_parts_sum_to_the_iteration(strategy: str) -> None:
    m2 = 1.0 if strategy == "1d" else 2.0
    totals = price(on_one_stage(gpt3(strategy=strategy, m2=m2), pp=4.0, dp=2.0), A100).totals
    parts = ("comp", "mem", "tp_comm", "dp_comm", "pp_comm", "bubble")
    assert sum(totals[f"t_{part}"] for part in parts) == pytest.approx(totals["t"], rel=1e-12)
    memory = ("wts_mem", "wts_grad_mem", "wts_optimizer_states_mem", "acts_mem")
    assert sum(totals[part] for part in memory) == pytest.approx(totals["mem"], rel=1e-12)


# --- The check of a file ------------------------------------------------------------------------------


def test_a_changed_number_is_found_and_named(tmp_path: Path) -> None:
    flop = DOCUMENT["cases"][1]["outputs"]["sa_ops"][2]["flops_bwd"] * (1 + 1e-6)
    took_s = DOCUMENT["collectives"][7]["t_s"] * 1.5
    cases = [
        ("1.outputs.sa_ops.2.flops_bwd", flop, "sa_ops[softmax].flops_bwd", 1e-6),
        ("2.outputs.mlp_ops.0.comm_bwd_type", "allreduce", "mlp_ops[fc1].comm_bwd_type", 1.0),
        ("3.outputs.mlp_ops.0", None, "mlp_ops", 1.0),
        ("4.inputs.n_gpus", 1024, "inputs.n_gpus", 0.5),
        ("5.outputs.mlp_ops.2.comm_fwd", [0.0, 0.0], "mlp_ops[act1].comm_fwd", 1.0),
        ("6.outputs.mlp_ops.0.flops_fwd", 10**400, "mlp_ops[fc1].flops_fwd", 1.0),
    ]
    changes = [(f"cases.{path}", value) for path, value, *_ in cases]
    checked = check_cases(changed(tmp_path, *changes, ("collectives.7.t_s", took_s)))
    assert not checked.agrees
    for (*_, where, rel), (_, found) in zip(cases, checked.cases[1:7], strict=True):
        assert found.where == where and found.rel == pytest.approx(rel, rel=1e-5 if rel < 0.5 else 1e-12)
    assert checked.collectives.where == "collectives[7].t_s"
    assert checked.collectives.rel == pytest.approx(1 / 3)


@pytest.mark.parametrize(("apart", "rel"), [(1e-21, 0.0), (1e-15, 1.0)])
def test_the_dust_of_a_subtraction_is_no_difference(tmp_path: Path, apart: float, rel: float) -> None:
    assert DOCUMENT["cases"][2]["outputs"]["mlp_ops"][0]["t_fwd_mem"] == 0.0
    path = changed(tmp_path, ("cases.2.outputs.mlp_ops.0.t_fwd_mem", apart))
    assert check_cases(path).cases[2][1].rel == pytest.approx(rel, abs=1e-12)


@pytest.mark.parametrize(("path", "value", "says"), lines("bad_cases"))
def test_what_a_file_lacks_is_said_in_one_sentence(tmp_path: Path, path: str, value: Any, says: str) -> None:
    with pytest.raises(DataError, match=says) as error:
        check_cases(changed(tmp_path, (path, value)))
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("content", [b"", b"[1", b"\xff\xfe", b"[]", b'{"cases": [{"name": NaN}]}'])
def test_a_file_that_is_no_json_of_cases(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "cases.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"cases\.json"):
        check_cases(path)


# --- A plan of ours -----------------------------------------------------------------------------------


def answer(
    model: str, cluster: str, plan: str, batch: int, domain_ranks: float = 4, **load: Any
) -> PublishedStep:
    """The paper's answer on `cluster` with fast domains of another size."""
    machine = find_cluster(cluster)
    levels = (replace(machine.levels[0], ranks=domain_ranks), machine.levels[1])
    step = Workload(batch=batch, seq=2048, **load)
    return paper(find_model(model), replace(machine, levels=levels), parse_plan(plan), step)


def outputs_of(name: str) -> Any:
    return next(case["outputs"] for case in DOCUMENT["cases"] if case["name"] == name)


@pytest.mark.parametrize(("case", "model", "cluster", "domain_ranks", "plan", "batch"), PLANS)
def test_a_plan_gives_the_case(
    case: str, model: str, cluster: str, domain_ranks: float, plan: str, batch: int
) -> None:
    totals = answer(model, cluster, plan, batch, domain_ranks).results["totals"]
    printed = outputs_of(case)["totals"]
    assert totals == pytest.approx(printed, rel=1e-9, abs=0.0)


@pytest.mark.parametrize("plan", ["tp=4,pp=4", "layout=2d:2x2,pp=4", "layout=2d-cp:2x2,pp=4"])
def test_ledger_holds_the_time_and_the_work_of_a_layer(plan: str) -> None:
    of = answer("gpt3-175b", "nersc-a100:32", plan, 16)
    rows = [row for table in of.tables.values() for row in table]
    ledger = of.ledger
    assert ledger.total("time_s") == pytest.approx(sum(row["t"] for row in rows), rel=1e-12)
    flop = sum(row["flops_fwd"] + row["flops_bwd"] for row in rows)
    assert ledger.total("flop") == pytest.approx(flop * 1e12, rel=1e-12)
    assert ledger.total("saved_bytes") == pytest.approx(1e9 * sum(row["activation_buffer"] for row in rows))


def test_axes_fill_a_domain_in_the_order_of_the_placement() -> None:
    def inside(plan: str) -> Any:
        return answer("gpt3-175b", "nersc-a100:64", plan, 64, domain_ranks=8).plan["inside"]

    assert inside("tp=4,pp=2") == {"tp1": 4.0, "tp2": 1.0, "dp": 2.0, "pp": 1.0}
    assert inside("tp=4,pp=2,placement=pp-tp-cp-dp") == {"pp": 2.0, "tp1": 4.0, "tp2": 1.0, "dp": 1.0}
    assert inside("layout=2d:2x4,pp=4") == {"tp1": 2.0, "tp2": 4.0, "dp": 1.0, "pp": 1.0}


def test_command_prints_the_case_and_writes_its_rows(meshwise: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    words = "estimate gpt3-175b --cluster nersc-a100:512 --plan tp=4,pp=16 --batch 1024 --seq 2048"
    done = meshwise(*words.split(), "--convention", "nersc-2024-10", "--csv", str(path), "--json")
    assert done.code == 0
    printed = outputs_of("gpt3_175b_1d_a100nvs4_512")
    assert done.document["step_s"] == pytest.approx(printed["totals"]["t"], rel=1e-9)
    assert sum(done.document["time_s"].values()) == pytest.approx(done.document["step_s"], rel=1e-12)
    assert done.document["fits"] is True
    rows = csv_rows(path)
    wanted = [*printed["mlp_ops"], *printed["sa_ops"], printed["dp_comm"], printed["pp_comm"]]
    assert [row["name"] for row in rows] == [row["name"] for row in wanted]
    assert tuple(rows[0]) == ("table", *COLUMNS)
    for row, cells in zip(rows, wanted, strict=True):
        assert float(row["t"]) == pytest.approx(cells["t"], rel=1e-9)


def test_command_checks_a_file_of_cases(meshwise: Any, tmp_path: Path) -> None:
    done = meshwise("validate", "--cases", str(FILE), "--json")
    assert done.code == 0
    assert len(done.document["cases"]) == 10
    assert max(case["max_rel_diff"] for case in done.document["cases"]) <= TOLERANCE
    assert done.document["collectives"]["num"] == len(DOCUMENT["collectives"]) == 170
    assert done.document["collectives"]["max_rel_diff"] <= TOLERANCE
    wrong = changed(tmp_path, ("cases.0.outputs.mlp_ops.0.t", 1.0))
    assert meshwise("validate", "--cases", str(wrong), "--json").code == 1
    printed = meshwise("validate", "--cases", str(wrong))
    assert printed.code == 1
    assert "mlp_ops[fc1].t" in printed.out
    assert "NOT all agree" in printed.out


# --- every printed cell of the notebook, its totals, and its shares (convention nersc-2024-02) ------

PRINTED = json.loads((DATA / "nersc_notebook.json").read_text())["seed"]
PRINTED_COMM_FRAC = {"mlp": 0.019904842740418795, "sa": 0.07962667242415632}  # as the notebook prints them


def of_notebook() -> PublishedStep:
    of = find_model("gpt3-175b"), find_cluster("nersc-notebook"), parse_plan("tp=4,sp=1")
    return notebook(*of, Workload(batch=1, seq=2048))


@pytest.mark.parametrize("table", ["mlp", "sa"])
def test_totals_and_share_of_communication(table: str) -> None:
    ours, printed = of_notebook().to_json()["tables"][table], PRINTED["sums_times_depth"][table]
    assert ours["totals"] == pytest.approx(printed, rel=1e-9, abs=0.0)
    assert ours["comm_frac"] == pytest.approx(PRINTED_COMM_FRAC[table], rel=1e-9, abs=0.0)


def test_every_cell_that_the_command_writes(meshwise, tmp_path: Path) -> None:
    path = tmp_path / "tables.csv"
    words = "estimate gpt3-175b --cluster nersc-notebook --plan tp=4,sp=1 --batch 1 --seq 2048 --per-layer"
    done = meshwise(*words.split(), "--convention", "nersc-2024-02", "--csv", str(path), "--json")
    assert done.code == 0
    of_mlp = done.document["tables"]["mlp"]["totals"]
    assert of_mlp["t_total_fwd"] == pytest.approx(404.5781112174999, rel=1e-9)
    rows = csv_rows(path)
    assert [row["table"] for row in rows] == ["mlp"] * 5 + ["sa"] * 9
    for row, printed in zip(rows, PRINTED["mlp"] + PRINTED["sa"], strict=True):
        assert set(printed) == set(NOTEBOOK_COLUMNS)
        for column, cell in printed.items():
            if isinstance(cell, float):
                assert float(row[column]) == pytest.approx(cell, rel=1e-9, abs=0.0), column
            else:
                assert (row[column] or None) == cell, column


def test_ledger_holds_the_same_totals() -> None:
    of = of_notebook()
    depth = of.model.num_layers
    forward, tables = of.ledger.where(phase="forward").total("flop") / 1e12, of.to_json()["tables"].values()
    assert forward * depth == pytest.approx(sum(one["totals"]["flops_fwd"] for one in tables), rel=1e-12)
    seconds = of.ledger.total("time_s") * depth
    assert seconds == pytest.approx(of.to_json()["step_s"], rel=1e-12)
