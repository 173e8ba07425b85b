"""Configs of public models: read, counted to the last parameter, and refused in one sentence.

The configs in `data/configs` hold the architecture fields of the models' own files. Each total is
one that somebody else printed; for the rest, and for every family again, transformers 5.23 built the
model from the same config on torch's meta device and counted its parameters.
"""

import ast
import inspect
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import meshwise as mw
from data_tables import CONFIGS, csv_rows, lines, table
from meshwise.core.errors import MeshwiseError, ModelError
from meshwise.core.expressions import value_of
from meshwise.model import config_rules
from meshwise.model.architecture import Model, is_moe_layer, layer_kind, num_moe_layers
from meshwise.model.config_fields import DEFAULTS, NAMES, spellings
from meshwise.model.find import find_model
from meshwise.model.huggingface import families, model_from_config, read_config
from meshwise.model.weights import num_params
from meshwise.plan.plan import parse_plan, plan_keys
from meshwise.plan.workload import as_released, quantized_note

RECORDS = lines("transformers_5.23")
OF_FAMILY = {record["model_type"]: record["config"] for record in RECORDS}
RAW = {path.stem: json.loads(path.read_text()) for path in sorted(CONFIGS.glob("*.json"))}
TOTALS = csv_rows("published_totals.csv")
PRESETS = [(row["preset"], row["config"]) for row in TOTALS if row["preset"]]
BAD = lines("bad_configs")
"""Config, changed fields, and words of the sentence that refuses them."""


@pytest.mark.parametrize("row", TOTALS, ids=[f"{row['config']}: {row['source']}" for row in TOTALS])
def test_parameters_to_the_last(row: dict[str, str]) -> None:
    """Towers too, unless the source says; less what it counts and no model has (rotary frequencies)."""
    model = read_config(CONFIGS / f"{row['config']}.json")
    assert model.name == row["config"]
    towers = 0 if "language model" in row["source"] else sum(number for _, number in model.left_out)
    assert num_params(model) + towers == int(row["printed"]) - int(row["less"])


def test_every_config_has_its_total_and_every_family_its_config() -> None:
    assert sorted(row["config"] for row in TOTALS) == sorted(RAW)
    configs = [*RAW.values(), *(record["config"] for record in RECORDS)]
    parts = [part for config in configs for part in config.values() if "model_type" in str(part)]
    read = {config["model_type"] for config in (*configs, *parts)}
    wholes = [spellings()[kind].whole for kind in read if kind in spellings()]
    read |= {tower.family for whole in wholes if whole for tower in whole.towers}
    read |= {whole.family for whole in wholes if whole and not whole.text}
    assert read >= set(families())


@pytest.mark.parametrize(("preset", "config"), PRESETS)
def test_preset_is_its_config(preset: str, config: str) -> None:
    """Every field, not only the parameters."""
    read = find_model(str(CONFIGS / f"{config}.json"))
    assert replace(find_model(preset), name=config, source=read.source, checked="", aliases=()) == read


def _read(raw: dict[str, Any]) -> Model:
    return model_from_config(raw, name="model", where="model/config.json")


def test_the_class_names_the_family_if_model_type_does_not() -> None:
    unlike = {"kimi-k2", "gemma-3-1b", "internvl3-8b", "internvl3-78b", "kimi-vl-a3b", "qwen2.5-omni-7b"}
    unlike |= {"grok-1"}
    for name in RAW.keys() - unlike:
        without = {key: value for key, value in RAW[name].items() if key != "model_type"}
        assert _read(without) == _read(RAW[name]), name


def test_text_config_is_the_model_and_may_omit_what_the_library_assumes() -> None:
    """LLaVA 1.5 7B writes its language model, Vicuna 7B, as a difference from the default Llama."""
    text_config = {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064}
    nested = _read({"model_type": "llava", "vision_config": {}, "text_config": text_config})
    assert replace(nested, left_out=(), towers=()) == _read({**RAW["llama-2-7b"], "vocab_size": 32064})


def test_the_default_of_every_class() -> None:
    """Every family with every head; what is left out (towers, projectors) is counted as well."""
    for record in RECORDS:
        models = {name: _read(record["config"] | {"architectures": [name]}) for name in record["num_params"]}
        left_out = {name: sum(number for _, number in model.left_out) for name, model in models.items()}
        counted = {name: num_params(model) + left_out[name] for name, model in models.items()}
        assert counted == record["num_params"]


def test_a_whole_ties_what_it_says_and_names_what_it_leaves_out() -> None:
    """LLaVA 1.5 7B: the CLIP tower (303,507,456) and projector (20,979,712); the outer tie wins."""
    raw = {"model_type": "llava", "text_config": RAW["llama-2-7b"] | {"tie_word_embeddings": True}}
    vision = {"image_size": 336, "patch_size": 14, "hidden_size": 1024, "intermediate_size": 4096}
    raw["vision_config"] = vision | {"num_hidden_layers": 24, "num_attention_heads": 16}
    model = _read(raw)
    assert not model.tied_embedding
    assert model.left_out == (("vision tower", 303_507_456), ("projector", 20_979_712))
    assert _read(raw | {"tie_word_embeddings": True}).tied_embedding


def test_an_unknown_family_may_be_like_a_known_one(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw := RAW["llama-3.1-8b"] | {"model_type": "lama"}))
    model = find_model(f"{path},like=llama")
    notes = str(mw.estimate(model, "h100-80g-sxm:8", "zero=3").notes())
    assert "8,030,261,248 parameters, 8,030,261,248 of them active" in notes
    for text, says, more in table("tables")["huggingface"]["like"]:
        path.write_text(json.dumps(raw | more))
        with pytest.raises(ModelError, match=says):
            find_model(text.format(path))


def test_a_directory_is_read_by_its_config_and_named_by_itself(tmp_path: Path) -> None:
    directory = tmp_path / "tiny"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(RAW["gpt2"]))
    assert find_model(str(directory)) == find_model(str(directory / "config.json"))
    assert find_model(str(directory)).name == "tiny"


def test_windows() -> None:
    """Mistral 7B: 4096 in all layers; Gemma 2 and gpt-oss every other; Gemma 3 five of six; Qwen none."""
    windows = {name: _read(raw) for name, raw in RAW.items()}
    seen = {name: (model.sliding_window, model.full_attention_every) for name, model in windows.items()}
    assert seen["mistral-7b-v0.1"] == (4096, 0)
    assert seen["gemma-2-9b"] == (4096, 2)
    assert seen["gemma-3-1b"] == (512, 6)
    assert seen["gpt-oss-20b"] == (128, 2)
    assert seen["qwen2.5-7b"] == seen["mixtral-8x7b"] == seen["llama-3.1-8b"] == (0, 0)


def test_features_that_a_config_states() -> None:
    """Capped scores and logits, multi-token prediction, and who sees what follows."""
    gemma2, gemma3 = (_read(RAW[name]) for name in ("gemma-2-9b", "gemma-3-1b"))
    for of, capped in ((gemma2, True), (gemma3, False)):
        assert (of.attention_softcap, of.logit_softcap, of.num_norms) == (capped, capped, 4)
    assert not _read({**RAW["gemma-2-9b"], "attn_logit_softcapping": None}).attention_softcap
    assert [_read(RAW[name]).mtp_layers for name in ("deepseek-v3", "kimi-k2", "deepseek-v2")] == [1, 0, 0]
    assert not _read(RAW["bert-base-uncased"]).causal
    assert _read({**RAW["bert-base-uncased"], "is_decoder": True}).causal
    assert not _read({**RAW["gemma-3-1b"], "use_bidirectional_attention": True}).causal
    assert not _read({**RAW["qwen2.5-7b"], "is_causal": False}).causal
    moes = [_read(RAW[name]).moe for name in ("gpt-oss-20b", "deepseek-v3")]
    assert [(moe.router_bias, moe.balance_bias) for moe in moes if moe] == [(True, False), (False, True)]


NEMOTRON_H = {
    **{"model_type": "nemotron_h", "hidden_size": 4096, "num_hidden_layers": 3, "intermediate_size": 21504},
    **{"num_attention_heads": 32, "vocab_size": 131072, "hybrid_override_pattern": "M-*"},
}


def test_a_model_without_layers_of_experts_has_none() -> None:
    """The library fills in 8 experts, which no layer of Nemotron-H 8B has."""
    assert _read(NEMOTRON_H).moe is None
    assert _read(NEMOTRON_H | {"hybrid_override_pattern": "ME*"}).moe is not None


def test_published_files_say_infinity_and_name_a_tower_as_the_whole(tmp_path: Path) -> None:
    """Python's json writes Infinity; vision_config of Qwen3-VL calls itself qwen3_vl and has a depth."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(NEMOTRON_H | {"time_step_limit": [0.0, float("inf")]}))
    assert read_config(path).recurrence is not None
    whole = OF_FAMILY["qwen3_vl"]
    vision = whole["vision_config"] | {"model_type": "qwen3_vl"}
    assert _read(whole | {"vision_config": vision}) == _read(whole)
    text_only = {key: value for key, value in OF_FAMILY["llama4"].items() if key != "vision_config"}
    assert _read(text_only).left_out == ()


def test_blocks_that_share_weights() -> None:
    """Zamba 2: nine runs of two blocks do the work of nine, and have the weights of two."""
    raw = OF_FAMILY["zamba2"]
    once, nine = (_read(raw | {"num_mem_blocks": number}) for number in (1, 9))
    work: dict[str, Any] = {"kind": "evaluate", "batch": 8, "seq": 1024}
    shared, own = (mw.estimate(model, "h100-80g-sxm:8", **work) for model in (once, nine))
    assert shared.flop_per_step == own.flop_per_step
    hidden = 2560
    block = 3 * (2 * hidden) ** 2 + 2 * hidden**2 + 3 * 4 * hidden**2 + 3 * hidden
    assert num_params(nine) - num_params(once) == 8 * block
    saved = own.memory_bytes["weights"] - shared.memory_bytes["weights"]
    assert saved == pytest.approx(2 * 8 * block)
    with pytest.raises(MeshwiseError, match="share weights"):
        mw.estimate(once, "h100-80g-sxm:8", "pp=2", batch=8, seq=1024)


@pytest.mark.parametrize(("config", "stated", "keys"), table("tables")["huggingface"]["quantized"], ids=str)
def test_who_serves_quantized_weights_is_told_how(config: str, stated: dict[str, Any], keys: str) -> None:
    """And no more once the plan says so, which `serve` takes them for that names no format."""
    model = _read(RAW[config] | {"quantization_config": stated})
    assert f"add {keys}" in quantized_note(model, parse_plan(""))[0]
    assert quantized_note(model, parse_plan(keys)) == []
    assert (as_released(model, ()), as_released(model, ["dtype"])) == (plan_keys(keys), {})


def test_layers_with_experts() -> None:
    """Qwen names the dense layers, DeepSeek the first one with experts and a step."""
    qwen = _read({**RAW["qwen3-30b-a3b"], "mlp_only_layers": [1, 0]}).moe
    assert qwen is not None
    assert (qwen.first_dense_layers, qwen.every) == (2, 1)
    irregular = _read({**RAW["qwen3-30b-a3b"], "mlp_only_layers": [3]})
    assert [is_moe_layer(irregular, layer) for layer in range(5)] == [True, True, True, False, True]
    assert num_moe_layers(irregular) == irregular.num_layers - 1
    late = _read({**RAW["qwen2.5-7b"], "use_sliding_window": True, "max_window_layers": 3})
    assert [layer_kind(late, layer).window for layer in range(5)] == [0, 0, 0, 131072, 131072]
    deepseek = _read({**RAW["deepseek-v3"], "moe_layer_freq": 4, "first_k_dense_replace": 3}).moe
    assert deepseek is not None
    assert (deepseek.first_dense_layers, deepseek.every) == (1, 4)  # layers 4, 8, 12, ...


@pytest.mark.parametrize(("name", "changes", "says"), BAD, ids=str)
def test_a_bad_config_is_refused_with_the_file_and_the_field(
    name: str, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ModelError) as caught:
        _read(RAW[name] | changes)
    message = str(caught.value)
    assert message.startswith("model/config.json: ") and says in message and "\n" not in message


@pytest.mark.parametrize(
    "text",
    [b"", b"\xff\xfe\x00", b"[1]", b'{"hidden_size": NaN}', b'{"model_type": "llama", "hidden_size": 1e999}',
     b'{"hidden_size": 1' + b"0" * 5000 + b"}", b"[" * 100_000],
    ids=lambda text: repr(text[:30]),
)  # fmt: skip
def test_a_file_that_is_no_config(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_config(path)


@pytest.mark.parametrize("text", ["n.__class__", "().__class__.__base__", "[n for n in (1,)]", "lambda: 1"])
def test_expressions_have_no_private_attributes_and_no_code(text: str) -> None:
    with pytest.raises(ValueError, match="is no part of an expression"):
        value_of(text, {"n": 1})


def test_every_field_that_a_rule_or_a_family_reads_is_stated() -> None:
    read = set(re.findall(r"\bc\.(\w+)", inspect.getsource(config_rules)))
    for spelling in (one for one in spellings().values() if one.block != "none"):
        for text in (*spelling.derived.values(), *spelling.taken.values(), *spelling.refused):
            names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
            read |= names - {"every", "among", "primes", "cycled", "renamed", "up", "int", "bool"}
        read |= {*spelling.derived}
    of_model = {*Model.__dataclass_fields__, *NAMES["purposes"], "architecture", "purpose", "classes"}
    for name, fields in NAMES["parts"].items():
        trees = [ast.walk(ast.parse(text)) for text in fields.values()]
        names = {node.id for tree in trees for node in tree if isinstance(node, ast.Name)}
        read |= names - {*fields, "int", "bool", "str", "isinstance", "max"}
        read -= of_model if name.endswith(" head") else set()
    assert read <= {*DEFAULTS}
