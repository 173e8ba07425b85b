"""No key of a plan makes memory smaller for nothing: a search would find every plan that gains from it."""

from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st

import meshwise as mw
from data_tables import table
from meshwise.model.find import find_model
from meshwise.model.weights import head_weights, mtp_weights, num_block_params, num_weights

JOBS = table("drawn")["memory_jobs"]
"""Models on clusters, with batches of several microbatches: of one, stage 2 costs what stage 1 does."""
VALUES = table("drawn")["memory_has_a_price"]
"""Not tried: gpipe (1F1B does the same work and keeps fewer microbatches alive), and zero=0 (stage 1 gathers
new weights where stage 0 gathers summed gradients, arXiv 1910.02054, section 7)."""
WHY = table("exceptions")["memory_for_nothing"]
"""Keys whose values differ in memory without a price, and why."""


def priced(model: str, keys: dict[str, Any]) -> mw.Estimate | None:
    cluster, batch = JOBS[model]
    text = ",".join(f"{key}={value}" for key, value in keys.items() if key != "microbatch")
    try:
        return mw.estimate(model, cluster, text, batch=batch, seq=4096, microbatch=keys.get("microbatch", 1))
    except mw.MeshwiseError:
        return None


def test_gathered_weights_are_held_where_others_are_cast_as_they_are_read() -> None:
    held = [priced("llama3-8b", {"software": "xla-2024", "zero": zero}) for zero in (0, 1, 3)]
    assert [one and one.memory_bytes["weights"] for one in held] == [0, 31 / 32 * 2 * 8_030_261_248, 0]


def test_the_last_stage_holds_the_table_that_multi_token_prediction_reads() -> None:
    model, job = find_model("mimo-7b"), "pp=4,stages=9-9-9-9,implementation="
    table, ends = model.vocab * model.hidden, num_weights((*head_weights(model), *mtp_weights(model)))
    for name, elem_bytes in (("megatron", 2), ("fsdp2", 4)):
        found = mw.estimate("mimo-7b", "h100-80g-sxm:4", job + name, batch=16, seq=1024)
        held = found.rank_ledger(3).where(module="memory", op="weights")["live_bytes"]
        assert held == [elem_bytes * (num_block_params(model) // 36 * 10 + ends + table)]
        shared = [found.rank_ledger(rank).where(op="tied_embedding")["payload_bytes"] for rank in range(4)]
        assert [list(one) for one in shared] == [[4 * table], [], [], [4 * table]]


def test_norms_are_summed_over_tp_as_gradients_are_held() -> None:
    for dtype, width in (("fp32", 4), ("bf16", 2)):
        found = mw.estimate("llama3-8b", "h100-80g-sxm:16", f"tp=2,grad_dtype={dtype}", batch=16, seq=4096)
        assert [*found.ledger.where(op="shared_norms", axis="tp")["payload_bytes"]] == [65 * 4096 * width]


def work(of: mw.Estimate) -> dict[str, float]:
    """What a step costs: seconds by what they are spent on, FLOP, and bytes that each kind of stage moves."""
    rows = list(of.ledger.rows())
    moved = ("read_bytes", "write_bytes", "payload_bytes")
    found = {column: sum(row["count"] * (row[column] or 0.0) for row in rows) for column in moved}
    return found | of.time_s | {"flop": of.hardware_flop}


def check_price(model: str, keys: dict[str, Any], key: str, value: Any) -> None:
    one, other = priced(model, keys), priced(model, keys | {key: value})
    if one is None or other is None:
        return
    other, one = sorted((one, other), key=lambda of: of.memory_bytes["total"])
    if other.memory_bytes["total"] > 0.995 * one.memory_bytes["total"]:
        return
    before, after = work(one), work(other)
    more = [name for name in before if after[name] > before[name] * (1.0 + 1e-6) + 1e-9]
    assert more, f"{model} {keys}: {key} spares memory and costs nothing"


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), st.sampled_from(sorted(JOBS)))
def test_no_key_spares_memory_for_nothing(data: st.DataObject, model: str) -> None:
    names = data.draw(st.sets(st.sampled_from(sorted(VALUES)), max_size=5))
    keys = {name: data.draw(st.sampled_from(VALUES[name])) for name in sorted(names)}
    key = data.draw(st.sampled_from(sorted(set(VALUES) - set(WHY))))
    assume(priced(model, keys) is not None)
    for value in VALUES[key]:
        check_price(model, keys, key, value)


@pytest.mark.parametrize(("model", "keys", "key", "value"), table("tables")["once_gained"])
def test_what_searches_once_gained_from(model: str, keys: dict[str, Any], key: str, value: Any) -> None:
    """ZeRO-2 with the traffic of stage 1; half of the logits under DualPipe."""
    check_price(model, keys, key, value)


def test_stages_of_zero_cost_what_they_move() -> None:
    for batch in (32, 64, 128):  # zero=2 hid one microbatch's reductions, whatever their number
        plans = [f"tp=2,zero={stage}" for stage in (1, 2, 3)]
        steps = [
            mw.estimate("llama3-8b", "h100-80g-sxm:16", plan, batch=batch, seq=4096).step_s for plan in plans
        ]
        assert sorted(steps) == steps


@pytest.mark.parametrize("plan", ["zero=3", "tp=2,etp=1"])
def test_adapters_take_no_time_back(plan: str) -> None:
    found = mw.estimate(
        "mixtral-8x7b", "h100-80g-sxm:8", f"{plan},lora_rank=16,implementation=fsdp2", batch=64, seq=4096
    )
    assert min(row["time_s"] or 0.0 for row in found.ledger.rows()) >= 0.0
    assert sum(found.time_s.values()) == pytest.approx(found.step_s)
