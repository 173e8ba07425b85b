"""Layers are placed so that the slowest stage is as fast as any placement makes it."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshwise as mw
from meshwise.estimate.step import play
from meshwise.plan.stages import layers_of_chunks

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


@pytest.mark.parametrize("plan", ["pp=4,vpp=4,ep=64", "pp=8,vpp=2,ep=32", "pp=8,vpp=4,ep=32"])
def test_short_ends_take_as_long_as_they_do_played(plan: str) -> None:
    of = mw.estimate("deepseek-v3", "gb200:256", f"{plan},dtype=fp8", batch=2048, seq=4096)
    played = play(of.model, of.mesh, of.step, of.machine, hop_s=float(of.step.hop_s))
    found_s = float(of.step.work_s + of.step.bubble_s + of.step.comm_pp_s)
    assert found_s == pytest.approx(played.makespan_s, rel=0.02)
