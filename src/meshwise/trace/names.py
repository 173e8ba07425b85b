"""How traces name what they show, as `catalog/trace_names.toml` says."""

from __future__ import annotations

import re

from meshwise.core.files import read_catalog

_CATALOG = read_catalog("trace_names.toml")
CLASSES, PARTS = (
    {name: re.compile("|".join(words), re.IGNORECASE) for name, words in _CATALOG[what].items()}
    for what in ("classes", "parts")
)
"""What names of kernels and operators, and of modules, have in them by class, and by part of a model."""
KINDS: dict[str, str] = {
    category: kind for kind, categories in _CATALOG["categories"].items() for category in categories
}
"""Kinds of events by Kineto's category."""
COLLECTIVES: dict[str, str] = _CATALOG["collectives"]
"""Collectives by what names of kernels and calls have in them: the first that is found counts."""
