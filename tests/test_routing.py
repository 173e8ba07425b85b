"""Mixtures of experts: routing, slots, the busiest rank, and DeepSeek-V3 as its report has it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import meshwise as mw
from data_tables import table
from meshwise.cost.experts import met_places
from meshwise.cost.routing import busiest_rank, distinct_experts, inclusion, slots_filled


@pytest.mark.parametrize(
    ("skew", "few", "many"), [(0.0, 163, 251), (0.5, 148, 244), (1.01, 105, 202), (1.2, 89, 176)]
)
def test_distinct_experts_of_draws_without_replacement(skew: float, few: int, many: int) -> None:
    # Sampled draws of 8 among 256 experts with weights rank^-skew, batches of 32 and 128 tokens.
    shares = inclusion(256, 8, skew)
    assert distinct_experts(shares, 32) == pytest.approx(few, rel=0.015)
    assert distinct_experts(shares, 128) == pytest.approx(many, rel=0.015)


@given(experts=st.integers(2, 64), top_k=st.integers(1, 8), skew=st.floats(0, 2), tokens=st.integers(1, 300))
@settings(max_examples=30, deadline=None)
def test_shares_slots_and_ranks(experts: int, top_k: int, skew: float, tokens: int) -> None:
    top_k = min(top_k, experts)
    shares = inclusion(experts, top_k, skew)
    assert shares.sum() == pytest.approx(top_k)
    assert (np.diff(shares) <= 1e-12).all() and (shares <= 1 + 1e-9).all()
    assert top_k * (1 - 1e-9) <= distinct_experts(shares, tokens) <= experts
    filled = [slots_filled(shares, tokens, capacity) for capacity in (1, tokens // 2 + 1, tokens)]
    assert (np.diff(filled) >= -1e-9).all()
    assert filled[-1] == pytest.approx(tokens * top_k, rel=1e-6)  # room for all: none dropped
    assert busiest_rank(shares, experts) >= 1 - 1e-9
    assert busiest_rank(shares, 1) == pytest.approx(1)
    placed = inclusion(256, 8, 0.8)  # 2,000 random placements over 8 and 32 ranks
    assert [busiest_rank(placed, ranks) for ranks in (8, 32)] == pytest.approx([1.50, 3.06], rel=0.02)


def test_a_capacity_is_an_input_of_estimate_and_serve(meshwise: Any) -> None:
    base = ("qwen3-30b-a3b", "--cluster", "h200-sxm:8", "--plan", "ep=8")
    step = ("estimate", *base, "--seq", "4096")
    tight, wide, all_taken = (
        meshwise(*step, "--capacity-factor", factor, "--json").document for factor in ("1", "2", "0")
    )
    assert tight["experts"]["capacity"] == 4096 * 8 / 128
    assert tight["experts"]["dropped_frac"] == pytest.approx(16 / np.sqrt(2 * np.pi) / 256, rel=0.05)
    assert wide["experts"]["padded_frac"] == pytest.approx(0.5, abs=0.001)
    assert wide["time_s"]["compute"] > tight["time_s"]["compute"]  # empty slots are computed too
    assert all_taken["experts"] == meshwise(*step, "--json").document["experts"]
    served = ("serve", *base, "--sequences", "64")
    bare, (even,), (skewed,) = (
        meshwise(*served, *words, "--json").document["passes"]
        for words in ((), ("--capacity-factor", "1"), ("--capacity-factor", "1", "--expert-skew", "1"))
    )
    assert even["experts"]["capacity"] == 4 and bare[0]["experts"]["capacity"] is None
    assert 0 < even["experts"]["dropped_frac"] < skewed["experts"]["dropped_frac"] < 1
    assert even["token_s"] == bare[0]["token_s"]
    assert "dropped" in meshwise(*served, "--capacity-factor", "1").out
    assert "dropped" not in meshwise(*served).out


def test_measured_loads_are_a_skew_of_their_own(meshwise: Any, tmp_path: Path) -> None:
    """Counted tokens that follow a power law cost what the power law does; equal ones cost nothing."""
    base = ("deepseek-v3", "--cluster", "h200-sxm:8", "--plan", "dp=8,ep=8,dtype=fp8", "--sequences", "256")

    def passes(*words: str) -> Any:
        return meshwise("serve", *base, *words, "--json").document["passes"]

    counts = tmp_path / "loads.txt"
    counts.write_text(", ".join(str(share) for share in inclusion(256, 8, 1.2).tolist()))
    measured, copied = passes("--expert-loads", str(counts)), passes("--expert-skew", "1.2")
    assert measured[0]["token_s"] == pytest.approx(copied[0]["token_s"])
    assert measured[0]["distinct_experts"] == pytest.approx(copied[0]["distinct_experts"])
    counts.write_text("7 " * 256)
    assert passes("--expert-loads", str(counts)) == passes()
    for text in ("1 2 3", "x " * 256, "1 " + "0 " * 255):
        counts.write_text(text)
        assert meshwise("serve", *base, "--expert-loads", str(counts)).code == 2


def test_copies_of_experts_spread_their_load_and_take_memory(meshwise: Any) -> None:
    """4 more experts in each of 58 layers of a rank, in fp8; ranks that no other number would fill."""
    base = ("deepseek-v3", "--plan", "dp=8,ep=8,dtype=fp8", "--sequences", "256", "--expert-skew", "1.2")

    def served(*words: str) -> Any:
        return meshwise("serve", *base, "--cluster", "h200-sxm:8", *words, "--json").document

    alone, copied = served(), served("--redundant-experts", "32")
    assert copied["first_token_s"] < alone["first_token_s"]
    assert copied["weight_bytes"] - alone["weight_bytes"] == 4 * 58 * 3 * 7168 * 2048
    rack = ("serve", "deepseek-v3", "--cluster", "gb200:72", "--plan", "dp=72,ep=72,dtype=fp8")
    assert "imbalance=1.125" in meshwise(*rack, "--redundant-experts", "32").out  # 36 of 32 choices a rank


# --- as DeepSeek-V3 trains them ---------------------------------------------------------------------


def report(plan: str) -> mw.Estimate:
    return mw.estimate("deepseek-v3", "h800-80g-sxm:2048", plan, batch=15360, seq=4096)


def test_the_report_of_deepseek_v3() -> None:
    """On 2,048 H800 180 thousand GPU-hours a trillion tokens (arXiv 2412.19437, sections 3, 4.2, table 1)."""
    found = report("pp=16,ep=64,zero=1,dtype=fp8,schedule=dualpipe")
    gpu_hours = 2048 / 3600 * 1e12 / found.tokens_per_s
    assert gpu_hours == pytest.approx(180e3, rel=0.1)
    assert found.fits


@pytest.mark.parametrize(("places", "monte_carlo"), table("tables")["met_places"])
def test_places_that_limited_routing_meets(places: int, monte_carlo: float) -> None:
    assert float(met_places(float(places), 8.0, (8.0, 4.0))) == pytest.approx(monte_carlo, rel=0.05)


def test_fewer_nodes_are_faster_and_fp8_dispatch_sends_less() -> None:
    base = "pp=16,ep=64,dtype=fp8,dispatch=per_rank"
    wide, narrow = (report(f"{base},dispatch_dtype={dtype}").to_json() for dtype in ("bf16", "fp8"))
    assert narrow["time_s"]["comm_ep"] < wide["time_s"]["comm_ep"]
    sent = {
        (row["op"], row["phase"]): row["payload_bytes"]
        for row in narrow["ledger"]
        if row["collective"] == "all_to_all" and row["module"].startswith("moe_layer")
    }
    # Tokens, and gradients in the backward, go out with a scale for each 128; results come back in bf16.
    for narrow_way, wide_way in (("forward", "backward"), ("backward", "forward")):
        there = sent["dispatch" if narrow_way == "forward" else "combine", narrow_way]
        back = sent["dispatch" if narrow_way == "forward" else "combine", wide_way]
        assert there / back == pytest.approx((1 + 4 / 128) / 2)


def test_a_pair_hides_what_a_lone_microbatch_pays() -> None:
    base = "pp=16,ep=64,dispatch=per_rank,overlap_ep="
    alone, paired = (report(base + switch).to_json() for switch in "01")
    assert alone["time_s"]["comm_ep"] * 16 / 135 < paired["time_s"]["comm_ep"] < alone["time_s"]["comm_ep"]
    assert sum(paired["time_s"].values()) == pytest.approx(paired["step_s"])


@pytest.mark.parametrize("batch", [64, 1024])
@pytest.mark.parametrize("plan", ["ep=16", "ep=32,dispatch=per_rank,zero=3,recompute=full", "pp=4,ep=16"])
def test_nothing_hides_beside_a_lone_microbatch(plan: str, batch: int) -> None:
    plans = (f"{plan},overlap_ep={hides}" for hides in (0, 1))
    both = [mw.estimate("qwen3-30b-a3b", "h100-80g-sxm:64", one, batch=batch) for one in plans]
    assert both[1].step_s <= both[0].step_s * (1 + 1e-9)  # a late host launches for both of a pair
    assert float(both[0].mesh.num_microbatches) > 1 or both[0].time_s == both[1].time_s
