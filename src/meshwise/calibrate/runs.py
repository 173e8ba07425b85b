"""Measured training runs, read from CSV: one `Run` a row, one field a column.

Two kinds of file are read, told apart by their header. *Published runs* (`docs/data.md` documents every
column; `catalog/published_runs.csv` ships with the package) state model, hardware, software and plan in
columns, and at least one of step time, tokens/s and memory. *Measured iterations* are a grid of plans of
GPT models on one A100 cluster, whose other facts (`catalog/iterations.toml`) hold for the whole file.

A blank cell means unknown: the field is None. Units are part of the column's name, so a cell is a bare
number or one of a few words; anything else is refused, and so is a column that looks like a misspelled
one. A row that cannot be read becomes a `BadRow` that names file, line, column and what is expected; the
good rows still count. Columns for people (`PROSE`) are never read.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import msgspec

from meshwise.calibrate.table import BadCell, BadRow, header, read_each
from meshwise.core.errors import DataError, ModelError
from meshwise.core.expressions import formulas
from meshwise.core.files import read_catalog
from meshwise.core.refusals import refuse
from meshwise.core.toml import held_types
from meshwise.model.find import find_model

_COLUMNS = read_catalog("run_columns.toml")
_KINDS = held_types(_COLUMNS["kinds"])
"""What a cell may hold, by the name that `catalog/run_columns.toml` has for it."""
_NEEDED, _OTHERS = _COLUMNS["needed"], _COLUMNS["others"]
_HELD: dict[str, Any] = _NEEDED | _OTHERS
_TYPES = {
    name: Literal[tuple(held)] if isinstance(held, list) else _KINDS[held] for name, held in _HELD.items()
}
_FIELDS: list[Any] = [(name, _TYPES[name]) for name in _NEEDED]
_FIELDS += [(name, _TYPES[name] | None, None) for name in _OTHERS] + [("where", str, "")]
_Columns: Any = msgspec.defstruct("_Columns", _FIELDS, frozen=True, kw_only=True, forbid_unknown_fields=True)


class Run(_Columns):
    """One measured run as its row states it, a field a column; None where the row does not say.

    `where` is not a column: it names the file and the line.
    """

    @property
    def step_s(self) -> float | None:
        """Measured seconds of a step: stated, from tokens/s, or from TFLOP/s by the source's convention."""
        if self.step_time_s is None and self.tokens_per_s_per_gpu is not None:
            return self.global_batch * self.seq_len / (self.tokens_per_s_per_gpu * self.gpus)
        return self.step_time_s or self.derived_step_time_s

    @property
    def memory_bytes(self) -> float | None:
        """Measured bytes of a GPU: what reports memory (PyTorch, nvidia-smi) counts in GiB."""
        return None if self.mem_gb_per_gpu is None else self.mem_gb_per_gpu * 2**30


MEASURED = ("step_time_s", "tokens_per_s_per_gpu", "derived_step_time_s", "mem_gb_per_gpu")

SHAPE: dict[str, str] = _COLUMNS["shape"]
"""Columns that may be empty where `model` is a preset or the path of a config, and the fields of `Model`."""
REQUIRED = tuple(name for name in _NEEDED if name not in SHAPE)

_CATALOG = read_catalog("iterations.toml")
PROSE = _CATALOG["prose"]
_ITERATION_COLUMNS: tuple[str, ...] = tuple(_CATALOG["columns"])


def published_runs() -> Path:
    """The published runs that ship with the package."""
    return Path(str(resources.files("meshwise") / "catalog" / "published_runs.csv"))


def unseen_runs() -> Path:
    """The table of measured runs to which no constant is fitted: they judge, and widen intervals."""
    return published_runs().with_name("unseen_runs.csv")


def read_runs(path: Path) -> tuple[list[Run], list[BadRow]]:
    """The runs of one CSV file and its bad rows; DataError for a file that is no such table."""
    names = header(path)
    _check_header(path, names)

    def run(cells: dict[str, str], _: str, number: int) -> Run:
        stated = _as_published(cells, number) if is_iterations(names) else cells
        return _run(stated, f"{path}, line {number}")

    return read_each(path, run)


def publication(source: str) -> str:
    """Who measured: the repository or the paper of a row's `source`, without document, release or table."""
    first = source.split(" ")[0]
    return first if "/" in first else re.split(r",| \(| section", source)[0]


def is_iterations(names: Sequence[str]) -> bool:
    """Whether a header is that of measured iterations."""
    return "measured_ms" in names and "seq_len" not in names


def _check_header(path: Path, names: Sequence[str]) -> None:
    wanted = _ITERATION_COLUMNS if is_iterations(names) else REQUIRED
    lacks = ", ".join(name for name in wanted if name not in names)
    known: dict[str, Any] = {"required": ", ".join(REQUIRED), "known": ", ".join(MEASURED), "lacks": lacks}
    known["is_measured"] = not {*MEASURED, "measured_ms"}.isdisjoint(names)
    refuse("header of runs", DataError, f"{path}, line 1: ", **known)
    for name in unread_columns(names):
        if near := difflib.get_close_matches(name, _TYPES, n=1, cutoff=0.8):
            raise DataError(f"{path}, line 1: no column is called {name!r}; do you mean {near[0]!r}?")


def unread_columns(names: Sequence[str]) -> list[str]:
    """Columns of a table of runs that are neither read nor known to be for people."""
    known = (*_ITERATION_COLUMNS, "kind", "calculon_ms") if is_iterations(names) else (*_TYPES, *PROSE)
    return [name for name in names if name not in known]


def _run(texts: Mapping[str, str], where: str) -> Run:
    values = {name: _value(name, texts[name]) for name in _HELD if texts.get(name)}
    if missing := [name for name in REQUIRED if name not in values]:
        raise BadCell("the cell is empty; give a value", missing[0])
    if unsaid := [name for name in SHAPE if name not in values]:
        try:
            model = find_model(values["model"])
        except ModelError as error:
            raise BadCell(f"the cell is empty, and {error}", unsaid[0]) from None
        values |= {name: getattr(model, SHAPE[name]) for name in unsaid}
    if not set(MEASURED) & set(values):
        raise BadCell(f"nothing is measured; give one of {', '.join(MEASURED)}")
    return Run(where=where, **values)


def _value(column: str, text: str, held: str = "") -> Any:
    """What a cell says, which holds what its column does, or what `held` names."""
    try:
        return msgspec.convert(text, _KINDS.get(held, _TYPES.get(column)), strict=False)
    except msgspec.ValidationError:
        shown = text if len(text) <= 40 else text[:37] + "..."
        raise BadCell(f"{shown!r} is not {_expected(held or _HELD[column])}", column) from None


def _expected(held: str | list[Any]) -> str:
    """What a cell holds, in words."""
    if isinstance(held, list):
        return "one of " + ", ".join(map(str, held))
    return str(_KINDS[held].__metadata__[0].description)


def _as_published(texts: Mapping[str, str], line: int) -> dict[str, str]:
    """A measured iteration in the columns of published runs."""
    if missing := [name for name in _ITERATION_COLUMNS if not texts[name]]:
        raise BadCell("the cell is empty; give a value", missing[0])
    kind, width = texts.get("kind") or "iterations", _value("hidden", texts["hidden"])
    ms = _value("measured_ms", texts["measured_ms"], "number")
    names = {"row": texts, "kind": kind, "width": width, "ms": ms, "line": line, "str": str}
    usual = _CATALOG["facts"] | (_CATALOG["single_nodes"] if kind == "single_node" else {})
    stated = {name: texts[name] for name in _ITERATION_COLUMNS if name in _TYPES}
    return usual | stated | formulas(_CATALOG["derived"], names)
