"""Finding a model: a preset of the catalog (`catalog/models.toml`), an alias of one, or a `config.json`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from meshwise.core.errors import ModelError, did_you_mean
from meshwise.core.files import read_catalog
from meshwise.model.architecture import Model, checked_model
from meshwise.model.huggingface import read_config


@cache
def models() -> dict[str, Model]:
    """All models of the catalog by name."""
    raw = read_catalog("models.toml")
    families = raw["families"]
    return {
        name: _model_from_entry(name, families[entry.pop("family")] | entry, "models.toml")
        for name, entry in raw["models"].items()
    }


def _model_from_entry(name: str, entry: dict[str, Any], where: str) -> Model:
    """A model from the fields of `Model`; heads are `hidden / num_heads` wide and MHA if not stated.

    In place of all `layers`: `layer_cycle`, blocks that repeat, or `layer_runs`, how often each block comes
    before the next.
    """
    at = f"{where}, model {name!r}"
    entry = {
        "name": name,
        "num_kv_heads": entry.get("num_heads"),
        "head_dim": entry.get("hidden", 0) // entry.get("num_heads", 1),
    } | entry
    if cycle := entry.pop("layer_cycle", None):
        entry["layers"] = [cycle[i % len(cycle)] for i in range(entry["num_layers"])]
    if runs := entry.pop("layer_runs", None):
        entry["layers"] = [block for number, block in runs for _ in range(number)]
    if "checked" in entry:
        entry["checked"] = str(entry["checked"])
    try:
        model = msgspec.convert(entry, Model)
    except msgspec.ValidationError as error:
        raise ModelError(f"{at}: {error}") from None
    return checked_model(model, at)


def model_names() -> list[str]:
    """The names of the model presets."""
    return list(models())


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
    wanted = text.lower()
    for model in models().values():
        if wanted == model.name or wanted in map(str.lower, model.aliases):
            return model
    if text.endswith(".json") or "/" in text or _exists(text):
        return read_config(text, like)
    if like:
        raise ModelError(f"like={like} is for the path of a config.json, and {text!r} is none")
    near = did_you_mean(text, models(), "meshwise list models shows all")
    raise ModelError(f"no model is called {text!r}, and no config.json is there; {near}")
