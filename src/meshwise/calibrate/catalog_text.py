"""Fitted constants as the TOML of a catalog file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def catalog_text(head: str, sections: Mapping[str, Mapping[str, Any]]) -> str:
    """The comment `head`, then one table for each of `sections`, in their order."""
    lines = [head.rstrip()]
    for name, values in sections.items():
        lines += ["", f"[{name}]", *(f"{key} = {_value(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def _value(value: float | bool | str | Sequence[Any] | Mapping[str, Any]) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, Sequence):
        return f"[{', '.join(map(_value, value))}]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
