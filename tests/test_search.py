"""The search against pricing every plan of a small space one by one."""

import itertools

import pytest

from meshwise.core.errors import MeshwiseError
from meshwise.estimate.single import estimate
from meshwise.machine.hardware import find_cluster
from meshwise.model.find import find_model
from meshwise.plan.plan import parse_plan
from meshwise.plan.workload import Workload
from meshwise.search.search import search


def test_the_best_plan_is_the_best_of_all_priced_one_by_one() -> None:
    model, cluster = find_model("llama3-8b"), find_cluster("h100-80g-sxm:8")
    found = search(model, cluster, batch=16, seq=1024, schedules=("1f1b", "interleaved"))
    steps, feasible = [], 0
    for tp, pp, vpp, micro, recompute, zero in itertools.product(
        (1, 2, 4, 8),
        (1, 2, 4, 8),
        (1, 2, 4, 8, 16),
        (1, 2, 4, 8, 16),
        ("none", "selective", "full"),
        range(4),
    ):
        text = f"tp={tp},pp={pp},vpp={vpp},recompute={recompute},zero={zero}"
        try:
            of = estimate(model, cluster, parse_plan(text), Workload(batch=16, seq=1024, microbatch=micro))
        except MeshwiseError:
            continue
        if of.fits:
            feasible += 1
            steps.append(of.step_s)
    assert found.plans_feasible == feasible
    assert [of.step_s for of in found.best] == pytest.approx(sorted(steps)[:5], rel=1e-9)


def test_command(meshwise) -> None:
    arguments = ("search", "mixtral-8x7b", "--cluster", "h100-80g-sxm:64", "--batch", "256", "--seq", "4096")
    done = meshwise(*arguments, "--top", "3", "--json")
    assert done.code == 0
    document = done.document
    assert set(document) == {"plans_considered", "plans_feasible", "elapsed_s", "plans_per_s", "best"}
    assert 0 < document["plans_feasible"] <= document["plans_considered"]
    steps = [best["step_s"] for best in document["best"]]
    assert steps == sorted(steps)
    assert len(steps) == 3
    assert "mixtral" not in meshwise(*arguments).err


def test_nothing_fits_is_exit_1(meshwise) -> None:
    done = meshwise(
        "search", "gpt3-175b", "--cluster", "v100-16g-sxm:8", "--plan", "dtype=fp16", "--batch", "8"
    )
    assert done.code == 1
    assert "none fits" in done.out


def test_bad_input_is_exit_2(meshwise) -> None:
    base = ("search", "gpt3-175b", "--cluster", "a100-80g-sxm:8")
    assert meshwise(*base, "--batch", "0").code == 2
    assert meshwise(*base, "--batch", "8", "--schedules", "2f2b").code == 2
