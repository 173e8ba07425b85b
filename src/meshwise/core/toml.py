"""Tables as the text of a TOML file, and fitted constants as that of a catalog file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec


def toml_text(tables: Iterable[tuple[str, Mapping[str, Any]]], digits: int | None = None) -> str:
    """Each table under its head (`[chip]`, `[[levels]]`; of the first perhaps none), floats to `digits`."""
    blocks = (
        "\n".join(
            [*filter(None, [head]), *(f"{key} = {_value(value, digits)}" for key, value in table.items())]
        )
        for head, table in tables
    )
    return "\n\n".join(blocks) + "\n"


def catalog_toml(head: str, sections: Mapping[str, Mapping[str, Any]]) -> str:
    """The comment `head`, then one table for each of `sections`, in their order, floats to four digits."""
    tables = ((f"[{name}]", values) for name, values in sections.items())
    return f"{head.rstrip()}\n\n{toml_text(tables, 4)}"


def _value(value: Any, digits: int | None) -> str:
    """A text, number, list or table as TOML writes it inline."""
    if isinstance(value, float) and digits is not None:
        return f"{value:.{digits}g}"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_value(item, digits)}" for key, item in value.items()) + " }"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(item, digits) for item in value)}]"
    return msgspec.json.encode(value).decode()
