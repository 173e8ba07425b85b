"""Jobs that fine-tune on a few cards: a script for peft or Unsloth.

A setting `Callee.name` is an argument of that callee: `LoraConfig.r`, `SFTConfig.max_length`. The script
reads JSON lines with a "text" each, packs them, and leaves what a plan does not say (learning rate, epochs)
to the defaults of the trainer.
"""

import re
from pathlib import Path
from textwrap import indent
from typing import Any

from meshwise.launch.tables import launch_tables
from meshwise.model.architecture import Model
from meshwise.model.find import HUB

_UNUSED = re.compile(r"^from \w+ import (\w+)\n(?!.*\b\1\b)", re.MULTILINE | re.DOTALL)
"""An import of one name that the rest of a script does not use."""


def model_id(model: Model) -> str:
    """Where the weights are: of a preset on the hub, of a config.json beside it; else the model's name."""
    folder = str(Path(model.source).resolve().parent) if model.source.endswith(".json") else model.name
    return next((name for name in (*HUB.findall(model.source), *model.aliases) if "/" in name), folder)


def peft_script(settings: dict[str, Any], model: Model) -> str:
    """A script for transformers, peft and trl."""
    load = _arguments(settings, "from_pretrained")
    if quantized := _arguments(settings, "BitsAndBytesConfig"):
        load["quantization_config"] = _call("BitsAndBytesConfig", **quantized)
    adapters = _arguments(settings, "LoraConfig")
    peft = {"peft_config": _call("LoraConfig", **adapters, task_type="CAUSAL_LM")} if adapters else {}
    loaded = _call("AutoModelForCausalLM.from_pretrained", model_id(model), **load)
    return _script("peft", settings, model, f"model = {loaded}", peft)


def unsloth_script(settings: dict[str, Any], model: Model) -> str:
    """A script for Unsloth and trl."""
    load = _arguments(settings, "from_pretrained")
    loaded = f"model, tokenizer = {_call('FastLanguageModel.from_pretrained', model_id(model), **load)}"
    if adapters := _arguments(settings, "get_peft_model"):
        loaded += f"\nmodel = {_call('FastLanguageModel.get_peft_model', _Code('model'), **adapters)}"
    return _script("unsloth", settings, model, loaded, {"processing_class": _Code("tokenizer")})


def _arguments(settings: dict[str, Any], callee: str) -> dict[str, Any]:
    parts = ((*name.partition("."), one) for name, one in settings.items())
    return {name: one for of, _, name, one in parts if of == callee}


def _script(
    framework: str, settings: dict[str, Any], model: Model, loaded: str, of_trainer: dict[str, Any]
) -> str:
    args = _call("SFTConfig", output_dir="out", **_arguments(settings, "SFTConfig"))
    data = {"model": _Code("model"), "train_dataset": _Code("data")}
    trained = _call("SFTTrainer", **data, **of_trainer, args=args)
    names = {"model": model.name, "loaded": loaded, "trained": trained}
    return _UNUSED.sub("", launch_tables().scripts[framework] % names)


class _Code(str):
    """Text that stands in a script as it is."""

    __slots__ = ()


def _call(name: str, *first: Any, **arguments: Any) -> _Code:
    """A call, an argument on each line."""
    items = [*map(_literal, first), *(f"{key}={_literal(value)}" for key, value in arguments.items())]
    return _Code(f"{name}(\n" + indent("".join(f"{item},\n" for item in items), "    ") + ")")


def _literal(value: Any) -> str:
    if isinstance(value, _Code):
        return value
    if isinstance(value, str):
        return f'"{value}"'
    return f"[{', '.join(map(_literal, value))}]" if isinstance(value, list) else repr(value)
