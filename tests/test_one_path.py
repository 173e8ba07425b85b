"""One path, for random plans: the ledger adds up to the step, memory to its total, a grid is its plans."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st

from data_tables import lines, table, values
from meshwise.core.errors import MeshwiseError
from meshwise.cost.schedule import SCHEDULES
from meshwise.estimate.grid import grids
from meshwise.estimate.one_plan import Estimate, estimate
from meshwise.machine.hardware import find_cluster
from meshwise.model.architecture import Model
from meshwise.model.find import find_model, model_names
from meshwise.model.huggingface import model_from_config
from meshwise.model.inputs import Inputs, with_inputs
from meshwise.plan.plan import CP_KINDS, EVEN, KEYS, RECOMPUTE, Plan
from meshwise.plan.workload import KINDS, Workload
from meshwise.program.cut import Cut
from meshwise.program.op import bytes_of
from meshwise.program.parts import parts

MODELS = ("gpt3-175b", "llama3-70b", "mixtral-8x7b", "deepseek-v3", "llama3-8b")
RECORDS = lines("transformers_5.23")
EVERY = {name: find_model(name) for name in model_names()} | {
    record["model_type"]: model_from_config(record["config"], name=record["model_type"]) for record in RECORDS
}
"""Every preset, and a configuration of every family of `transformers`; with what its towers read."""
SEES, HEARS = Inputs(images=1), Inputs(audio_s=30.0)
EVERY |= {
    f"{name}, {tower.name}": with_inputs(one, SEES if tower.name == "vision" else HEARS)
    for name, one in EVERY.items()
    for tower in one.towers
}
CLUSTERS = ("h100-80g-sxm:64", "h100-80g-sxm:256", "a100-80g-sxm:512")

VALUES: dict[str, tuple[Any, ...]] = values("plans") | {
    "cp_kind": CP_KINDS, "schedule": SCHEDULES, "stages": (None, EVEN, (17, 15), (20, 28, 20, 28)),
    "recompute": RECOMPUTE, "optimizer": KEYS["optimizer"].names,
}  # fmt: skip
"""Values of every key of a plan, some of which cannot go together."""


OF_FSDP2 = ("tp", "cp", "cp_kind", "pp", "vpp", "schedule", "ep", "etp", "zero", "recompute", "optimizer")


def test_every_key_is_tried() -> None:
    assert set(VALUES) == {*KEYS, "microbatch"}


def price(model: Model, cluster: str, plan: dict[str, Any], load: Workload) -> Estimate:
    plan = dict(plan)
    load = replace(load, microbatch=plan.pop("microbatch", 1))
    return estimate(model, find_cluster(cluster), Plan(**plan), load)


def drawn_plan(data: st.DataObject, num_keys: int) -> dict[str, Any]:
    keys = data.draw(st.lists(st.sampled_from(sorted(VALUES)), max_size=num_keys, unique=True))
    return {key: data.draw(st.sampled_from(VALUES[key]), label=key) for key in keys}


@settings(max_examples=90, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.data(), st.sampled_from(sorted(EVERY)), st.sampled_from(CLUSTERS), st.sampled_from(KINDS))
def test_the_rows_of_every_rank_add_up_to_the_step(
    data: st.DataObject, model: str, cluster: str, kind: str
) -> None:
    load = Workload(batch=768, seq=data.draw(st.sampled_from((1, 7, 128, 4096)), label="seq"), kind=kind)
    try:
        of = price(EVERY[model], cluster, drawn_plan(data, 8), load)
    except MeshwiseError:
        assume(False)
    assert of.pace_rank in set(of.ledger["rank"])
    for rank in set(of.ledger["rank"]):
        assert of.ledger.where(rank=rank).total("time_s") == pytest.approx(of.step_s, rel=1e-12)
    assert sum(of.time_s.values()) == pytest.approx(of.step_s, rel=1e-12)
    assert min(of.time_s.values()) >= 0
    for row in of.ledger.to_json():
        assert all(value >= 0 for value in row.values() if isinstance(value, int | float)), row
        assert (row["exposed_s"] or 0.0) <= (row["comm_s"] or 0.0) * (1 + 1e-12), row
    held = [of.ledger.where(rank=rank, phase="peak").total("live_bytes") for rank in set(of.ledger["rank"])]
    assert max(held) == pytest.approx(of.memory_bytes["total"], rel=1e-12)
    stages = of.to_json(ledger=False)["stages"]
    assert sum(stage["num_like_it"] for stage in stages) == of.plan.pp
    assert 0 < of.mfu <= of.hfu * (1 + 1e-12) or kind != "train"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), st.sampled_from(MODELS), st.sampled_from(CLUSTERS))
def test_a_grid_is_its_plans(data: st.DataObject, model: str, cluster: str) -> None:
    """A cell is what `estimate` gives for its plan, and is missing exactly where `estimate` refuses it."""
    keys = data.draw(st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=4, unique=True))
    base = {key: value for key, value in drawn_plan(data, 4).items() if key not in (*keys, "microbatch")}
    check_grid(data, model, cluster, base, keys, data.draw(st.sampled_from(("train", *KINDS)), label="kind"))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), st.sampled_from(("llama3-8b", "mixtral-8x7b", "gpt3-13b")))
def test_a_grid_of_fsdp2_is_its_plans(data: st.DataObject, model: str) -> None:
    keys = data.draw(st.lists(st.sampled_from(OF_FSDP2), min_size=1, max_size=3, unique=True))
    base = {"implementation": "fsdp2", "zero": 3, "etp": 1 if model == "mixtral-8x7b" else None}
    check_grid(data, model, CLUSTERS[0], {key: base[key] for key in base if key not in keys}, keys, "train")


def check_grid(
    data: st.DataObject, model: str, cluster: str, base: dict[str, Any], keys: list[str], kind: str
) -> None:
    space, load = {key: VALUES[key] for key in keys}, Workload(batch=768, seq=4096, kind=kind)
    found: dict[tuple[str, ...], tuple[float, float]] = {}
    one_each = {key: (value,) for key, value in base.items()}
    of = grids(find_model(model), find_cluster(cluster), load, space | one_each)
    for cells in itertools.chain.from_iterable(grid.price() for grid in of):
        step_s, memory = cells.array(cells.step.step_s), cells.array(cells.step.memory_bytes)
        broken = np.broadcast_to(cells.broken, cells.shape)
        for index in np.ndindex(cells.shape):
            if not broken[index]:
                values = cells.values_at(index)
                cell = tuple(repr(values[key]) for key in keys)
                found[cell] = step_s[index], memory[index]
    cells_ = list(itertools.product(*space.values()))
    for cell in data.draw(st.lists(st.sampled_from(cells_), min_size=10, max_size=30)):
        values = dict(zip(keys, cell, strict=True))
        try:
            of = price(find_model(model), cluster, base | values, load)
        except MeshwiseError as error:
            assert tuple(map(repr, cell)) not in found, str(error)
        else:
            step, memory_bytes = found[tuple(map(repr, cell))]
            assert step == pytest.approx(of.step_s, rel=1e-12)
            assert memory_bytes == pytest.approx(of.memory_bytes["total"], rel=1e-12)


OTHERWISE = table("exceptions")["bytes_moved"]
"""Ops of a forward that move something else than the tensors that they state, and what."""


@pytest.mark.parametrize("implementation", ["megatron", "fsdp2"])
def test_bytes_moved_are_those_of_the_tensors(implementation: str) -> None:
    """A matmul reads its input and its weights, a kernel what it names; every exception is used."""
    used = set()
    cut = Cut(microbatch=2.0, seq=512.0, tp=2.0, sequence_parallel=True, implementation=implementation)
    for name in model_names():
        for op in itertools.chain(*parts(find_model(name), cut).values()):
            if op.phase == "forward" and op.kind != "collective":
                stated = bytes_of(op.reads), bytes_of(op.makes)
                if stated != pytest.approx((op.cost.read_bytes, op.cost.write_bytes), rel=1e-6):
                    word = next((word for word in (op.kind, op.kernel, op.name) if word in OTHERWISE), "")
                    assert word, (name, op.module, op.name, stated, op.cost)
                    used.add(word)
    assert used == set(OTHERWISE) - (
        {"sum_copies"} if implementation == "fsdp2" else {"scale_by_gate", "attention"}
    )
