"""The search against pricing every plan of a space one by one; what is stated is obeyed; the command."""

import itertools
import math
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import meshwise as mw
from data_tables import csv_rows, table
from meshwise.core.errors import MeshwiseError
from meshwise.estimate.adverse import together
from meshwise.estimate.grid import grids
from meshwise.estimate.one_plan import Estimate, estimate
from meshwise.launch.read import read_job
from meshwise.launch.runs import running, runs
from meshwise.launch.settings import SEARCHED, TRAINING
from meshwise.launch.write import launch
from meshwise.machine.hardware import Cluster, find_cluster
from meshwise.model.architecture import Model
from meshwise.model.find import find_model
from meshwise.plan.mesh import Mesh
from meshwise.plan.plan import Plan, plan_text
from meshwise.plan.workload import Workload
from meshwise.search.best_plans import FRONT_FRAC, BestPlans, distinct
from meshwise.search.search import Result, search
from meshwise.search.space import USUAL, free_values, is_switched, untried
from test_one_path import MODELS, VALUES

pytestmark = pytest.mark.slow

LLAMA_8, LLAMA_16 = ((find_model("llama3-8b"), find_cluster(f"h100-80g-sxm:{num}")) for num in (8, 16))
LLAMA = ("search", "llama3-8b", "--cluster", "h100-80g-sxm:16", "--batch", "32", "--seq", "4096")
SPACES: dict[str, tuple[str, str, dict[str, tuple[Any, ...]]]] = {
    name: (*of["job"], {key: tuple(one or None for one in values) for key, values in of["plan"].items()})
    for name, of in table("tables")["search"].items()
}


def priced_one_by_one(
    model: Model, cluster: Cluster, load: Workload, stated: dict[str, tuple[Any, ...]], to: str = ""
) -> Iterator[Estimate]:
    """All plans of a space that run; of those that a framework says whole with `to`."""
    space = free_values(model, cluster, load, stated, to)
    for values in itertools.product(*space.values()):
        plan = dict(zip(space, values, strict=True))
        microbatch = plan.pop("microbatch")
        try:
            of = estimate(model, cluster, Plan(**plan), replace(load, microbatch=microbatch))
            able = running(model, cluster.chip, load.seq)
            if np.any(untried(of.mesh, cluster.chip, stated)):
                continue
            if is_switched(of.plan, stated) and not np.all(runs(able, model, of.mesh)):
                continue
            if not to or not launch(model, cluster, of.plan, of.workload, to).not_expressed:
                yield of
        except MeshwiseError:
            continue


def priced_again(meshwise: Any, job: tuple[Any, ...], found: dict[str, Any]) -> dict[str, Any]:
    """What `estimate` says of a plan that was found."""
    words = ("--plan", found["plan_text"], "--microbatch", str(found["microbatch"]))
    return meshwise("estimate", *job, *words, "--json").document


def check_best(
    model_name: str, cluster_name: str, stated: dict[str, tuple[Any, ...]], batch: int, to: str = ""
) -> int:
    """Hold a search against pricing all its combinations one by one; how many families of plans fit.

    Keys that are not searched are those of a plan that states nothing. `to`: of plans that `launch` says
    whole.
    """
    model, cluster, load = find_model(model_name), find_cluster(cluster_name), {"batch": batch, "seq": 2048}
    found = search(model, cluster, **load, stated=stated, to=to, memory_frac=1.0, with_changes=False)
    families: dict[tuple[Any, ...], float] = {}
    plans: list[tuple[float, float]] = []
    for of in priced_one_by_one(model, cluster, Workload(**load), stated, to):
        if of.fits:
            family = tuple(getattr(of.mesh, axis) for axis in ("tp", "cp", "pp", "ep", "etp"))
            families[family] = min(families.get(family, math.inf), of.step_s)
            plans.append((of.step_s, of.memory_bytes["total"]))
    fastest = sorted(families.values())[:5]
    if found.stated.keys() > stated.keys():  # nothing fitted, so offloading was tried too
        assert not fastest
    else:
        assert [of.step_s for of in found.best] == pytest.approx(fastest, rel=1e-12)
    if fastest and len(found.pareto) < 30:
        assert found.pareto[0].step_s == pytest.approx(fastest[0], rel=1e-12)
        near = [memory for step_s, memory in plans if step_s <= FRONT_FRAC * fastest[0]]
        assert found.pareto[-1].memory_bytes == pytest.approx(min(near), rel=1e-12)
    for one, other in itertools.pairwise(found.pareto):
        assert one.step_s < other.step_s and one.memory_bytes > other.memory_bytes
    return len(families)


@pytest.mark.parametrize("name", SPACES)
def test_the_best_plan_is_the_best_of_all_priced_one_by_one(name: str) -> None:
    assert check_best(*SPACES[name], batch=16) > 1


@pytest.mark.parametrize("implementation", ["megatron", "fsdp2"])
@pytest.mark.parametrize(("model", "cluster", "keys"), table("tables")["searched"]["bounded"])
def test_no_plan_stays_below_the_bounds(model: str, cluster: str, keys: Any, implementation: str) -> None:
    """Every value of the usual keys and of a few more, some rows of each grid."""
    job, load = (find_model(model), find_cluster(cluster)), Workload(batch=128, seq=4096)
    stated = {"implementation": (implementation,), **dict.fromkeys(keys, ("*",))}
    draw, num_plans, least = np.random.default_rng(0), 0, list[Any]()

    def wants(mesh: Mesh, step_s: Any, least_bytes: Any, *, few: bool = False) -> Any:
        least.append((step_s, least_bytes))
        return np.ones(np.broadcast_shapes(np.shape(step_s), np.shape(least_bytes)), bool)

    for grid in grids(*job, load, free_values(*job, load, stated), distinct=True):
        rows = draw.choice(len(grid.rows[0]), min(len(grid.rows[0]), 30), replace=False)
        is_plan = ~np.broadcast_to(grid.mesh(rows)[1], (*grid.shape[:-1], len(rows)))
        for cells in grid.price(rows, wants):
            plans = distinct(cells)
            step_s, memory = cells.array(cells.step.step_s), cells.array(cells.step.memory_bytes)
            assert step_s.size == is_plan.sum()
            least_s = np.broadcast_to(grid.least_s[rows], is_plan.shape)[is_plan]
            assert np.all((step_s >= least_s * (1 - 1e-12))[plans])
            # How much stages recompute in all, or wait for the host link, does not depend on their ends.
            is_fixed = np.isinf(cells.mesh.recompute_layers) & (cells.mesh.offload_activations == 0)
            for bounds in least[:3]:  # by ops, the same of few, and by exchanges too; then of single ends
                for found, bound, holds in zip((step_s, memory), bounds, (is_fixed, True), strict=True):
                    is_priced = np.shape(bound) == step_s.shape
                    of = bound if is_priced else np.broadcast_to(bound, is_plan.shape)[is_plan]
                    assert np.all((found >= of * (1 - 1e-12))[plans & holds])
            least.clear()
            num_plans += int(plans.sum())
    assert num_plans > 300


@pytest.mark.parametrize(("implementation", "num_other"), [("megatron", 1), ("fsdp2", 2)])
def test_a_plan_is_the_same_whichever_plans_are_looked_at(implementation: str, num_other: int) -> None:
    """One copy of the model has no use for ZeRO, so of its stages the first is the plan, wanted or not; FSDP2
    lets go of the weights that it has cast."""
    space = {"pp": (4, 8), "zero": (1, 3), "implementation": (implementation,), "microbatch": (1,)}
    (grid,) = grids(*LLAMA_8, Workload(batch=16, seq=2048), space, distinct=True)
    for zero, num_plans in ((1.0, 2), (3.0, num_other)):
        (cells,) = grid.price(wants=lambda mesh, *_, zero=zero, **how: np.asarray(mesh.zero == zero))
        assert cells.shape == (2,) and distinct(cells).sum() == num_plans


FEW: dict[str, tuple[Any, ...]] = dict.fromkeys(("tp", "cp", "pp", "vpp"), (1, 2))
FEW |= {"recompute": ("none",), "recompute_layers": (None,), "microbatch": (1,)}


@pytest.mark.parametrize("to", TRAINING)
def test_a_framework_is_searched_for_what_it_says_whole(to: str, tmp_path: Path) -> None:
    """What it cannot say does not hide what it can; its settings lose nothing and are read back."""
    stated = FEW | ({"implementation": ("megatron", "fsdp2")} if to == "torchtitan" else {})
    assert check_best("llama3-8b", "h100-80g-sxm:8", stated, batch=16, to=to) >= 1
    found = search(*LLAMA_8, batch=16, seq=2048, stated=FEW, to=to)
    assert all(to in of.runs_in for of in found.bases)
    for one in found.best:
        *_, script = launch(*LLAMA_8, one.plan, one.workload, to).write(tmp_path)
        job = read_job(script, 8)
        again = estimate(*LLAMA_8, job.plan, replace(one.workload, microbatch=job.microbatch))
        assert (again.step_s, again.memory_bytes) == (one.step_s, one.memory_bytes)


@pytest.mark.parametrize("to", SEARCHED)
def test_one_card_is_searched_for_every_framework(to: str) -> None:
    """Keys that change nothing there are asked of none, and what is found is what is written."""
    job, work = ("qwen3-0.6b", "rtx-4090:1"), {"batch": 4, "seq": 2048, "to": to}
    best = mw.search(*job, **work).best[0]
    written = mw.launch(*job, best.plan, microbatch=best.workload.microbatch, **work)
    assert not written.not_expressed and written.runs_as_priced
    with pytest.raises(mw.MeshwiseError, match=f"{to} has no layout=2d; it has 1d"):
        mw.search(*job, "layout=2d", **work)


def test_the_fastest_that_a_framework_runs_stands_beside_the_fastest() -> None:
    work = {"batch": 16, "seq": 2048, "stated": SPACES["schedules"][2] | {"pp": (4, 8)}}
    anywhere, runnable = search(*LLAMA_16, **work), search(*LLAMA_16, **work, to="megatron-lm")
    assert anywhere.runnable is not None and not anywhere.bases[0].runs_in
    assert anywhere.runnable[0].step_s == runnable.best[0].step_s > anywhere.best[0].step_s
    assert anywhere.runnable[1].runs_in == runnable.bases[0].runs_in


def test_what_a_framework_hides_is_tried_as_it_runs_it() -> None:
    """One exchange at a time is hidden, in plans that a framework runs, with `to` or without."""
    job, work = (find_model("qwen3-30b-a3b"), find_cluster("b200-sxm:16")), {"batch": 256, "seq": 4096}
    few: dict[str, Any] = {"microbatch": (4,), "cp": (1,), "recompute": ("none", "full")}
    hidden, megatron = search(*job, **work, stated=few), search(*job, **work, stated=few, to="megatron-lm")
    exposed = search(*job, **work, stated=few | {"overlap_ep": (None,)})
    assert hidden.best[0].plan.overlap_ep and "megatron-lm" in hidden.bases[0].runs_in
    assert hidden.best[0].plan == megatron.best[0].plan
    assert hidden.best[0].step_s < exposed.best[0].step_s
    for plan in (found.plan for found in (*hidden.best, *hidden.pareto) if found.plan.overlap_ep):
        assert plan.is_paired or not (plan.overlap_tp or plan.recompute == "full")


def test_a_chip_with_software_of_its_own_has_its_schedules() -> None:
    """MaxText's pipeline is GPipe, Trainium's library has 1F1B; what is stated is obeyed."""
    job, work = find_model("qwen3-30b-a3b"), {"batch": 64, "seq": 4096}
    for chip, schedules in {"tpu-v5p": {"gpipe"}, "trainium2": {"1f1b", "interleaved"}}.items():
        on = find_cluster(f"{chip}:64")
        found = search(job, on, **work, stated={"pp": (2, 4), "microbatch": (1,), "cp": (1,)})
        assert {one.plan.schedule for one in found.best} <= schedules
        of = search(job, on, **work, stated={"pp": (4,), "schedule": ("zb-h1",), "microbatch": (1,)})
        assert of.best[0].plan.schedule == "zb-h1" and not of.best[0].plan.overlap_ep


def test_where_little_fits_it_is_told_what_offloading_gives(meshwise) -> None:
    job = ("nemotron-3-nano", "--cluster", "h100:8", "--batch", 64, "--seq", 4096)
    found = meshwise("search", *job, "--json").document
    spared, best_s = found["offloaded"], found["best"][0]["step_s"]
    again = priced_again(meshwise, job, spared)
    assert again["step_s"] == spared["step_s"] < 0.9 * best_s and again["fits"]
    assert "offload_optimizer=1" in spared["plan_text"]
    assert meshwise("search", "llama3-8b", *job[1:], "--json").document["offloaded"] is None


def test_a_plan_that_a_framework_runs_is_named_first_where_it_is_as_fast(meshwise) -> None:
    """What zb-v gains here is less than half a percent, no framework runs it, and it is no simpler."""
    job = ("llama3-70b", "--cluster", "b200-sxm:576", "--batch", 1152, "--seq", 8192)
    first, second, rest = meshwise("search", *job, "--plan", "recompute=none,overlap_tp=0").out.split(
        "leans on"
    )
    assert "\nfastest that a framework runs: " in first and "; runs in megatron-lm" in first
    assert "\nfastest, by 0." in second and "; no framework runs it" in second and "simplest" not in rest


def test_robust_plans_are_ranked_by_their_step_under_all_adversities() -> None:
    """The first is the best of all priced one by one; hidden and exposed time are that without overlap."""
    work = Workload(batch=32, seq=2048)
    stated = FEW | {"zero": (1, 3), "schedule": ("1f1b",)}
    found = search(*LLAMA_16, batch=32, seq=2048, stated=stated, robust=True)
    priced = [
        together(*LLAMA_16, one.plan).step_s(one)
        for one in priced_one_by_one(*LLAMA_16, work, stated)
        if one.memory_bytes["total"] <= found.capacity_bytes
    ]
    assert found.bases[0].robust_s == pytest.approx(min(priced), rel=1e-12)
    exposed = estimate(*LLAMA_16, Plan(zero=3, overlap_dp=False), work).time_s["comm_dp"]
    beside = estimate(*LLAMA_16, Plan(zero=3), work)
    assert beside.time_s["comm_dp"] + beside.hidden_s["comm_dp"] == pytest.approx(exposed, rel=1e-9)


def test_robust_plans_fit_as_they_are_too() -> None:
    """Layers are placed before experts are out of balance, so the plan is the one that `estimate` prices."""
    job = {"batch": 2048, "seq": 4096, "stated": {"dtype": ("fp8",), "tp": (1,), "cp": (1,)}, "robust": True}
    found = search(find_model("deepseek-v3"), find_cluster("b200-sxm:1024"), **job)
    assert max(one.memory_bytes["total"] for one in found.best) <= found.capacity_bytes
    assert [one.robust_s for one in found.bases] == sorted(one.robust_s for one in found.bases)


@pytest.mark.parametrize(("model", "cluster", "seq", "keys", "found"), table("tables")["in_sight"])
def test_nothing_is_out_of_sight(model: str, cluster: str, seq: int, keys: Any, found: Any) -> None:
    stated = {"zero": (1, 2), "recompute": ("none", "full"), "schedule": ("1f1b", "interleaved")} | keys
    job = {"batch": 2048 if seq < 2**20 else 16, "seq": seq, "stated": stated}
    seen = search(find_model(model), find_cluster(cluster), **job)
    assert any(all(getattr(one.plan, key) == found[key] for key in found) for one in seen.best)
    assert "tp" in stated or all(one.plan.tp > 1 for one in seen.best)
    assert seen.not_tried["microbatch"] == max(2**16 // seq, 1)
    assert not search(find_model(model), find_cluster(cluster), capped=False, **job, top=1).not_tried


def test_the_simplest_plan_is_as_fast_as_the_interval_tells(meshwise) -> None:
    for step, *words in (("step_s", *ARGUMENTS, "--top", 1), ("robust_s", *LLAMA, "--robust")):
        document = meshwise(*words, "--json").document
        best, simple = document["best"][0], document["simplest"]
        wrong_frac = best["step_s_interval"]["p90"] / best["step_s"] - 1
        differ_s = sum(abs(best["time_s"][name] - simple["time_s"][name]) for name in best["time_s"])
        assert simple[step] - best[step] <= max(wrong_frac * differ_s, 0.005 * best["step_s"])
        assert all("leans_on" in one and one["robust_s"] > one["step_s"] for one in (best, simple))


def test_a_job_stays_in_its_framework_and_in_its_types(meshwise, tmp_path) -> None:
    plan, words = Plan(tp=2, pp=2, dtype="fp8", grad_dtype="bf16"), ("--cluster", "h100-80g-sxm:16")
    launch(*LLAMA_16, plan, Workload(batch=32, seq=2048), "megatron-lm").write(tmp_path)
    for more, to in ((), "megatron-lm"), (("--to", "any"), None), (("--plan", "dtype=bf16"), "megatron-lm"):
        found = meshwise("search", "--from", str(tmp_path / "job.sbatch"), *words, *more, "--json").document
        kept = {one["plan"]["dtype"] for one in found["best"]}
        assert (found["to"], kept) == (to, {"bf16" if "--plan" in more else "fp8"})
        assert {one["plan"]["grad_dtype"] for one in found["best"]} == {"bf16"}


MOST_PLANS = int(os.environ.get("MESHWISE_SEARCH_PLANS", "200"))
"""Combinations of a random space: 20,000 takes half a minute for each of the examples below."""


@settings(max_examples=12 if MOST_PLANS < 1000 else 8, deadline=None)
@given(st.data(), st.sampled_from(MODELS), st.sampled_from(("h100-80g-sxm:16", "h200-sxm:64")))
def test_random_spaces_of_all_keys(data: st.DataObject, model: str, cluster: str) -> None:
    stated: dict[str, tuple[Any, ...]] = {}
    num_plans = 1
    for key in data.draw(st.permutations(sorted(VALUES)), label="order"):
        values = VALUES[key] if num_plans * len(VALUES[key]) <= MOST_PLANS else VALUES[key][:1]
        num_plans *= len(values)
        if len(values) > 1 or key in USUAL:
            stated[key] = values
    check_best(model, cluster, stated, batch=64)


def test_repeats_are_not_counted() -> None:
    """Two searches whose spaces are the same plans in other words count as many."""
    few: Any = dict.fromkeys(("vpp", "zero", "cp", "microbatch"), (1,))
    few |= {"tp": (2,), "pp": (1, 2), "schedule": ("1f1b",), "recompute": ("none",), "overlap_tp": (False,)}
    many = few | {"sp": (None, True), "cp_kind": ("ring", "ulysses"), "placement": ("*",), "etp": (None,)}
    one, other = (search(*LLAMA_16, batch=16, seq=2048, stated=stated) for stated in (few, many))
    assert one.plans_considered == 2
    # tp, dp and pp lie on the links in 3! orders with a pipeline, tp and dp in two without.
    assert other.plans_considered == 6 + 2
    stages: Any = {"pp": (8,), "recompute": ("full",)}  # of 3 to 5 layers
    kinds = [stages | {"recompute_layers": some} for some in ((None,), (4,), (9,), (9, 12, 4))]
    first, *others = (search(*LLAMA_8, batch=7, seq=4096, stated=kind) for kind in kinds)
    assert all(0 < other.plans_priced <= other.plans_considered == first.plans_considered for other in others)


def test_of_equal_plans_the_one_with_fewest_keys_is_kept() -> None:
    """Without replicas no ZeRO stage matters, nor do overlaps that have nothing to hide."""
    alike = {"zero": (0, 3, 1), "overlap_dp": (False, True), "overlap_tp": (True, False), "sp": (False, None)}
    alike |= {"pp": (8,), "vpp": (1,), "schedule": ("1f1b",)}
    assert plan_text(search(*LLAMA_8, batch=8, seq=2048, stated=alike).best[0].plan) == "pp=8"


def test_modules_that_are_stated_are_recomputed() -> None:
    """Other recomputation is not tried beside them, and what plans without them recompute counts once."""
    fixed = dict.fromkeys(("tp", "cp", "pp", "vpp", "microbatch"), (1,)) | {"recompute_layers": (None,)}

    def found(**stated: tuple[Any, ...]) -> Result:
        return search(*LLAMA_16, batch=16, seq=2048, stated=fixed | stated)

    assert {one.plan.recompute for one in found(recompute_modules=(("core_attn",),)).best} == {"selective"}
    refused = found(recompute_modules=(("core_attn",),), recompute=("full",))
    assert not refused.plans_considered and "needs recompute=selective" in refused.reason
    one, both = found(), found(recompute_modules=((), ("core_attn",)))
    assert one.plans_considered == both.plans_considered


def test_a_key_is_left_free_and_a_file_says_the_same(meshwise, tmp_path) -> None:
    file = tmp_path / "space.toml"
    file.write_text('tp = [2, 4]\nzero = 1\nlayout = "*"\ngrid = "*"\nvpp = 1\nrecompute = "none"\n')
    by_file = meshwise(*LLAMA, "--plan", str(file), "--json").document
    text = "tp=2|4,zero=1,layout=*,grid=*,vpp=1,recompute=none"
    by_text = meshwise(*LLAMA, "--plan", text, "--json").document
    assert by_file["best"] == by_text["best"]
    one_dim = meshwise(*LLAMA, "--plan", text.replace("layout=*,grid=*,", ""), "--json").document
    assert by_text["plans_considered"] > one_dim["plans_considered"] > 0


def test_what_would_fit_where_nothing_does(meshwise) -> None:
    arguments = ("search", "gpt3-175b", "--cluster", "a100-80g-sxm:16", "--batch", "64", "--seq", "2048")
    nothing = meshwise(*arguments, "--plan", "tp=8,zero=0,offload_optimizer=0,vpp=1", "--json")
    changes = nothing.document["nearest_miss"]["changes"] if nothing.code == 1 else []
    assert {change["key"] for change in changes} & {"offload_optimizer", "zero", None}
    for change in changes:
        cluster = ("--cluster", f"a100-80g-sxm:{change['num_chips']}")
        again = priced_again(meshwise, ("gpt3-175b", *cluster, "--batch", "64", "--seq", "2048"), change)
        assert again["memory_bytes"]["total"] <= nothing.document["capacity_bytes"]
        assert again["step_s"] == change["step_s"]


ARGUMENTS = ("search", "mixtral-8x7b", "--cluster", "h100-80g-sxm:64", "--batch", "256", "--seq", "4096")


def test_a_found_plan_goes_into_estimate_as_it_is(meshwise) -> None:
    done = meshwise(*ARGUMENTS, "--top", "3", "--json")
    document = done.document
    assert done.code == 0 and document["plans_per_s"] > 0 and "mixtral" not in done.err
    assert 0 < document["plans_feasible"] <= document["plans_priced"] < document["plans_considered"]
    steps = [best["step_s"] for best in document["best"]]
    assert steps == sorted(steps) and len(steps) == 3
    for best in document["best"]:
        again = priced_again(meshwise, ARGUMENTS[1:], best)
        for key in ("step_s", "mfu", "memory_bytes"):
            assert again[key] == best[key]


@pytest.mark.parametrize("text", table("tables")["obeyed"])
def test_what_is_stated_is_obeyed(meshwise, text: str) -> None:
    document = meshwise(*ARGUMENTS, "--plan", text, "--json").document
    assert document["best"]
    for best in document["best"]:
        for item in text.split(","):
            key, _, values = item.partition("=")
            of = best["plan"][key]
            shown = "-".join(of) if isinstance(of, list) else str(int(of) if of is True else of)
            assert shown.removesuffix(".0") in values.split("|"), best["plan_text"]


@pytest.mark.parametrize(("few", "text"), table("tables")["searched"]["beside"])
def test_key_by_key_a_plan_becomes_the_best(meshwise, few: str, text: str) -> None:
    """Keys that follow from others (vpp=2 from zb-v) are not told as changes of their own."""
    asked = (*ARGUMENTS, "--plan", few, "--beside", text)
    document = meshwise(*asked, "--json").document
    first, beside = document["best"][0], document["beside"]
    assert beside["plan_text"] == text and first["step_s"] <= beside["step_s"]
    assert sum(beside["time_s"].values()) == pytest.approx(beside["step_s"], rel=1e-12)
    gains = [one["gain_s"] for one in beside["reasons"]]
    assert sum(gains) == pytest.approx(beside["step_s"] - first["step_s"])
    assert beside["reasons"][-1]["step_s"] == first["step_s"]
    changes = ", ".join(one["change"] for one in beside["reasons"])
    assert "recompute full to none" in changes or "schedule zb-v to 1f1b" in changes
    assert all(before != after for before, after in re.findall(r"(\S+) to ([^\s,]+)", changes))
    for one in beside["reasons"]:
        assert sum(one["more_s"].values()) == pytest.approx(-one["gain_s"], rel=1e-6, abs=1e-9)
    assert "the best plan beside the one asked for" in meshwise(*asked).out


def test_machines_are_compared_by_whole_runs(meshwise, tmp_path) -> None:
    """With failures, of which some never end; a file's network stays."""
    (tmp_path / "tcp.toml").write_text(table("tables")["searched"]["over_tcp"])
    job = ("search", "llama3-8b", "--cluster", tmp_path / "tcp.toml", "--batch", "64", "--seq", "8192")
    job += ("--plan", "tp=1,pp=2,cp=1,schedule=zb-v|1f1b", "--json")
    few = ("--vary", "chip=h100|gb200,batch=64|256", "--tokens", "1e11", "--price", "h100-80g-sxm=1,gb200=9")
    points, notes, fronts = map(meshwise(*job, *few).document.get, ("points", "notes", "fronts"))
    assert notes[-1] == "links: h100-80g-sxm on nvlink4, tcp; gb200 on nvlink5, tcp"
    assert len(notes) == 2 + sum(not one["runs_in"] for one in points) > 2
    alone = meshwise(*job).document
    assert (alone["best"][0]["step_s"], []) == (points[0]["step_s"], points[0]["runs_in"])
    assert alone["runnable"]["slower_frac"] == points[0]["slower_frac"] > 0
    endless, fronts_of = map(meshwise(*job, *few, "--mtbf", 1e-3).document.get, ("points", "fronts"))
    assert all("never ends" in one["reason"] for one in endless) and not any(fronts_of.values())
    runs = [[one["with_failures"][name] for name in ("run_s", "gpu_hours")] for one in points]
    beaten = [any(a <= run[0] and b <= run[1] and [a, b] != run for a, b in runs) for run in runs]
    assert [i not in fronts["gpu_s_per_token"] for i in range(len(runs))] == beaten


def test_nothing_fits_is_exit_1(meshwise) -> None:
    plan = ("--plan", "dtype=fp16,zero=3,recompute=full,vpp=1,cp=1,schedule=1f1b", "--batch", "8")
    arguments = ("search", "gpt3-175b", "--cluster", "v100-16g-sxm:8", *plan)
    done = meshwise(*arguments)
    assert done.code == 1 and "none fits" in done.out
    miss = meshwise(*arguments, "--json").document["nearest_miss"]
    assert miss["short_bytes"] == pytest.approx(miss["memory_bytes"] - 0.92 * 16.94e9)
    again = priced_again(meshwise, (*arguments[1:4], "--batch", "8"), miss)
    assert again["memory_bytes"]["total"] == pytest.approx(miss["memory_bytes"], rel=1e-12)
    long = ("llama3-8b", "--cluster", "h100-80g-sxm:8", "--batch", 8, "--seq", 2**20, "--plan", "cp=8,pp=1")
    assert "fits with another loss_chunks: cp=8," in meshwise("search", *long).out
    small = ("llama3-70b", "--cluster", "a100-40g-sxm:8", "--batch", "8", "--seq", "8192")
    assert meshwise("search", *small, "--to", "megatron-lm").code == 1  # which has no adam-bf16 to propose
    for words, why in table("tables")["searched"]["no_plan"]:
        done = meshwise("search", *words.split())
        assert done.code == 1 and f"no plan: {why}" in done.out
        study = meshwise("search", *words.split(), "--vary", "outer=1", "--json").document
        assert why in study["points"][0]["reason"]


def test_a_study_is_its_searches_and_weak_scaling_grows_the_batch(meshwise, tmp_path) -> None:
    few = ("--plan", "tp=2|4,schedule=1f1b,vpp=1")
    study = meshwise(*LLAMA, *few, "--vary", "gpus=8|32,memory=1|0.5", "--price", 2, "--json").document
    assert [(one["gpus"], one["memory"]) for one in study["points"]] == [(8, 1), (8, 0.5), (32, 1), (32, 0.5)]
    for one in study["points"]:
        cluster = ("--cluster", f"h100-80g-sxm:{one['gpus']}", "--memory-frac", str(0.92 * one["memory"]))
        alone = meshwise(*LLAMA[:2], *cluster, *LLAMA[4:], *few, "--json").document["best"][0]
        assert (alone["plan_text"], alone["step_s"]) == (one["plan_text"], one["step_s"])
    for measure, front in study["fronts"].items():
        for one in study["points"]:
            kept = (study["points"][i] for i in front)
            assert any(all(of[name] <= one[name] for name in ("s_per_token", measure)) for of in kept)
    weak = meshwise(*LLAMA, *few, "--vary", "gpus=8|16|64", "--weak", "--json").document["points"]
    assert [one["batch"] for one in weak] == [16, 32, 128]
    wide = (*LLAMA[:4], "--batch", 256, "--seq", 8192, "--vary", "gpus=32768|32768", "--json", "--html")
    usual, free = (meshwise(*wide, tmp_path / "a.html", *how).document for how in ((), ("--no-capped",)))
    assert usual["points"] == free["points"] and "cp=32" in usual["points"][0]["plan_text"]  # 8 is usual
    assert len(free["points"]) == 1 and "larger vpp, microbatch (--no-capped" in usual["notes"].pop()
    assert usual["notes"] == free["notes"] and (tmp_path / "a.html").stat().st_size > 10_000


def test_energy_and_cost_are_unknown_where_watts_and_prices_are(meshwise) -> None:
    job = ("search", "llama3-8b", "--cluster", "tpu-v7:64", "--batch", 64, "--plan", "pp=1,tp=1", "--vary")
    (point,), fronts = map(meshwise(*job, "gpus=64", "--json").document.get, ("points", "fronts"))
    assert "joules_per_token" not in point and not fronts["joules_per_token"] + fronts["usd_per_token"]
    chips = (*job, "chip=h100-80g-sxm|tpu-v7", "--tokens", 1e9)
    assert meshwise(*chips).out.count("unknown") == 2
    points = meshwise(*chips, "--price", "h100-80g-sxm=2,tpu-v7=9", "--json").document["points"]
    assert [one["cost"] / one["gpu_hours"] for one in points] == pytest.approx([2, 9])
    assert "unknown" not in meshwise(*job, "gpus=64", "--watts", 900, "--tokens", 1e9).out


def test_files_hold_what_was_found(meshwise, tmp_path) -> None:
    files = ("--csv", str(tmp_path / "a.csv"), "--plot", str(tmp_path / "a.png"))
    run = ("--tokens", "1e12", "--price", "2", "--watts", "500")
    document = meshwise(*LLAMA, *files, *run, "--json").document
    rows = csv_rows(tmp_path / "a.csv")
    steps = [float(row["step_s"]) for row in rows if row["kind"] == "best"]
    assert steps == [best["step_s"] for best in document["best"]]
    best = document["best"][0]
    assert best["cost"] == pytest.approx(2 * best["gpu_hours"])
    assert float(rows[0]["with_failures_cost"]) == best["with_failures"]["cost"] > float(rows[0]["cost"])
    assert best["energy_joules"] == pytest.approx(500 * 3600 * best["gpu_hours"])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_ctrl_c_on_the_command_line_prints_what_is_known(meshwise, monkeypatch) -> None:
    add = BestPlans.add

    def stop(kept: BestPlans, cells: Any) -> None:
        add(kept, cells)
        if kept.feasible:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(BestPlans, "add", stop)
    done = meshwise(*ARGUMENTS, "--json")
    assert (done.code, done.err) == (130, "meshwise: stopped; these are the best of what was priced\n")
    assert done.document["best"] and done.document["complete"] is False


@pytest.mark.parametrize(
    ("model", "says"),
    [("flux.1-dev", "runs flux.1-dev on h100"), ("gemma-3-27b", "has: deepspeed, accelerate")],
)
def test_frameworks_that_know_a_model_are_named_where_none_runs_a_plan(
    meshwise: Any, model: str, says: str
) -> None:
    plan = "tp=4|8,software=megatron-2024"
    assert (
        says in meshwise("search", model, "--cluster", "h100-80g-sxm:8", "--batch", "8", "--plan", plan).out
    )
