"""Finding a model: a preset of the catalog, by its name as people write it, or a `config.json`.

Presets are written as fields of `Model` (`catalog/models.toml`) or as the config.json that their makers
publish (`catalog/configs.toml`). A name may have its organisation in front, and behind it what says nothing
of the architecture: `Qwen/Qwen3-32B-FP8` is qwen3-32b.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from meshwise.core.errors import ModelError, did_you_mean
from meshwise.core.files import read_catalog
from meshwise.core.toml import converted
from meshwise.model.architecture import Model, checked_model
from meshwise.model.config_fields import NAMES
from meshwise.model.huggingface import model_from_config, read_config

_ENDINGS = re.compile(
    r"-(instruct|chat|base|it|pt|hf|rl|sft|dpo|think|thinking|preview|reasoning|fp8|fp4|nvfp4|mxfp4|bf16|int4"
    r"|int8|awq|gptq|gguf|dynamic|block|kv|[vr]\d+(\.\d+)*|\d{4,8}|\d{2}-\d{4})$"
)
"""What a name may end with beside that of the architecture: training, types of weights, versions, dates."""

_FORMATS = NAMES["formats"] | NAMES["formats_of_names"]
"""Plan keys of the types of weights that a name may say."""

_ACTIVE = re.compile(r"-a\d+(\.\d+)?b$")
"""How a mixture's name ends that says its active parameters, which many leave out."""

HUB = re.compile(r"huggingface\.co/([^/]+/[^/]+)/blob/main/(?:config|params)\.json$")
"""The name on the hub within the source of a preset: it is an alias."""


@cache
def _entries() -> dict[str, dict[str, Any]]:
    """All presets as they are written, by name."""
    raw = read_catalog("models.toml")
    own = {name: raw["families"][entry.pop("family")] | entry for name, entry in raw["models"].items()}
    return own | read_catalog("configs.toml")


@cache
def _preset(name: str) -> Model:
    entry = dict(_entries()[name])
    entry["checked"] = str(entry.get("checked", ""))
    if "config" not in entry:
        return _model_from_entry(name, entry)
    model = model_from_config(entry["config"], name=name, where=f"configs.toml, model {name!r}")
    aliases = tuple(entry.get("aliases", ()))
    return replace(model, source=entry["source"], checked=entry["checked"], aliases=aliases)


def models() -> dict[str, Model]:
    """All models of the catalog by name."""
    return {name: _preset(name) for name in _entries()}


def _model_from_entry(name: str, entry: dict[str, Any]) -> Model:
    """A model from the fields of `Model`; heads are `hidden / num_heads` wide and MHA if not stated.

    In place of all `layers`: `layer_cycle`, blocks that repeat, or `layer_runs`, how often each block comes
    before the next.
    """
    at = f"models.toml, model {name!r}"
    entry = {
        "name": name,
        "num_kv_heads": entry.get("num_heads"),
        "head_dim": entry.get("hidden", 0) // entry.get("num_heads", 1),
    } | entry
    if cycle := entry.pop("layer_cycle", None):
        entry["layers"] = [cycle[i % len(cycle)] for i in range(entry["num_layers"])]
    if runs := entry.pop("layer_runs", None):
        entry["layers"] = [block for number, block in runs for _ in range(number)]
    return checked_model(converted(entry, Model, at, ModelError), at)


def model_names() -> list[str]:
    """The names of the model presets."""
    return list(_entries())


def _letters(name: str) -> str:
    """The letters and digits of a name, and the points between digits: qwen35 is not qwen3.5."""
    return re.sub(r"(?<!\d)\.|\.(?!\d)|[^a-z0-9.]", "", name)


@cache
def _by_letters() -> dict[str, str]:
    names = (
        (alias, name)
        for name, entry in _entries().items()
        for alias in (*HUB.findall(entry["source"]), *entry.get("aliases", ()), name)
    )
    whole = {part: name for alias, name in names for part in _readings(alias)}
    without = {_letters(_ACTIVE.sub("", part)): name for part, name in whole.items()}
    return without | {_letters(part): name for part, name in whole.items()}


def _readings(name: str) -> tuple[str, ...]:
    """`name` in small letters, whole and without the organisation in front of it."""
    whole = re.sub(r"[ _]", "-", name.strip().lower())
    last = whole.rpartition("/")[2]
    return (whole, last) if re.search("[a-z]", last) else (whole,)


def _shorter(name: str) -> Iterator[str]:
    """`name`, and what is left of it without each of its endings."""
    while True:
        yield name
        shorter = _ENDINGS.sub("", name)
        if shorter == name:
            return
        name = shorter


def find_preset(text: str) -> Model | None:
    """The preset that `text` names, if it is no path and there is one."""
    if _is_path(text):
        return None
    known, names = _by_letters(), (part for one in _readings(text) for part in _shorter(one))
    found = next((known[_letters(name)] for name in names if _letters(name) in known), None)
    if found is None:
        return None
    formats = [_FORMATS[word] for word in _readings(text)[-1].split("-") if word in _FORMATS]
    return replace(_preset(found), quantized=formats[-1]) if formats else _preset(found)


def _is_path(text: str) -> bool:
    return text.count("/") > 1 or text.endswith(".json") or text.startswith(("/", ".", "~"))


def _exists(text: str) -> bool:
    try:
        return Path(text).exists()
    except OSError:  # longer than a path can be
        return False


def find_model(text: str) -> Model:
    """The model that `text` names: a preset or its alias, a `config.json`, or a directory holding one.

    `path/config.json,like=llama` reads the config of a family that is not known as one that is.
    """
    text, _, like = text.partition(",like=")
    if not like and not ("/" in text and _exists(text)) and (preset := find_preset(text)):
        return preset
    if _is_path(text) or _exists(text):
        return read_config(text, like)
    if like:
        raise ModelError(f"like={like} is for the path of a config.json, and {text!r} is none")
    near = did_you_mean(text.rpartition("/")[2], [*_entries()], "meshwise list models shows all")
    raise ModelError(f"no model is called {text!r}, and no config.json is there; {near}")
