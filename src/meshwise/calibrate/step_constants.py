"""The constants of `catalog/overheads.toml`, as `catalog/step_constants.toml` says which are fitted, stated
or tied to another, and why.
"""

from __future__ import annotations

from meshwise.core.files import read_catalog

Constants = dict[str, float]

_CATALOG = read_catalog("step_constants.toml")
TIME_BOXES, MEMORY_BOXES = _CATALOG["time"], _CATALOG["memory"]
LIMITS: dict[str, tuple[float, float, float]] = TIME_BOXES | MEMORY_BOXES
"""Where the search of each fitted constant starts, and the least and most that make sense."""
START: Constants = {name: start for name, (start, _, _) in LIMITS.items()}
STATED = {name: (entry["value"], entry["source"]) for name, entry in _CATALOG["stated"].items()}
TIED: dict[str, tuple[str, float]] = {name: (of["to"], of["factor"]) for name, of in _CATALOG["tied"].items()}


def every(fitted: Constants) -> Constants:
    """The fitted constants, those stated, and those tied to another."""
    known = {name: value for name, (value, _) in STATED.items()} | fitted
    for name, (other, factor) in TIED.items():
        known[name] = factor * known[other]
    return known
