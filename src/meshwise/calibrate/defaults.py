"""What a training framework does where a run does not say: `catalog/frameworks.toml`.

Blank cells of a run are filled from the first entry that names its framework and is not older than its
release. Only what changes a prediction has a default; facts of the model and the hardware have none.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from meshwise.calibrate.runs import Run
from meshwise.core.files import read_catalog

_CATALOG = read_catalog("frameworks.toml")
_USUAL = _CATALOG["usual"] | {"recompute_kind": None}
if TYPE_CHECKING:
    Defaults = Any
else:
    _TEXTS = dict.fromkeys(("source", "software"), str) | {"names": list[str], "recompute_kind": str | None}
    _TYPES = {name: type(value) for name, value in _USUAL.items()} | _TEXTS
    Defaults = msgspec.defstruct("Defaults", _TYPES.items(), forbid_unknown_fields=True)
"""One entry of the catalog. Fields with the name of a column of `Run` fill its blank cells."""

HOST_RANKS = 16
"""The most chips of one host."""


@cache
def entries() -> tuple[Defaults, ...]:
    """The catalog, in its order."""
    return tuple(msgspec.convert(_USUAL | entry, Defaults) for entry in _CATALOG["frameworks"])


def defaults_of(run: Run) -> Defaults:
    """The entry for the framework and release of `run`; where there is none, that without a name."""
    name = (run.framework or "").lower().replace("_", "-").replace(" ", "-")
    month = released(run)
    fitting = [entry for entry in entries() if month <= entry.until]
    return next(entry for known in (name, "") for entry in fitting if known in entry.names)


def released(run: Run) -> str:
    """Year and month of a release like 26.04.01 or 2024-12, or of one that the catalog dates.

    Without one, January of the run's year.
    """
    dated = _CATALOG["releases"].get((run.framework or "").lower(), {})
    release = run.framework_release or ""
    found = re.fullmatch(r"(?:20)?(\d\d)[.-](0[1-9]|1[0-2])(?:[.-]\d\d)?", dated.get(release, release))
    return f"20{found[1]}-{found[2]}" if found else f"{run.year}-01"


def filled(run: Run) -> Run:
    """`run` with its blank cells filled by the defaults of its framework."""
    defaults = defaults_of(run)
    blank = [name for name in Defaults.__struct_fields__ if getattr(run, name, "") is None]
    values = {name: getattr(defaults, name) for name in blank}
    if "dispatcher" in values and (run.scale_up_ranks or 0) > HOST_RANKS:
        values["dispatcher"] = defaults.dispatcher_in_racks or defaults.dispatcher
    return msgspec.structs.replace(run, **values)
