"""Plans and workloads are checked when made, with one sentence wherever they come from; no key is ignored."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, strategies as st

import meshwise as mw
from data_tables import table
from meshwise.core.errors import PlanError
from meshwise.plan import plan as planning
from meshwise.plan.plan import DEFAULTS, KEYS, Plan, parse_plan, plan_keys, plan_text
from meshwise.plan.workload import Workload

DEGREES = st.integers(1, 8)
SIZES = st.lists(DEGREES, min_size=1, max_size=4).map(tuple)


def values_of(name: str) -> st.SearchStrategy[Any]:
    """Values that the key `name` may have."""
    kind = KEYS[name].values
    if kind.startswith("one of "):
        return st.sampled_from(kind.removeprefix("one of ").split(", "))
    if kind.startswith("a whole number"):
        return DEGREES if "least" in kind else st.integers(0, 3)
    if kind.startswith("a number"):
        return st.floats(0, 1) if "from 0 to 1" in kind else st.floats(1, 9)
    return (
        st.booleans()
        if kind == "0 or 1"
        else SIZES
        if "numbers" in kind
        else st.permutations(planning.AXES).map(tuple)
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan: some keys, each with a value of its own, that do not contradict each other."""
    keys = draw(st.sets(st.sampled_from(list(KEYS)), max_size=6))
    stated = {key: draw(values_of(key)) for key in sorted(keys)}
    if stated.get("layout", "1d") != "1d":
        dims = planning.GRID_DIMS[stated["layout"]]
        stated["grid"] = draw(st.lists(DEGREES, min_size=dims, max_size=dims).map(tuple))
    try:
        return Plan(**stated)
    except PlanError:
        assume(False)
        raise


@given(plans())
def test_the_text_of_a_plan_is_the_plan(plan: Plan) -> None:
    assert parse_plan(plan_text(plan)) == plan


@pytest.mark.parametrize(("text", "implied"), table("tables")["implied"])
def test_what_a_plan_implies(text: str, implied: dict[str, Any]) -> None:
    plan = parse_plan(text)
    found = {name: getattr(plan, name) for name in implied}
    assert {name: list(one) if isinstance(one, tuple) else one for name, one in found.items()} == implied


WRONG = table("wrong_plans")


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_plan_is_one_sentence_from_text_objects_and_files(text: str, tmp_path: Path) -> None:
    stated = dict(item.split("=") for item in text.split(","))
    file = tmp_path / "plan.toml"
    file.write_text("".join(f'{key} = "{value}"\n' for key, value in stated.items()))
    said = []
    for make in (lambda: parse_plan(text), lambda: Plan(**stated), lambda: parse_plan(str(file))):
        with pytest.raises(PlanError) as caught:
            make()
        said.append(str(caught.value))
    assert said[0].startswith(WRONG[text]) or WRONG[text] in said[0]
    assert said[1] == said[0]
    assert said[2] == f"{file}: {said[0]}"


@pytest.mark.parametrize(
    "values", [{"zero": 9}, {"tp": 1.5}, {"tp": True}, {"sp": 2}, {"grid": (3,), "layout": "2d"}]
)
def test_values_that_are_no_text_are_checked_alike(values: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        Plan(**values)


def test_whole_floats_become_whole_numbers() -> None:
    assert repr(Plan(tp=8.0).tp) == "8"
    assert repr(Workload(batch=64.0, seq=1024).batch) == "64"


def test_keys_that_are_stated_are_told_from_defaults() -> None:
    assert plan_keys("pp=1,layout=2d:4x2") == {"pp": 1, "layout": "2d", "grid": (4, 2)}


def test_every_key_has_a_default_and_a_meaning() -> None:
    assert list(DEFAULTS) == list(KEYS)
    assert all(field.doc for field in KEYS.values())


# --- no key is ignored: each value changes what is priced, or it is refused -------------------------

DRAWN = table("drawn")["other_values"]
OTHERS = DRAWN["of"] | {"recompute_modules": planning.RECOMPUTE_MODULES}


def texts_of(key: str) -> tuple[str, ...]:
    listed = KEYS[key].values
    if listed.startswith("one of "):
        return tuple(OTHERS.get(key, listed.removeprefix("one of ").split(", ")))
    if listed == "0 or 1":
        return OTHERS.get(key, ("0", "1"))
    return OTHERS.get(key, ("0", "1", "2", "3") if key == "zero" else ("2",))


def answered(model: str, keys: dict[str, Any]) -> Any:
    """What is answered, without what only repeats the question; or the sentence of a refusal."""
    try:
        found = mw.estimate(model, "h100-80g-sxm:64", mw.Plan(**keys), batch=64, seq=4096)
    except mw.MeshwiseError as error:
        assert "\n" not in str(error)
        return str(error)
    document = found.to_json()
    return {name: part for name, part in document.items() if name not in ("plan", "workload", "model")}


@pytest.mark.parametrize("key", KEYS)
def test_every_value_of_every_key_counts(key: str) -> None:
    for text in texts_of(key):
        stated = plan_keys(f"{key}={text}")
        if stated[key] == DEFAULTS[key]:
            continue
        for model, base in DRAWN["bases"]:
            keys = plan_keys(base)
            if keys.get(key) != stated[key] and answered(model, keys | stated) != answered(model, keys):
                break
        else:
            pytest.fail(f"{key}={text} changes nothing")
