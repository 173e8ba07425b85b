"""Implementations: what fsdp2 is told, and that its grid of plans is its plans."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwise.core.errors import MeshwiseError
from meshwise.cost.schedule import SCHEDULES
from meshwise.estimate.grid import price_grid
from meshwise.estimate.one_plan import Estimate, estimate
from meshwise.machine.hardware import find_cluster
from meshwise.model.find import find_model
from meshwise.plan.plan import CP_KINDS, RECOMPUTE, Plan
from meshwise.plan.workload import Workload
from meshwise.search.best_plans import found_at

FSDP2 = Plan(implementation="fsdp2", zero=3)
CLUSTER = find_cluster("h100-80g-sxm:64")
LOAD = Workload(batch=256, seq=4096)
VALUES: dict[str, tuple[Any, ...]] = {
    "tp": (1, 2, 8, 16), "cp": (1, 2), "cp_kind": CP_KINDS, "pp": (1, 2, 4), "vpp": (1, 2, 4),
    "schedule": SCHEDULES, "ep": (1, 8), "etp": (1, 2), "zero": (1, 3), "recompute": RECOMPUTE,
    "microbatch": (1, 2), "overlap_dp": (True, False), "optimizer": ("adam", "sgd"),
}  # fmt: skip


def price(model: str, plan: Plan, microbatch: int = 1) -> Estimate:
    return estimate(find_model(model), CLUSTER, plan, replace(LOAD, microbatch=microbatch))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), st.sampled_from(["llama3-8b", "mixtral-8x7b", "gpt3-13b"]))
def test_a_grid_of_fsdp2_is_its_plans(data: st.DataObject, model: str) -> None:
    """Every cell, with its time and memory; a plan that is refused has none."""
    keys = data.draw(st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=3, unique=True))
    space = {key: VALUES[key] for key in keys}
    base = {"implementation": "fsdp2", "zero": 3, "etp": 1 if model == "mixtral-8x7b" else None}
    found = {}
    one_each = {key: (value,) for key, value in base.items()}
    for cells in price_grid(find_model(model), CLUSTER, LOAD, one_each | space):
        for cell in np.flatnonzero(~np.broadcast_to(cells.broken, cells.shape)):
            one = found_at(cells, int(cell))
            found[one.plan, one.microbatch] = one.step_s, one.memory_bytes
    plans = set()
    for values in itertools.product(*space.values()):
        stated = dict(zip(keys, values, strict=True))
        microbatch = stated.pop("microbatch", 1)
        try:
            plan = Plan(**base | stated)
            of = price(model, plan, microbatch)
        except MeshwiseError:
            continue
        if plan.cp == 1:  # a grid has one cell for all kinds
            plan = replace(plan, cp_kind="ring")
        plans.add((plan, microbatch))
        assert found[plan, microbatch] == pytest.approx((of.step_s, of.memory_bytes["total"]), rel=1e-12)
    assert plans == set(found)


@pytest.mark.parametrize("plan", ["tp=2,recompute=full", "pp=4,vpp=4", "pp=2,schedule=zb-v"])
@pytest.mark.parametrize("rank", [0, 13, 63])
def test_the_rows_of_any_rank_add_up_to_the_step(plan: str, rank: int) -> None:
    keys = dict(item.split("=") for item in plan.split(","))
    of = price("llama3-8b", replace(FSDP2, **{k: int(v) if v.isdigit() else v for k, v in keys.items()}))
    ledger = of.rank_ledger(rank)
    assert ledger.total("time_s") == pytest.approx(of.step_s, rel=1e-12)
    assert set(ledger["rank"]) == {rank}
    if rank == 0:
        assert ledger.to_json() == of.ledger.where(rank=0).to_json()


def test_all_shards_are_the_weights() -> None:
    """Over all ranks the states are 16 bytes a weight, and once more for what tensor parallelism copies."""
    of = price("llama3-8b", replace(FSDP2, tp=2))
    held = [
        of.rank_ledger(rank).where(module="memory", op=("weights", "gradients", "optimizer"))
        for rank in range(64)
    ]
    norms = (2 * 32 + 1) * 4096
    total = sum(ledger.total("live_bytes") for ledger in held)
    assert total == 16 * (of.to_json(ledger=False)["model"]["num_params"] + norms)
