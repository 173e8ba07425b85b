"""The arguments that each framework takes: names, types, allowed values and defaults at a stated version.

The lists (`catalog/framework_arguments.json`, and of post-training `rl_arguments.json`) were read from each
project's own parser or field definitions; they hold the arguments that say something about a job or a model.
"""

import re
from collections import ChainMap
from functools import cache
from typing import Any

import msgspec

from meshwise.core.errors import DataError
from meshwise.core.files import catalog_text
from meshwise.launch.tables import OF_TRAINER

TRAINER = "transformers-trainer"
"""The arguments of the Hugging Face Trainer, written `--name`, which go with DeepSpeed and Accelerate."""
_BUILDS_ON = {"megatron-bridge": "megatron-lm", "peft": "accelerate"}
_TYPES = {"int": int, "float": float, "bool": bool, "flag": bool}
TORCH_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "uint8"}
"""Types of numbers by their names in torch, in which Megatron keeps 8-bit states as bytes."""


class Argument(msgspec.Struct, frozen=True):
    """One argument: its type, the values that it may have (none: any of its type), and its default."""

    type: str
    values: list[Any] | None = None
    default: Any = None

    @property
    def unstated(self) -> Any:
        """What holds where the argument is not written."""
        return False if self.type in ("flag", "bool") and self.default is None else self.default


class Framework(msgspec.Struct, frozen=True):
    """All arguments of a framework by name, with the version, source and date of the list."""

    version: str
    source: str
    date: str
    arguments: dict[str, Argument]


@cache
def framework_arguments(name: str) -> Framework:
    """The list of `name`, with that of the software that it builds on."""
    texts = map(catalog_text, ("framework_arguments.json", "rl_arguments.json"))
    lists = ChainMap(*(msgspec.json.decode(text, type=dict[str, Framework]) for text in texts))
    if name in OF_TRAINER:
        others = {f"--{key}": argument for key, argument in lists[TRAINER].arguments.items()}
    else:
        others = lists[_BUILDS_ON[name]].arguments if name in _BUILDS_ON else {}
    return msgspec.structs.replace(lists[name], arguments=others | lists[name].arguments)


def with_version(name: str) -> str:
    """A framework and the version of its list, in a few words."""
    version = re.split(r" \(| over |;", framework_arguments(name).version)[0]
    return version if version.startswith(name) else f"{name} {version.split()[-1]}"


def read_value(framework: str, name: str, value: Any) -> Any:
    """`value`, or what its text says, in the type of the argument; DataError where it is not allowed."""
    argument = framework_arguments(framework).arguments[name]
    try:
        found = _convert(argument.type, value)
    except (ValueError, TypeError, msgspec.ValidationError):
        raise DataError(f"{framework}: {name} {value} must be of type {argument.type}") from None
    if argument.values is not None:
        for one in found if isinstance(found, list) else [found]:
            if one not in argument.values:
                known = ", ".join(map(str, argument.values))
                raise DataError(f"{framework} {name} does not take {one}; it takes {known}")
    return found


def _convert(kind: str, value: Any) -> Any:
    if kind.startswith("list of "):
        parts = re.split(r"[\s,]+", value.strip("[] ")) if isinstance(value, str) else value
        parts = parts if isinstance(parts, list | tuple) else [parts]
        return [_convert(kind.removeprefix("list of "), part) for part in parts]
    if isinstance(value, list) and kind != "text or list":
        (value,) = value
    if kind == "dtype":  # as an object, which strings do not become where none was set
        return {"_target_": f"torch.{TORCH_DTYPES[value]}", "_call_": False}
    if kind in _TYPES:
        text = value.lower() if _TYPES[kind] is bool and isinstance(value, str) else value
        return msgspec.convert(text, _TYPES[kind], strict=False)
    return value if kind in ("other", "text or list") else str(value)
