"""Layers are placed so that the slowest stage is as fast as any placement makes it."""

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshwise as mw
from meshwise.cost.schedule import SCHEDULES
from meshwise.estimate.step import play
from meshwise.plan.stages import layers_of_chunks
from meshwise.search.machines import changed

SMALL = ("llama3-8b", "gpt3-175b", "qwen3-0.6b", "llama3-70b")


def priced(model: str | mw.Model, pp: int, plan: str, cluster: str = "h100-80g-sxm") -> mw.Estimate:
    return mw.estimate(model, f"{cluster}:{pp}", f"pp={pp},{plan}", batch=32, seq=1024)


@settings(max_examples=40)
@given(
    st.sampled_from(SMALL), st.integers(4, 11), st.integers(2, 4), st.sampled_from(["1f1b", "zb-h1", "gpipe"])
)
def test_no_placement_has_a_faster_slowest_stage(name: str, layers: int, pp: int, schedule: str) -> None:
    model = replace(mw.find_model(name), num_layers=layers)
    of = priced(model, pp, f"schedule={schedule}")
    seconds = [part.forward_s + part.backward_s + part.weight_s for part in of.step.parts.values()]
    embedding, layer, head = map(float, seconds)
    slowest = min(
        max(sizes[0] * layer + embedding, *(size * layer for size in sizes[1:-1]), sizes[-1] * layer + head)
        for sizes in itertools.product(range(layers + 1), repeat=pp)
        if sum(sizes) == layers
    )
    assert float(of.pace.time.total_s) == pytest.approx(slowest, rel=1e-9)


@pytest.mark.parametrize(
    ("pp", "plan"), [(4, "schedule=1f1b"), (4, "schedule=zb-v"), (2, "vpp=2"), (4, "schedule=dualpipe")]
)
def test_stages_that_are_stated_as_they_are_placed_cost_the_same(pp: int, plan: str) -> None:
    of = priced("llama3-8b", pp, plan)
    sizes = "-".join(map(str, layers_of_chunks(of.model, of.mesh)))
    assert any(f"stages={sizes};" in note for note in of.notes())
    again = priced("llama3-8b", pp, f"{plan},stages={sizes}")
    assert (again.step_s, again.memory_bytes) == (of.step_s, of.memory_bytes)
    even = priced("llama3-8b", pp, f"{plan},stages=even")
    assert len(set(layers_of_chunks(even.model, even.mesh))) == 1
    assert of.step_s < even.step_s


@settings(max_examples=40)
@given(st.integers(3, 40), st.sampled_from((2, 4)), st.integers(2, 4))
def test_chunks_of_an_interleaved_schedule_are_alike_but_for_the_ends(layers: int, pp: int, vpp: int) -> None:
    model = replace(mw.find_model("llama3-8b"), num_layers=layers)
    try:
        of = priced(model, pp, f"vpp={vpp}")
    except mw.MeshwiseError:
        assert -layers % (pp * vpp) > 2 * -(-layers // (pp * vpp)) or pp * vpp > layers + 2
        return
    first, *inner, last = layers_of_chunks(of.model, of.mesh)
    assert len(set(inner)) == 1 and max(first, last) <= inner[0] + 1
    assert first + sum(inner) + last == layers


@pytest.mark.parametrize("plan", ["pp=4,vpp=4,ep=64", "pp=8,vpp=2,ep=32", "pp=8,vpp=4,ep=32"])
def test_short_ends_take_as_long_as_they_do_played(plan: str) -> None:
    of = mw.estimate("deepseek-v3", "gb200:256", f"{plan},dtype=fp8", batch=2048, seq=4096)
    played = play(of.model, of.mesh, of.step, of.machine, hop_s=float(of.step.hop_s))
    found_s = float(of.step.work_s + of.step.bubble_s + of.step.comm_pp_s)
    assert found_s == pytest.approx(played.makespan_s, rel=0.02)


CLUSTERS = ("h100-80g-sxm:64", "a100-80g-sxm:128", "gb200:64", "h800-80g-sxm:256")
MODELS = (
    *("llama3-8b", "llama3-70b", "llama3.2-1b", "qwen3-0.6b", "gpt3-175b"),
    *("mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2", "deepseek-v3", "qwen3.5-397b-a17b"),
)
SOMETIMES = {
    "recompute_layers": (0.2, (1, 2, 4)),
    "cp": (0.3, (2, 4)),
    "cp_kind": (0.5, ("ring", "ulysses", "all_gather")),
    "ep": (0.6, (2, 4, 8, 16)),
    "overlap_tp": (0.15, (True,)),
    "overlap_ep": (0.15, (True,)),
    "overlap_dp": (0.15, (False,)),
    "overlap_pp": (0.1, (False,)),
    "dtype": (0.2, ("fp8",)),
    "optimizer": (0.1, ("muon",)),
}
"""How often a key is drawn, and among which values."""

CHANGES: tuple[dict[str, str | int | float], ...] = (
    *({"inner": 1.5}, {"outer": 1.5}, {"compute": 1.3}, {"compute": 1.05}, {"memory_rate": 1.5}),
)


def drawn(draw: random.Random) -> tuple[str, str, dict[str, Any], dict[str, int]]:
    """A model, a cluster, a plan with any schedule, and its work."""
    schedule = draw.choice((*SCHEDULES, "1f1b", "interleaved"))
    keys = {
        "tp": draw.choice((1, 2, 4, 8)),
        "pp": draw.choice((2, 3, 4, 6, 8, 16)),
        "schedule": schedule,
        "vpp": draw.randint(2, 6) if schedule == "interleaved" else 1,
        "zero": draw.randint(0, 3),
        "recompute": draw.choice(("", "none", "selective", "full")),
    }
    keys |= {key: draw.choice(values) for key, (often, values) in SOMETIMES.items() if draw.random() < often}
    model = draw.choice(MODELS)
    if keys["recompute"] != "full":
        keys.pop("recompute_layers", None)
    if mw.find_model(model).moe is None:
        keys.pop("ep", None)
    work = {"batch": draw.choice((64, 256, 1024)), "seq": draw.choice((2048, 4096, 8192))}
    return model, draw.choice(CLUSTERS), keys, work


def test_a_faster_machine_makes_no_plan_slower() -> None:
    """Layers are placed as well on one machine as on another: random plans of dense models and mixtures."""
    draw, slower, num_plans = random.Random(0), [], 0
    while num_plans < 250:
        model, name, keys, work = drawn(draw)
        cluster = mw.find_cluster(name)
        try:
            before = mw.estimate(model, cluster, mw.Plan(**keys), **work).step_s
        except mw.MeshwiseError:
            continue
        num_plans += 1
        for change in CHANGES:
            after = mw.estimate(model, changed(cluster, change), mw.Plan(**keys), **work).step_s
            if after > before * (1 + 1e-3):
                slower.append((model, name, keys, work, change, after / before))
    assert not slower
