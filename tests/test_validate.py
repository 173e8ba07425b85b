"""Published runs: read, said in our words, priced, and summed up; bad rows keep their reason."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace as restated

import meshwise as mw
from data_tables import DATA, DOCS, csv_rows, table
from docs_scripts import docs_script
from meshwise.calibrate import fit_steps
from meshwise.calibrate.errors import is_held_out, summarize
from meshwise.calibrate.express import express
from meshwise.calibrate.leave_one_source_out import misses_by_others, spread
from meshwise.calibrate.mend import mends
from meshwise.calibrate.releases import read_board
from meshwise.calibrate.robust import LinearMisses, minimise
from meshwise.calibrate.runs import PROSE, Run, read_runs, unseen_runs
from meshwise.calibrate.validate import Validation, estimate_run, predict_run, validate
from meshwise.cli.measurements import RUN_FILES
from meshwise.core.errors import ClusterError, DataError, PlanError
from meshwise.core.files import csv_text
from meshwise.estimate.intervals import Interval, regimes, spreads, unmeasured
from meshwise.estimate.one_plan import estimate
from meshwise.machine.hardware import find_chip, find_cluster
from meshwise.machine.overheads import SOFTWARE, find_overheads
from meshwise.model.find import find_model
from meshwise.plan.plan import parse_plan
from meshwise.plan.workload import Workload
from meshwise.report import validation as report
from meshwise.rl.framework import interval_of as rl_interval
from meshwise.serve.engine import interval_of as serving_interval

WRONG = table("wrong_inputs")

pytestmark = pytest.mark.slow

MEASURED = DATA / "validate"
RUNS = MEASURED / "published_runs_excerpt.csv"
ITERATIONS = MEASURED / "measured_iterations_excerpt.csv"
HOST = fit_steps.Quantity("step_s", ("software.megatron-2020.kernel_passes",), fit_steps.step_miss)


def runs() -> dict[str, Run]:
    return {run.id: run for run in read_runs(RUNS)[0]}


def edited(tmp_path: Path, numbers: Iterable[int], cells: dict[str, str]) -> Path:
    """The excerpt with cells of some rows changed."""
    rows = csv_rows(RUNS)
    for number in numbers:
        rows[number].update(cells)
    names, path = [*rows[0] | cells], tmp_path / "runs.csv"
    path.write_text(csv_text([names, *([row.get(name) for name in names] for row in rows)]))
    return path


# --- reading -----------------------------------------------------------------------------------


def test_step_time_is_stated_or_follows_from_tokens_per_second() -> None:
    found = runs()
    assert found["kort22-22B-full"].step_s == 1.42  # stated
    assert found["mpt-072"].step_s == pytest.approx(168 * 4096 / (814 * 8), rel=1e-12)  # of 8 GPUs
    assert found["simumax-llama3_70b_l12_tp4_pp1_dp2_mbc8_cef"].memory_bytes == 39.07 * 2**30


def test_measured_iterations_carry_the_facts_of_their_file() -> None:
    (first, *others), bad = read_runs(ITERATIONS)
    assert (bad, first.gpus, first.tp, first.dp, first.hidden, first.step_s) == ([], 64, 1, 64, 3072, 3.6383)
    assert (first.recompute_kind, first.dtype, express(first).model.vocab) == ("full", "fp16", 50304)
    assert {run.vocab_padded_to for run in others if run.id.startswith("single_node")} == {50257}
    assert express(first).cluster.levels[-1].bytes_per_s == 12.5e9  # 800 Gb/s for the 8 GPUs of a node


@pytest.mark.parametrize(("column", "value", "expected"), WRONG["cells"])
def test_bad_cells_are_named(tmp_path: Path, column: str, value: str, expected: str) -> None:
    """And good rows count."""
    cells = dict(zip(column.split("+"), value.split("+"), strict=True))
    validation = validate([edited(tmp_path, [1], cells)])
    (missing,) = (row for row in validation.rows if not row.expressed)
    assert missing.id == "kort22-22B-selsp" and expected in missing.reason
    assert sum(row.expressed for row in validation.of("step_s")) == len(runs()) - 1


def test_a_file_that_is_no_table_of_runs(tmp_path: Path) -> None:
    (tmp_path / "bytes.csv").write_bytes(b"id,\xff\xfe\n")
    (tmp_path / "empty.csv").write_text(RUNS.read_text().partition("\n")[0])
    (tmp_path / "runs.csv").write_text("id,source,model\na,b,c\n")
    (tmp_path / "watts.csv").write_text("chip,avg_watts_per_node,source\nh100,7300,ours\n")
    words = {"absent": "cannot read", "bytes": "in UTF-8", "empty": "no rows"}
    words |= {"watts": "lacks what, avg_watts_per_gpu", "runs": "the header lacks the column year, seq_len"}
    for name, text in words.items():
        with pytest.raises(DataError, match=text):
            validate([tmp_path / f"{name}.csv"])


def test_a_column_that_nobody_reads_is_told_and_a_misspelled_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(RUNS.read_text().replace("facts_from", "colour", 1))
    assert validate([path]).warnings == (f"{path}, line 1: no such column, so not read: colour",)
    assert "rows share an id" in validate([RUNS, edited(tmp_path, [0], {})]).warnings[-1]
    path.write_text(RUNS.read_text().replace("zero_group", "zero_groups", 1))
    with pytest.raises(DataError, match="no column is called 'zero_groups'; do you mean 'zero_group'"):
        validate([path])


@given(words=st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=60))
@settings(max_examples=6, deadline=None)
def test_prose_changes_nothing(tmp_path_factory: pytest.TempPathFactory, words: str) -> None:
    prose = dict.fromkeys((*PROSE, "source"), f"recipe release 26.06 {words}")
    path = edited(tmp_path_factory.mktemp("prose"), range(len(runs())), prose)
    changed = [restated(run, source="", where="") for run in read_runs(path)[0]]
    assert changed == [restated(run, source="", where="") for run in read_runs(RUNS)[0]]


def test_every_run_of_the_package_is_priced() -> None:
    """With a change that its framework tries where it does not fit, if its model has what that is of."""
    rows = [*mw.validate().rows, *validate([unseen_runs()]).rows]
    assert not [(row.id, row.reason) for row in rows if row.reason]


def test_the_page_of_the_format_names_every_column() -> None:
    page = (DOCS / "data.md").read_text()
    assert not [name for name in (*Run.__struct_fields__[:-1], *PROSE) if f"`{name}`" not in page]


# --- our words ---------------------------------------------------------------------------------

DENSE = "mbridge-053"
STATED = table("stated_facts")


@pytest.mark.parametrize("column", STATED)
def test_no_stated_fact_is_ignored(column: str) -> None:
    row_id, value = STATED[column]
    run = runs()[row_id]
    if column == "gpus_per_node":  # counts where the row does not say how many NVLink joins
        run = restated(run, scale_up_ranks=None)
    if column == "cuda_graph":  # counts where kernels are shorter than their launches
        run = restated(run, hidden=512, seq_len=256)
    assert getattr(run, column) != value
    before, after = (estimate_run(express(each)) for each in (run, restated(run, **{column: value})))
    assert (before.step_s, before.memory_bytes) != (after.step_s, after.memory_bytes)


@pytest.mark.parametrize(("row_id", "column", "value", "words"), table("tables")["validate"]["nearly"])
def test_what_is_said_only_nearly_is_told(row_id: str, column: str, value: object, words: str) -> None:
    run = runs()[row_id]
    assert not express(run).approximations
    assert words in " ".join(express(restated(run, **{column: value})).approximations)


def test_what_is_stated_counts_before_what_a_model_or_a_framework_has() -> None:
    dense = restated(runs()[DENSE], framework="torchtune", optimizer=None, optimizer_dtype="fp32")
    moe = express(restated(runs()[STATED["topk"][0]], experts=None, topk=2)).model.moe
    assert (express(dense).plans[0].optimizer, moe.num_experts, moe.top_k) == ("adam", 256, 2)


def test_networks_by_their_columns() -> None:
    run = runs()["kort22-22B-full"]
    levels = express(restated(run, network="roce", network_gbit_per_s_per_gpu=200.0)).cluster.levels
    assert (levels[-1].name, levels[-1].bytes_per_s, levels[0].ranks) == ("roce", 25e9, 8.0)
    usual = express(restated(run, network=None, network_gbit_per_s_per_gpu=None)).cluster
    assert usual.levels is usual.chip.levels
    rack = restated(runs()["mbridge-023"], scale_up_ranks=64)
    assert express(rack).cluster.levels[0].ranks == 64.0
    with pytest.raises(ClusterError, match="network is none, but 256 GPUs are more than the 72"):
        express(restated(runs()["mbridge-023"], network="none"))


def test_uneven_layers_leave_room_for_the_ends() -> None:
    said = express(runs()["bs-bloom-176b"])
    assert said.plans[0].stages == (5, *[6] * 10, 5)  # 70 layers, embedding and head on 12 stages
    assert said.plans[0].software == "megatron-2020" and said.overheads().launches_block
    chunks = express(runs()["mbridge-023"]).plans[0].stages
    assert len(chunks) == 64 and sum(chunks) == 126 and chunks[0] == chunks[-1] == 1


def test_memory_of_the_software_that_ran() -> None:
    """Under transformers Adam's step, FSDP1's inputs and root, logits, Liger; torchtitan's loss, eager."""
    rows = validate([MEASURED / "memory.csv"]).rows
    memory = [row for row in rows if row.quantity == "memory_bytes"]
    assert len(memory) == 14
    assert all(abs(row.predicted / row.measured - 1.0) < 0.03 and row.fits for row in memory)


def test_biases_of_experts_and_vocabularies_are_as_in_the_framework() -> None:
    for framework, passes in (("nemo-automodel", 4.0), ("megatron-lm", 16.0)):
        run = restated(runs()[DENSE], framework=framework)
        assert express(run).overheads().expert_bias_passes == passes
    run = restated(runs()["kort22-22B-full"], vocab=50257)
    assert express(run).model.vocab == 51200  # 50 x 128 x tp, as Megatron-LM prints it
    assert express(restated(run, vocab_padded_to=50257)).model.vocab == 50256  # what tp=8 leaves
    assert express(restated(run, framework="mine", year=2025)).model.vocab == 50256


# --- overheads ---------------------------------------------------------------------------------


def test_a_die_at_its_voltage_floor_computes_as_its_watts_ask_for() -> None:
    """MI325X is an MI300X with 1,000 W in place of 750: MLPerf's LoRA steps take 2.93 s in place of 3.94."""
    plan, work = parse_plan("lora_rank=16,dtype=fp8"), Workload(batch=8, seq=8192)
    slow, fast = (
        estimate(find_model("llama2-70b"), find_cluster(f"{chip}:8"), plan, work).step_s
        for chip in ("mi300x", "mi325x")
    )
    assert slow / fast == pytest.approx(3.94 / 2.93, rel=0.04)


def test_the_catalog_holds_every_constant_of_the_fit() -> None:
    chip = find_chip("h100-80g-sxm")
    for software in SOFTWARE:
        assert find_overheads(chip, software).host_s > 0
    of = find_chip("a100-80g-sxm")
    eager, older = (find_overheads(of, name) for name in ("torch-2024-eager", "torch-2023"))
    assert eager.kernel_passes == older.kernel_passes
    assert eager.attention_slowdown == 1.0 < older.attention_slowdown
    assert find_overheads(find_chip("b200-sxm"), "torch-2024").attention_slowdown == 1.0
    with pytest.raises(PlanError, match="software '1999' is unknown"):
        find_overheads(chip, "1999")
    for name, value in fit_steps.catalog_constants().items():
        _, least, most = fit_steps.LIMITS[name]
        assert 1.001 * least < value < most / 1.001, f"{name} ends at its limit"
    assert fit_steps.as_tables(fit_steps.START).software["megatron-2020"]


# --- errors ------------------------------------------------------------------------------------


def test_summary_of_known_errors() -> None:
    found = summarize([0.1, -0.2, 0.3, None])
    assert (found.num_rows, found.num_expressed, found.max_abs_frac) == (4, 3, 0.3)
    assert (found.median_abs_frac, found.mean_signed_frac) == pytest.approx((0.2, 0.2 / 3))
    assert summarize([None]).median_abs_frac is None


# --- the whole ---------------------------------------------------------------------------------


def test_excerpt_is_expressed_and_close() -> None:
    validation = validate([RUNS, ITERATIONS])
    for row in validation.rows:
        assert row.expressed and math.isfinite(row.predicted or math.nan)
        assert row.parts.get("total", sum(row.parts.values())) > 0
    steps = summarize([row.error_frac for row in validation.of("step_s")])
    assert (steps.mean_abs_frac or 1.0) < 0.15
    korthikanti = [row.error_frac for row in validation.of("step_s") if row.id.startswith("kort22")]
    assert (summarize(korthikanti).mean_abs_frac or 1.0) < 0.06


@pytest.mark.parametrize("quantity, most, limit", [("chip_watts", 0.125, 700.0), ("node_watts", 0.1, 5600.0)])
def test_measured_watts_are_near_and_a_limit_is_not(quantity: str, most: float, limit: float) -> None:
    rows = validate([MEASURED / "measured_power_excerpt.csv"]).of(quantity)
    known = [row for row in rows if row.expressed]
    assert len(known) >= 4 and all(row.reason for row in rows if not row.expressed)
    errors, of_limit = (
        [(each or row.predicted) / row.measured - 1.0 for row in known] for each in (None, limit)
    )
    assert statistics.median(map(abs, errors)) < most < statistics.median(map(abs, of_limit))


def test_the_command_prints_one_document(meshwise: Any) -> None:
    document = meshwise("validate", "--runs", str(RUNS), "--runs", str(ITERATIONS), "--json").document
    row = document["rows"][0]
    assert list(row) == [
        *("id", "source", "chip", "quantity", "measured", "predicted", "error_frac", "expressed"),
        *("interval", "left_out", "left_out_error_frac", "reason", "fits", "approximations"),
    ]
    assert row["error_frac"] == pytest.approx(row["predicted"] / row["measured"] - 1)
    assert set(document["summary"]) == {"step_s", "memory_bytes"}
    keys = "num_rows num_expressed median_abs_frac mean_abs_frac p90_abs_frac mean_signed_frac coverage_frac"
    assert {*keys.split(), "coverage_by_source_frac"} <= {*document["summary"]["step_s"]}
    printed = meshwise("validate", "--runs", str(RUNS), "--worst", "2")
    assert printed.code == 0 and "not expressed" not in printed.out and "Order:" in printed.out


def test_the_page_shows_every_group(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    validation, of_fit = validate([RUNS]), tmp_path / "published_runs.csv"
    script = docs_script("accuracy")
    script.write_accuracy(validation, validation.rows, tmp_path)
    page = (tmp_path / "accuracy.md").read_text()
    assert (tmp_path / "figures" / "accuracy_runs.png").stat().st_size > 10_000
    for text in ("by chip", "a100-80g-sxm", "Korthikanti et al. 2022", "worst rows", "by scale", "None."):
        assert text in page
    assert "held-out half" not in page  # nothing was fitted to runs of one's own
    of_fit.write_text(RUNS.read_text())
    fitted = validate([of_fit])
    assert {"held-out half", "fitted half"} == {row.regime["half"] for row in fitted.of("step_s")}
    rows = fitted.of("step_s")
    many = [replace(rows[0], chip=str(number)) for number in range(20)]
    wide, narrow, chips = (report.page(Validation(some)).sections[1] for some in (rows, rows[:1], many))
    assert wide.x.log and not narrow.x.log  # less than a decade of a logarithmic axis has no numbers
    assert len({(mark.color, mark.symbol) for mark in chips.marks if mark.size}) == 20
    assert "no prediction" not in chips.finding


def test_a_fit_finds_the_constant_that_made_the_data() -> None:
    """Runs whose step time is predicted with 1.6 passes a kernel give that constant back."""
    truth = fit_steps.START | {"software.megatron-2020.kernel_passes": 1.6}
    made = fit_steps.as_tables(truth)
    rows = [
        express(restated(run, step_time_s=estimate_run(express(run), made).step_s))
        for run in read_runs(ITERATIONS)[0]
        if not is_held_out(run.id)
    ]
    found = fit_steps.search(fit_steps.START, rows, HOST)
    assert found["software.megatron-2020.kernel_passes"] == pytest.approx(1.6, rel=0.05)
    assert found | {"software.megatron-2020.kernel_passes": 1.6} == truth  # the others stay


def test_a_fit_is_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meshwise: Any) -> None:
    """What speaks against the constants is in it, nothing is written, and the exit code says no."""
    refused = fit_steps.StepFit(fit_steps.START, 0.1, 0.2, "", ("skew_s ends at its limit",))
    monkeypatch.setattr(fit_steps, "priced_runs", lambda paths: [])
    monkeypatch.setattr(fit_steps, "fit_overheads", lambda runs, **about: refused)
    for name in RUN_FILES:
        (tmp_path / name).touch()
    outcome = meshwise("fit", "--only", "steps", "--data", str(tmp_path), "--json")
    assert outcome.code == 1 and "not written: skew_s" in outcome.err
    found = outcome.document
    assert found["steps"]["constants"] == fit_steps.START and found["written"] is False
    assert found["steps"]["problems"] == ["skew_s ends at its limit"]


# --- constants that mean something, intervals ------------------------------------------------------


@pytest.mark.parametrize("shift", [-0.2, 0.2])
def test_a_source_that_is_off_as_a_whole_moves_no_constant_that_others_know(shift: float) -> None:
    """Of four sources one is off; what the constant does within each source says that it is right."""
    slopes = np.tile(np.linspace(0.0, 1.0, 10), 4)[:, None]
    sources = np.repeat(np.eye(4), 10, axis=0)
    linear = LinearMisses(shift * sources[:, 0], slopes, np.ones(40), sources)
    alone = LinearMisses(linear.miss, slopes, linear.weights, np.zeros((40, 0)))
    for known in (linear, alone.where(sources[:, 0] == 1.0)):
        (step,) = minimise(known, np.zeros(1), -np.ones(1), np.ones(1))
        assert (abs(step) < 0.02) == (known is linear)


def test_a_constant_of_one_source_or_at_its_limit_is_refused() -> None:
    rows = [express(run) for run in read_runs(ITERATIONS)[0]]
    (one_source,) = fit_steps.unfounded(fit_steps.START, rows, HOST)
    assert "kernel_passes is determined by 1 source only (vTrain ground truth)" in one_source
    at_limit = fit_steps.START | {"software.megatron-2020.kernel_passes": 4.0}
    assert "kernel_passes ends at its limit" in " ".join(fit_steps.unfounded(at_limit, rows, HOST))


def test_every_constant_is_fitted_or_stated_or_tied() -> None:
    fitted, stated, tied = (set(table) for table in (fit_steps.LIMITS, fit_steps.STATED, fit_steps.TIED))
    assert not fitted & stated and not tied & (fitted | stated)
    assert {other for other, _ in fit_steps.TIED.values()} <= fitted | stated | tied
    assert all(source for _, source in fit_steps.STATED.values())


def test_a_source_left_out_does_not_fit_itself() -> None:
    """Runs of one source that take twice as long move what the others are predicted by, not their own."""
    old = [run for run in runs().values() if run.chip.startswith("a100")]
    rows = [express(run) for run in old]
    slow = [
        express(restated(run, step_time_s=(run.step_s or 1.0) * (1 + ("kort22" in run.id)))) for run in old
    ]
    before, after = (misses_by_others(known, fit_steps.catalog_constants()) for known in (rows, slow))
    for each in rows:
        if "kort22" in each.run.id:
            shift = after.by_source["step_s"][each.run.id] - before.by_source["step_s"][each.run.id]
            assert shift == pytest.approx(-math.log(2.0), rel=1e-9)


def test_what_was_never_measured_is_told_by_aspect() -> None:
    """A new generation is all new chips and types; what is known of a step may be new of its memory."""
    for cluster, plan, missing, of_memory in table("tables")["validate"]["never_measured"]:
        of = find_cluster(cluster), parse_plan(plan)
        assert [{*unmeasured(name, *of)} for name in ("step_s", "memory_bytes")] == [{*missing}, {*of_memory}]


def test_what_was_not_measured_widens_every_interval() -> None:
    """A network by the share of the step that waits for it; servers and post-training by their chips."""
    cluster = find_cluster("h100-80g-sxm:64")
    node, link = cluster.levels[:2]

    def between(kind: str) -> Interval:
        over = replace(cluster, levels=(node, replace(link, name=kind)))
        found = mw.estimate("llama3-8b", over, "zero=3", batch=64)
        return found.interval("step_s", found.step_s)

    assert "over" not in between("efa").reason and "over tcp-25g" in between("tcp-25g").reason
    assert between("tcp-25g").p90 / between("tcp-25g").p10 > between("efa").p90 / between("efa").p10
    near, far, new = map(find_chip, ("h100-80g-sxm", "h100-96g-sxm", "vr200"))
    ends = [rl_interval(1.0, "split", chip).p90 for chip in (near, far, new)]
    assert ends == sorted({*ends})
    of_server = partial(serving_interval, "tpot_s", 1.0, "room in the cache")
    ends = [of_server(near, "aiconfigurator").p90, *(of_server(chip).p90 for chip in (near, far, new))]
    assert ends == sorted({*ends}) and ends[0] < 1.3


def test_what_a_run_that_ran_must_have_had_is_told() -> None:
    """A cell that is filled in is never changed."""
    run = restated(runs()["kort22-22B-full"], recompute_modules=None)
    said = {
        kind: predict_run(restated(run, recompute_kind=kind))[0].approximations for kind in (None, "none")
    }
    assert any("priced with recompute=full" in one for one in said[None])
    assert not any("priced with" in one for one in said["none"])


def test_few_sources_say_little_about_the_next() -> None:
    rows = [express(run) for run in runs().values()]
    misses = dict.fromkeys((each.run.id for each in rows), 0.05)
    few, all_ = (spread(some, misses, "step_s", "under megatron") for some in (rows[:2], rows))
    assert few.num_sources < all_.num_sources and few.p90 > all_.p90 > math.exp(0.05)


@pytest.mark.parametrize("cluster, plan, why, of_memory", table("tables")["validate"]["interval_reasons"])
def test_an_estimate_says_between_what_and_why(cluster: str, plan: str, why: str, of_memory: str) -> None:
    of = find_model("llama3-8b"), find_cluster(cluster), parse_plan(plan)
    found = estimate(*of, Workload(batch=8192, seq=8192))
    between, known = found.step_s_interval, spreads().step_s
    measured = max(known[name].p90 for name in regimes("step_s", *of))
    assert between.reason.endswith(why)
    assert (between.p90 > 1.001 * measured * found.step_s) == why.startswith("wider")
    told = found.to_json(ledger=False)["memory_bytes_interval"]
    assert told["p10"] <= found.memory_bytes["total"] and of_memory in told["reason"]
    assert ("interval of memory, " in " ".join(found.notes())) == of_memory.startswith("wider")


def test_a_model_is_a_preset_or_a_path_and_a_system_any_chip(tmp_path: Path) -> None:
    """What a row does not say of its model is the preset's, or the config's."""
    config = DATA / "configs" / "qwen3-30b-a3b.json"
    names = ("Qwen/Qwen3-8B", "kimi-k2", str(config), "poetry-7b")
    runs, serving = tmp_path / "runs.csv", tmp_path / "serving.csv"
    runs.write_text(
        "id,source,year,model,layers,seq_len,gpus,chip,tp,pp,dp,micro_batch,global_batch,dtype,step_time_s\n"
        + "".join(f"{i},me,2026,{name},,4096,64,gb300,8,1,8,1,64,bf16,1\n" for i, name in enumerate(names))
    )
    points = {"gb300": "Qwen/Qwen3-8B", "mi355x": str(config), "h100_sxm": "poetry-7b", "pdp-11": "glm-5"}
    serving.write_text(
        "id,system,backend,model,mode,precision,input_tokens,output_tokens,concurrency,workers,tp,attention_dp,"
        "moe_tp,moe_ep,ttft_s,tpot_s\n"
        + "".join(f"{at},{at},vllm,{name},agg,fp8,512,64,4,1,8,1,1,8,1,1\n" for at, name in points.items())
    )
    rows = {row.id: row for row in validate([runs, serving]).rows}
    said = {name: row.reason for name, row in rows.items() if row.reason}
    assert {*rows} - {*said} == {"0", "1", "2", "gb300", "mi355x"}
    assert "no model is called 'poetry-7b'" in said["3"]
    assert "no model is called 'poetry-7b'" in said["h100_sxm"]
    assert "no chip is called" in said["pdp-11"]


def test_a_board_compares_each_release_on_the_rows_that_it_predicted(meshwise: Any, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    board, page = tmp_path / "board.csv", tmp_path / "page.html"
    words = ("validate", "--board", str(board), "--html", str(page), "--runs")
    meshwise(*words, str(RUNS), "--release", "1.0")
    new = board.read_text()
    old = [line.replace("1.0", "0.9", 1) for line in new.splitlines()[1:] if "mpt-072" not in line]
    board.write_text(new + "\n".join(old))
    found = meshwise(*words, str(RUNS), "--json").document
    num = found["summary"]["step_s"]["num_expressed"]
    known = [each for each in found["board"] if (each["quantity"], each["rows"]) == ("step_s", "all")]
    assert [(each["release"], each["now"]["num_expressed"]) for each in known] == [
        ("1.0", num),
        ("0.9", num - 1),
    ]
    assert all(abs(each["before"]["mean_abs_frac"] - each["now"]["mean_abs_frac"]) < 1e-3 for each in known)
    assert "mean then" in page.read_text() and "llm-foundry" in {each["rows"] for each in found["board"]}
    none = "the board holds no prediction of these rows"
    assert none in meshwise(*words, str(ITERATIONS)).out and none in page.read_text()
    meshwise(*words, str(RUNS), "--release", "2.0")
    assert list(read_board(board)) == ["1.0", "0.9", "2.0"]
    board.write_text("release,quantity,id,predicted\n1,step_s,a,fast\n")
    refused = meshwise(*words, str(RUNS))
    assert refused.code == 2 and "line 2" in refused.err


def test_the_constant_that_was_wrong_mends_within_its_limits() -> None:
    """Steps that take what a chip of 1.3 times, or of twice the energy per FLOP would."""
    known = [express(run) for run in runs().values() if run.chip == "h100-80g-sxm" and "fp8" not in run.dtype]
    name, constants = "power.hopper.bf16", fit_steps.catalog_constants()
    for factor, to in ((1.3, 1.3 * constants[name]), (2.0, fit_steps.LIMITS[name][2])):
        tables = fit_steps.as_tables(constants, {name: factor * constants[name]})
        slow = [
            replace(each, run=restated(each.run, step_time_s=estimate_run(each, tables).step_s))
            for each in known
        ]
        found = {each.constant: each for each in mends(slow)}
        assert found[name].to == pytest.approx(to, rel=0.03) and found[name].is_at_limit == (factor == 2.0)
        assert next(iter(found)) == name or factor == 2.0
        limits = [(each.to, *fit_steps.limits()[each.constant]) for each in found.values()]
        assert all(0.999 * least <= to <= 1.001 * most for to, least, most in limits)
