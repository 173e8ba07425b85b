"""Recipes as OmegaConf has them: files that inherit from others, and settings that refer to others."""

import operator
import re
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

from meshwise.core.errors import DataError
from meshwise.core.files import read_text
from meshwise.core.toml import flat
from meshwise.core.yaml import parse_yaml
from meshwise.launch.facts import Facts

BASE_RECIPE = "grpo_math_1B.yaml"
"""The recipe of NeMo-RL in examples/configs from which all others inherit."""
_MOST_STEPS, _MOST_CHARACTERS = 20, 1000
"""Recipes that inherit one from another and references of a setting; characters of a value on the way."""
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_RESOLVERS: dict[str, Callable[[Any, Any], Any]] = {
    "mul": operator.mul,
    "add": operator.add,
    "div": operator.truediv,
    "max": max,
    "min": min,
}


def read_recipe(text: str, path: Path, above: tuple[Path, ...] = ()) -> Facts:
    """The settings of a recipe, `text` of `path`, by dotted name, with those that it inherits from others."""
    tree, found = parse_yaml(text, str(path)), {}
    bases = tree.pop("defaults", None) or []
    for name in [bases] if isinstance(bases, str) else bases:
        base = (path.parent / str(name)).resolve()
        if base in above or len(above) > _MOST_STEPS:
            raise DataError(f"{path} inherits from {name}, and that from {path}")
        if base.name == BASE_RECIPE and not base.is_file():
            found["grpo.name"] = BASE_RECIPE  # whose settings are the defaults of the catalog
        else:
            found |= read_recipe(read_text(base, "recipe"), base, (*above, base))
    return found | flat(tree)


def resolved(settings: Facts) -> Facts:
    """`settings` with values for `${name}`, `${.name}` (beside it) and `${mul:a,b}`, where there are some."""
    return {name: _follow(name, value, settings) for name, value in settings.items()}


def _follow(name: str, value: Any, settings: Facts) -> Any:
    text = value
    for _ in range(_MOST_STEPS):
        if not isinstance(text, str) or "${" not in text or len(text) > _MOST_CHARACTERS:
            break
        try:
            text = _REFERENCE.sub(lambda match: str(_refer(match[1].strip(), name, settings)), text)
        except (KeyError, ValueError, ZeroDivisionError, OverflowError):
            break
    return value if "${" in str(text) else text


def _refer(text: str, at: str, settings: Facts) -> Any:
    """What a reference of the setting `at` stands for, no other within it; KeyError where nothing says it."""
    function, _, rest = text.rpartition(":")
    values = [part.strip() for part in rest.split(",")]
    if function == "oc.select":
        return settings.get(values[0], values[-1])
    if function:
        number: float = reduce(_RESOLVERS[function], [float(value) for value in values])
        return int(number) if number.is_integer() else number
    name = text.lstrip(".")
    beside = at.split(".")[: len(name) - len(text)] if text != name else []
    return settings[".".join([*beside, name])]
