"""Jobs that fine-tune on one card: a script for peft or Unsloth, or the words of a recipe of torchtune.

A setting `Callee.name` is an argument of that callee: `LoraConfig.r`, `SFTConfig.max_length`. The script
reads JSON lines with a "text" each, packs them, and leaves what a plan does not say (learning rate, epochs)
to the defaults of the trainer.
"""

from __future__ import annotations

from typing import Any

from meshwise.launch.facts import Facts
from meshwise.launch.tables import launch_tables
from meshwise.model.architecture import Model

_HEAD = """\
# Fine-tuning of {model}: python train.py DATA.jsonl (a line: {{"text": "..."}})
import sys

{imports}

data = load_dataset("json", data_files=sys.argv[1], split="train")
"""
_PEFT_IMPORTS = """\
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer"""
_UNSLOTH_IMPORTS = """\
from unsloth import FastLanguageModel  # before the others, which it changes
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer"""


def model_id(model: Model) -> str:
    """Where the weights of a preset are on the hub; the name of a model that is none."""
    return next((alias for alias in model.aliases if "/" in alias), model.name)


def peft_script(settings: dict[str, Any], model: Model) -> str:
    """A script for transformers, peft and trl."""
    load = _arguments(settings, "from_pretrained")
    if quantized := _arguments(settings, "BitsAndBytesConfig"):
        load["quantization_config"] = _Code("BitsAndBytesConfig", quantized)
    trainer: dict[str, Any] = {"model": _Name("model"), "train_dataset": _Name("data")}
    if adapters := _arguments(settings, "LoraConfig"):
        trainer["peft_config"] = _Code("LoraConfig", adapters | {"task_type": "CAUSAL_LM"})
    trainer["args"] = _Code("SFTConfig", {"output_dir": "out"} | _arguments(settings, "SFTConfig"))
    return (
        _HEAD.format(model=model.name, imports=_PEFT_IMPORTS)
        + f"model = {_Code('AutoModelForCausalLM.from_pretrained', load, model_id(model))}\n"
        + _trained(trainer)
    )


def unsloth_script(settings: dict[str, Any], model: Model) -> str:
    """A script for Unsloth and trl."""
    load = _Code(
        "FastLanguageModel.from_pretrained", _arguments(settings, "from_pretrained"), model_id(model)
    )
    adapters = _Code(
        "FastLanguageModel.get_peft_model", _arguments(settings, "get_peft_model"), _Name("model")
    )
    trainer = {
        "model": _Name("model"),
        "processing_class": _Name("tokenizer"),
        "train_dataset": _Name("data"),
        "args": _Code("SFTConfig", {"output_dir": "out"} | _arguments(settings, "SFTConfig")),
    }
    return (
        _HEAD.format(model=model.name, imports=_UNSLOTH_IMPORTS)
        + f"model, tokenizer = {load}\n"
        + (f"model = {adapters}\n" if adapters.arguments else "")
        + _trained(trainer)
    )


def torchtune_words(settings: dict[str, Any], model: Model, facts: Facts) -> tuple[list[str], str]:
    """The words behind `tune run`, and what its configs lack for this model (empty: nothing)."""
    method = "full" if not facts["lora_rank"] else "qlora" if facts.get("frozen_dtype") else "lora"
    place, has = launch_tables().torchtune_models.get(model.name, ("MODEL", ""))
    recipe = "full_finetune_single_device" if method == "full" else "lora_finetune_single_device"
    words = [f"{name}={_word(value)}" for name, value in settings.items()]
    lacks = "" if method in has.split() else f"model={model.name}: torchtune has no config of {method} for it"
    return [recipe, "--config", f"{place}_{method}_single_device", *words], lacks


def _arguments(settings: dict[str, Any], callee: str) -> dict[str, Any]:
    start = f"{callee}."
    return {name.removeprefix(start): one for name, one in settings.items() if name.startswith(start)}


def _trained(trainer: dict[str, Any]) -> str:
    return f"trainer = {_Code('SFTTrainer', trainer)}\ntrainer.train()\ntrainer.save_model()\n"


def _word(value: Any) -> str:
    return f"[{','.join(value)}]" if isinstance(value, list) else str(value)


class _Name:
    """A name in a script."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


class _Code(_Name):
    """A call in a script, an argument on each line."""

    def __init__(self, name: str, arguments: dict[str, Any], *first: Any) -> None:
        super().__init__(name)
        self.arguments, self.first = arguments, first

    def __repr__(self) -> str:
        items = [*map(_literal, self.first), *(f"{key}={_literal(x)}" for key, x in self.arguments.items())]
        inside = "".join(f"{item},\n" for item in items)
        return f"{self.name}(\n" + "".join(f"    {line}\n" for line in inside.splitlines()) + ")"


def _literal(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return f"[{', '.join(map(_literal, value))}]" if isinstance(value, list) else repr(value)
