"""YAML: texts of users as trees, trees as the text of a file.

PyYAML's safe loader makes plain values alone. A text is bounded before it is parsed, and the tree afterwards:
aliases (`*name`) may stand for more values than a machine holds.
"""

from collections.abc import Mapping
from typing import Any

from meshwise.core.errors import DataError
from meshwise.core.files import parse_text

MOST_BYTES = 2**18
"""Recipes and configurations have a few thousand bytes."""
MOST_VALUES = 10**5


def parse_yaml(text: str, name: str) -> dict[str, Any]:
    """The mapping that a user's YAML text called `name` is; DataError says what is wrong with it."""
    tree = parse_text(text, name, "YAML", yaml_value)
    if not isinstance(tree, dict):
        raise DataError(f"{name} is not valid YAML of a job: it has no `key: value`")
    return tree


def yaml_value(text: str) -> Any:
    """What a YAML text says: a mapping, a list or a plain value; ValueError where it says none."""
    import yaml

    if len(text) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES:,} characters")
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(f"{place}{getattr(error, 'problem', None) or error}") from None
    left, number = [tree], 0
    while left:
        value = left.pop()
        left += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        number += 1
        if number > MOST_VALUES:
            raise ValueError(f"it has more than {MOST_VALUES:,} values")
    return tree


def yaml_text(tree: Mapping[str, Any]) -> str:
    """Nested mappings and lists as the text of a file, in their order."""
    import yaml

    return yaml.safe_dump(dict(tree), sort_keys=False, allow_unicode=True, width=1000)
