"""The model catalog and its parameter counts, against what the models' makers print."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data_tables import table
from meshwise.core.errors import ModelError
from meshwise.core.files import read_catalog
from meshwise.model.architecture import MoE, checked_model, is_moe_layer, num_moe_layers
from meshwise.model.find import find_model, model_names, models
from meshwise.model.weights import num_active_params, num_params
from parameters import params

PRINTED = table("printed_parameters")
NAMES = table("model_names")


def test_each_preset_states_its_source_and_is_found_by_name_and_alias() -> None:
    for name in model_names():
        model = find_model(name.upper())
        assert model.name == name
        assert model.source and model.checked.startswith("20"), name
        assert all(find_model(alias) is model for alias in model.aliases)


@pytest.mark.parametrize(("name", "billions", "source"), PRINTED["megatron"])
def test_megatron_models(name: str, billions: float, source: str) -> None:
    """Equation 2 of arXiv 2104.04473 is exact but for the final norm."""
    model = find_model(name)
    layers, hidden = model.num_layers, model.hidden
    equation = 12 * layers * hidden**2 + 13 * layers * hidden + (model.vocab + model.max_seq) * hidden
    assert num_params(model) == equation + params(model).final_norm
    assert round(num_params(model) / 1e9, 1) == billions


@pytest.mark.parametrize(
    ("name", "total_b", "active_b", "with_embedding", "digits", "source"), PRINTED["active"]
)
def test_active_parameters(
    name: str, total_b: float, active_b: float, with_embedding: bool | str, digits: int, source: str
) -> None:
    """Makers print active parameters with the input embedding or without it."""
    model = find_model(name)
    active = num_active_params(model)
    without = active - params(model).embedding
    assert round(num_params(model) / 1e9, 0 if total_b > 200 else digits) == total_b
    if with_embedding == "unsaid":  # the card does not say: one digit lies between the two
        assert without / 1e9 < active_b < active / 1e9
    else:
        assert round((active if with_embedding else without) / 1e9, digits) == active_b


def test_fairseq_moe_15b() -> None:
    """The 15B MoE language model of arXiv 2112.10684, part by part (fairseq, branch moe)."""
    model = find_model("fairseq-moe-15b")
    parts = params(model)
    assert [is_moe_layer(model, layer) for layer in range(4)] == [False, True, False, True]
    assert parts.dense_mlp == 4_722_432
    assert num_moe_layers(model) * parts.experts == 14_507_311_104
    assert num_params(model) - 14_507_311_104 == 97_683_456
    assert parts.positions == 0
    assert round(num_active_params(model) / 1e6) == 154


@pytest.mark.parametrize("changes", table("tables")["model"]["contradictions"], ids=str)
def test_contradictions_are_one_sentence(changes: dict[str, Any]) -> None:
    of = {"moe": lambda fields: MoE(**fields), "patches": lambda name: find_model(name).patches}
    made = {key: of.get(key, lambda same: same)(value) for key, value in changes.items()}
    model = replace(find_model("llama3-8b"), **made)
    with pytest.raises(ModelError) as caught:
        checked_model(model, "here")
    assert str(caught.value).startswith("here") and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["gpt5", "", "no/such/config.json", "x" * 5000, "\0.json", "."], ids=ascii)
def test_a_model_that_is_not_there(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError):
        find_model(text)


@pytest.mark.parametrize(("text", "name"), NAMES.items())
def test_a_preset_is_found_by_the_name_that_people_write(text: str, name: str) -> None:
    assert find_model(text).name == name


@pytest.mark.parametrize(("text", "near"), [("qwen3-32", "qwen3-32b"), ("moonshotai/Kimi-K4", "kimi-k2")])
def test_an_unknown_name_names_near_ones(text: str, near: str) -> None:
    with pytest.raises(ModelError, match=f"no model is called .* did you mean .*{near}"):
        find_model(text)


def test_no_name_is_of_two_presets() -> None:
    for model in models().values():
        hub = re.findall("^https://huggingface.co/([^/]*/[^/]*)/blob/main/config.json$", model.source)
        names = (model.name, *model.aliases, *hub)
        assert {find_model(name).name for name in names} == {model.name}


PUBLISHED = {
    name: entry["parameters"] for name, entry in read_catalog("configs.toml").items() if "parameters" in entry
} | {"phi-4": 14_659_507_200}
"""Parameters with their towers, as the Hugging Face API states them (safetensors.total)."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_parameters(name: str) -> None:
    model = find_model(name)
    assert num_params(model) + sum(number for _, number in model.left_out) == PUBLISHED[name]
