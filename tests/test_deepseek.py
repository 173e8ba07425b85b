"""Mixtures of experts as DeepSeek-V3 trains them: limited routing, two microbatches at a time, its report."""

import pytest

import meshwise as mw
from meshwise.cost.experts import met_places

REPORT = {"batch": 15360, "seq": 4096}
PLAN = "pp=16,ep=64,zero=1,dtype=fp8,schedule=dualpipe"
"""DeepSeek-V3 on 2,048 H800 (arXiv 2412.19437, sections 3 and 4.2)."""


def report(plan: str = PLAN) -> mw.Estimate:
    return mw.estimate("deepseek-v3", "h800-80g-sxm:2048", plan, **REPORT)


def test_the_report_of_deepseek_v3() -> None:
    # 180 thousand GPU-hours a trillion tokens (arXiv 2412.19437, table 1).
    found = report()
    gpu_hours = found.step_s * 2048 / 3600 * 1e12 / (REPORT["batch"] * REPORT["seq"])
    assert gpu_hours == pytest.approx(180e3, rel=0.1)
    assert found.fits


@pytest.mark.parametrize(
    ("places", "monte_carlo"),
    # 40,000 tokens, 8 of 256 experts in the best 4 of 8 groups by two scores each: DeepSeek-V3's router.
    [(8, 3.97), (4, 3.12), (2, 1.97), (16, 5.72), (64, 7.48), (32, 6.84), (128, 7.82)],
)
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
    assert paired["time_s"]["comm_ep"] < alone["time_s"]["comm_ep"]
    unpaired = {row["time_s"] for row in paired["ledger"] if row["op"] == "unpaired"}
    assert len(unpaired) == 1 and 0 < unpaired.pop() < alone["time_s"]["comm_ep"] * 16 / 120 * 1.01
    assert sum(paired["time_s"].values()) == pytest.approx(paired["step_s"])
