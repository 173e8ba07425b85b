"""`meshwise estimate` from outside: its contract, its errors, and what survives fuzzing."""

import re
from pathlib import Path
from typing import Any

import pytest

import meshwise as mw
from data_tables import table
from meshwise.core.ledger import COLUMNS
from meshwise.core.units import duration, quantity
from meshwise.machine.hardware import find_chip, find_cluster
from meshwise.search.search import MEMORY_FRAC

BASE = ("estimate", "gpt3-175b", "--cluster", "a100-80g-sxm:64", "--plan", "tp=8,pp=8", "--batch", "64")
KEYS = {
    *("model", "cluster", "plan", "workload", "step_s", "tokens_per_s", "tokens_per_s_per_gpu"),
    *("flop_per_step", "mfu", "hfu", "memory_bytes", "fits", "time_s", "ledger", "notes"),
}


def test_json_is_one_document_with_the_contracts_keys(meshwise) -> None:
    done = meshwise(*BASE, "--json")
    assert (done.code, done.err) == (0, "")
    document = done.document
    assert set(document) >= KEYS
    assert set(document["memory_bytes"]) >= {"weights", "gradients", "optimizer", "activations", "total"}
    assert set(document["time_s"]) >= {"compute", "memory", "comm_tp", "comm_dp", "comm_pp", "bubble"}
    assert set(document["ledger"][0]) == set(COLUMNS)
    assert sum(document["time_s"].values()) == pytest.approx(document["step_s"])


def test_per_layer_is_one_layer_of_each_kind_once(meshwise) -> None:
    shown = meshwise("estimate", "gemma-3-27b", *BASE[2:], "--per-layer").out
    assert "one layer_window1024, 52 of 62, window 1024," in shown and "one layer, 10 of 62," in shown
    rows = meshwise(*BASE, "--per-layer", "--json").document["ledger"]
    assert {row["module"] for row in rows} == {"layer.attention", "layer.mlp"}
    assert all(row["count"] == 1 for row in rows if not row["collective"])


def test_failures_lengthen_a_run_and_a_better_machine_shortens_it(meshwise) -> None:
    def run(*words: str, keys: str = "") -> dict:
        base = (word + keys * (word == "tp=8,pp=8") for word in BASE)
        return meshwise(*base, "--tokens", "1T", "--price", "2", "--json", *words).document["run"]

    usual = run()
    failing = usual["with_failures"]
    assert usual["tokens"] == 1e12 and 0 < failing["goodput_frac"] < 1
    assert failing["run_s"] == pytest.approx(usual["run_s"] / failing["goodput_frac"])
    assert failing["cost"] == pytest.approx(2 * failing["gpu_hours"])
    assert failing["num_failures"] == pytest.approx(failing["gpu_hours"] / 50.7e3, rel=1e-3)
    for words in (("--mtbf", "1e6"), ("--storage", "1TB"), ("--restart", "0")):
        assert run(*words)["with_failures"]["goodput_frac"] > failing["goodput_frac"]
    assert run("--storage", "1TB")["with_failures"]["checkpoint_s"] < failing["checkpoint_s"]
    per_param = {",optimizer=muon": 10, ",implementation=fsdp2,zero=3": 12, ",optimizer=sgd": 6}
    held = {keys: run(keys=keys)["with_failures"]["checkpoint_bytes"] for keys in per_param}
    assert {keys: round(14 * held[keys] / failing["checkpoint_bytes"]) for keys in held} == per_param


@pytest.mark.parametrize(
    ("text", "value"), [("15T", 15e12), ("1e9", 1e9), ("64MiB", 2**26), ("2 GB", 2e9), ("1,000", 1000.0)]
)
def test_quantities_as_people_write_them(text: str, value: float) -> None:
    assert quantity(text, "--size") == value == quantity(text, "--tokens")
    assert quantity("1.5B", "--tokens") == 1.5e9


@pytest.mark.parametrize("text", ["", "x", "-1", "0", "nan", "1e400", "1.2.3", "5Q", "15B"])
def test_what_is_no_quantity_is_one_sentence(text: str) -> None:
    with pytest.raises(mw.MeshwiseError, match="must be a number above zero"):
        quantity(text, "--size")


def test_out_of_memory_is_exit_0_and_says_what_is_short(meshwise) -> None:
    done = meshwise("estimate", "gpt3-175b", "--cluster", "a100-80g-sxm:8", "--plan", "tp=8", "--json")
    assert done.code == 0
    assert done.document["fits"] is False
    assert any("GB short" in note for note in done.document["notes"])


def test_plan_and_cluster_from_files(meshwise, tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text('tp = 8\npp = 8\nrecompute = "full"\n')
    cluster = tmp_path / "mine.toml"
    cluster.write_text(
        'num_chips = 64\nchip = "a100-80g-sxm"\n'
        '[[levels]]\nname = "nvlink"\nranks = 8\nbytes_per_s = 300e9\nlatency_s = 1e-6\n'
        '[[levels]]\nname = "ib"\nbytes_per_s = 25e9\nlatency_s = 5e-6\n'
    )
    done = meshwise("estimate", "gpt3-175b", "--cluster", str(cluster), "--plan", str(plan), "--json")
    assert done.code == 0
    assert done.document["plan"]["recompute"] == "full"


def test_power_lies_between_waiting_and_the_limit_and_a_building_multiplies_it(meshwise) -> None:
    busy = meshwise(*BASE, "--tokens", "1e9", "--pue", "1.5", "--carbon", "400", "--json").document
    assert meshwise(*BASE, "--tokens", "1e9", "--carbon", "0", "--json").document["run"]["co2_kg"] == 0.0
    assert re.search(r"CO2 +\d.* kg \(", meshwise(*BASE, "--tokens", "9M", "--carbon", "400").out)
    chip, node = busy["power_watts"]["chip"], busy["power_watts"]["node"]
    limit = find_chip("a100-80g-sxm").power_watts
    assert 0.3 * limit < chip <= limit < node * 1.5
    run = busy["run"]
    assert run["run_s"] == pytest.approx(1e9 / busy["tokens_per_s"])
    assert run["gpu_hours"] == pytest.approx(run["run_s"] * 64 / 3600)
    assert run["watts_per_gpu"] == pytest.approx(1.5 * node)
    assert run["energy_joules"] == pytest.approx(run["run_s"] * 64 * 1.5 * node)
    assert run["co2_kg"] == pytest.approx(run["energy_joules"] / 3.6e6 * 0.4)
    failing = run["with_failures"]
    assert failing["co2_kg"] / run["co2_kg"] == pytest.approx(failing["run_s"] / run["run_s"])


@pytest.mark.parametrize(("job", "said"), table("tables")["cli"]["next"])
def test_what_to_try_next_is_priced_as_it_is_said(meshwise: Any, job: str, said: str) -> None:
    """A change that is offered fits, and takes as long as `estimate` with it says."""
    text = " ".join(meshwise("estimate", *job.split()).out.split())
    line = text[text.index(" next ") : text.index(" Time of a step")]
    words = job.split()
    now = meshwise("estimate", *words, "--json").document
    if said.startswith("no "):  # overlap_ep excludes recompute=full
        assert said in line and ("frozen_dtype" in line) == ("lora_rank" in job)
        return
    plan = words[words.index("--plan") + 1] if "--plan" in words else ""
    changed = re.search(r"next (?:\S+ takes \d+%; )?([^-]\S+)?(.*?) (?:takes|fits)", line)
    if said == "further away":
        found = re.search(r"--plan (.*?) --microbatch (\d+) fits", line)
        assert found is not None
        changes = ["--plan", found[1].replace(" ", ""), "--microbatch", found[2]]
    else:
        assert changed is not None
        typed = changed[2].replace("with ", "").split()
        changes = ["--plan", ",".join(filter(None, (plan, changed[1]))), *typed]
    rest = [word for i, word in enumerate(words) if "--plan" not in (word, words[i - 1])]
    then = meshwise("estimate", *rest, *changes, "--json").document
    assert then["fits"] and (not now["fits"] or then["step_s"] < now["step_s"])
    room = MEMORY_FRAC * find_cluster(words[words.index("--cluster") + 1]).chip.memory_bytes
    assert then["memory_bytes"]["total"] <= room and ("=" not in said or said in line)
    assert duration(then["step_s"]) in line
