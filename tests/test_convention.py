"""A published convention uses what the user states, or refuses it: every field and every option is walked."""

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from data_tables import table
from meshwise.core.errors import MeshwiseError
from meshwise.machine.hardware import find_cluster
from meshwise.model.architecture import Model
from meshwise.model.find import find_model
from meshwise.plan.plan import Plan, parse_plan
from meshwise.plan.workload import Workload
from meshwise.published.convention import find_convention

GPT3 = find_model("gpt3-175b")
CONVENTION = table("tables")["convention"]
BASES, OTHER_VALUES = CONVENTION["bases"], CONVENTION["other_values"]
OUTSIDE_BLOCKS = set(CONVENTION["outside_blocks"])


def answer(convention: str, plan: dict[str, str], model: Model = GPT3, **load: Any) -> str:
    """All that a convention says, as text."""
    cluster, batch, _ = BASES[convention]
    text = ",".join(f"{key}={value}" for key, value in plan.items())
    step = Workload(**({"batch": batch, "seq": 2048} | load))
    priced = find_convention(convention).price(model, find_cluster(cluster), parse_plan(text), step).to_json()
    return json.dumps({key: priced[key] for key in ("tables", "step_s", "memory_bytes")}, default=float)


def changed_or_refused(before: str, convention: str, plan: dict[str, str], **rest: Any) -> bool:
    try:
        return answer(convention, plan, **rest) != before
    except MeshwiseError as error:
        assert "\n" not in str(error)
        return True


@pytest.mark.parametrize("key", [item.name for item in fields(Plan)])
@pytest.mark.parametrize("convention", BASES)
def test_every_plan_key_is_used_or_refused(convention: str, key: str) -> None:
    default = {item.name: item.default for item in fields(Plan)}[key]
    flipped = {True: ["0"], False: ["1"]}
    other = flipped[default] if isinstance(default, bool) else ["2"] if default in (None, 0, 1) else ["other"]
    for base in BASES[convention][2]:
        before = answer(convention, base)
        for value in OTHER_VALUES.get(key, other):
            if base.get(key) != value and not (key == "grid" and ":" in base.get("layout", "")):
                assert changed_or_refused(before, convention, base | {key: value}), f"{base} {key}={value}"


@pytest.mark.parametrize("field", [item.name for item in fields(Model) if item.name not in OUTSIDE_BLOCKS])
@pytest.mark.parametrize("convention", BASES)
def test_every_feature_of_a_block_is_used_or_refused(convention: str, field: str) -> None:
    value = getattr(GPT3, field)
    other = not value if isinstance(value, bool) else 2 * value + 8 if isinstance(value, int | float) else "x"
    base = BASES[convention][2][0]
    model = replace(GPT3, **{field: other})
    assert changed_or_refused(answer(convention, base), convention, base, model=model)


@pytest.mark.parametrize("load", [{"batch": 32}, {"seq": 1024}, {"microbatch": 2}, {"kind": "prefill"}])
@pytest.mark.parametrize("convention", BASES)
def test_every_field_of_a_workload_is_used_or_refused(convention: str, load: dict[str, Any]) -> None:
    assert {item.name for item in fields(Workload)} >= set(load)
    base = BASES[convention][2][0]
    assert changed_or_refused(answer(convention, base), convention, base, **({"batch": 16} | load))


@pytest.mark.parametrize(("convention", "stated"), table("tables")["convention"]["done_anyway"])
def test_what_a_convention_does_anyway_may_be_stated(convention: str, stated: dict[str, str]) -> None:
    base = BASES[convention][2][0]
    assert answer(convention, base | stated) == answer(convention, base)


def test_ideal_is_the_default_path_and_refuses_nothing(meshwise: Any) -> None:
    words = ("estimate", "gpt3-175b", "--cluster", "a100-80g-sxm:64", "--batch", "64", "--tokens", "1e9")
    plan = "tp=4,pp=4,zero=2,recompute=full,dtype=fp16,attention=unfused,overlap_dp=0"
    step_s = [
        meshwise(*words, "--plan", plan, "--convention", convention, "--json").document["step_s"]
        for convention in ("ideal", "default")
    ]
    assert step_s[0] < step_s[1]
