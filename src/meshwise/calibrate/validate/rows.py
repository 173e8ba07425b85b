"""Published training runs, read from CSV into one plain form.

Two kinds of file are read, told apart by their header. *Published runs* state model, plan and batch in
full, and at least one of step time, tokens/s and memory. *Measured iterations* are a grid of plans of GPT
models on one A100 cluster, whose other facts (`ITERATIONS`) hold for the whole file. A row becomes a
`Run`; a cell that cannot be read becomes a `BadRow` that names file, line, column and what is expected,
and the good rows still count.

Step time comes from the first of: `step_time_s`; `tokens_per_s_per_gpu`, as batch x sequence / (tokens/s x
GPUs); `derived_step_time_s`, which a source's own FLOP convention led to. The tools that report memory
(PyTorch, nvidia-smi) count in GiB, whatever they print, so `mem_gb_per_gpu` is GiB.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwise.core.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One measured run as its row states it; None where the row is silent.

    Texts (`gpu`, `interconnect`, `zero`, `recompute`, `dtype`, `notes`) are as published.
    """

    id: str
    source: str
    year: int
    where: str
    model: str
    layers: int
    hidden: int
    ffn_hidden: int
    heads: int
    kv_heads: int
    vocab: int
    seq: int
    gpu: str
    gpus: int
    tp: int
    pp: int
    dp: int
    micro_batch: int
    global_batch: int
    dtype: str
    params_b: float | None = None
    experts: int | None = None
    topk: int | None = None
    expert_ffn: int | None = None
    gpus_per_node: int | None = None
    interconnect: str = ""
    virtual_pp: int | None = None
    cp: int | None = None
    ep: int | None = None
    zero: str = ""
    sequence_parallel: bool | None = None
    recompute: str = ""
    flash_attention: bool | None = None
    notes: str = ""
    step_s: float | None = None
    memory_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class BadRow:
    """A line that is no run, and the sentence that says why."""

    id: str
    source: str
    where: str
    reason: str


class _BadCell(Exception):
    pass


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise _BadCell(f"{_shown(text)} is not a number above zero")
    return value


def _count(text: str) -> int:
    try:
        value = _number(text)
    except _BadCell:
        value = 0.5
    if not value.is_integer() or value > 1e12:
        raise _BadCell(f"{_shown(text)} is not a whole number of at least 1")
    return int(value)


def _switch(text: str) -> bool:
    known = {"0": False, "1": True, "0.0": False, "1.0": True, "false": False, "true": True}
    if text.lower() not in known:
        raise _BadCell(f"{_shown(text)} is not 0 or 1")
    return known[text.lower()]


def _text(text: str) -> str:
    return text


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")


Reader = Callable[[str], Any]

# Column of the file -> (field of Run, how to read it).
_REQUIRED: dict[str, tuple[str, Reader]] = {
    "id": ("id", _text),
    "source": ("source", _text),
    "year": ("year", _count),
    "model": ("model", _text),
    "layers": ("layers", _count),
    "hidden": ("hidden", _count),
    "ffn_hidden": ("ffn_hidden", _count),
    "heads": ("heads", _count),
    "kv_heads": ("kv_heads", _count),
    "vocab": ("vocab", _count),
    "seq_len": ("seq", _count),
    "gpu": ("gpu", _text),
    "gpus": ("gpus", _count),
    "tp": ("tp", _count),
    "pp": ("pp", _count),
    "dp": ("dp", _count),
    "micro_batch": ("micro_batch", _count),
    "global_batch": ("global_batch", _count),
    "dtype": ("dtype", _text),
}
_OPTIONAL: dict[str, tuple[str, Reader]] = {
    "params_b": ("params_b", _number),
    "experts": ("experts", _count),
    "topk": ("topk", _count),
    "expert_ffn": ("expert_ffn", _count),
    "gpus_per_node": ("gpus_per_node", _count),
    "interconnect": ("interconnect", _text),
    "virtual_pp": ("virtual_pp", _count),
    "cp": ("cp", _count),
    "ep": ("ep", _count),
    "zero_stage_or_fsdp": ("zero", _text),
    "sequence_parallel": ("sequence_parallel", _switch),
    "recompute": ("recompute", _text),
    "flash_attention": ("flash_attention", _switch),
    "notes": ("notes", _text),
}
_MEASURED = ("step_time_s", "tokens_per_s_per_gpu", "derived_step_time_s", "mem_gb_per_gpu")

_ITERATION_COLUMNS: dict[str, tuple[str, Reader]] = {
    "gpus": ("gpus", _count),
    "global_batch": ("global_batch", _count),
    "micro_batch": ("micro_batch", _count),
    "hidden": ("hidden", _count),
    "heads": ("heads", _count),
    "layers": ("layers", _count),
    "sequence": ("seq", _count),
    "tp": ("tp", _count),
    "dp": ("dp", _count),
    "pp": ("pp", _count),
}
ITERATIONS: dict[str, Any] = {
    "year": 2022,
    "vocab": 50257,
    "gpu": "A100-SXM-80GB",
    "gpus_per_node": 8,
    "interconnect": "800 Gb/s InfiniBand per node",
    "zero": "0",
    "sequence_parallel": False,
    "recompute": "full",
    "dtype": "fp16",
    "flash_attention": False,
}
"""Facts of every measured iteration: Megatron-DeepSpeed under 1F1B. Source: vTrain (MICRO 2024), public
ground truth; 80 GB and InfiniBand assumed, as the platform of that paper."""


def read_runs(path: Path) -> tuple[list[Run], list[BadRow]]:
    """The runs of one CSV file and its bad rows; DataError for a file that is no such table."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            table = csv.DictReader(file)
            read = _reader(path, table.fieldnames or [])
            runs: list[Run] = []
            bad: list[BadRow] = []
            for cells in table:
                found = _read_line(cells, path, table.line_num, len(table.fieldnames or []), read)
                if isinstance(found, Run):
                    runs.append(found)
                else:
                    bad.append(found)
            return runs, bad
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; name a CSV file of measured runs") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is not a CSV file in UTF-8: {error}") from None


def columns(path: Path) -> list[str]:
    """The header of a CSV file."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return next(csv.reader(file), [])
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; name a CSV file of measurements") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is not a CSV file in UTF-8: {error}") from None


def is_iterations(header: list[str]) -> bool:
    """Whether a header is that of measured iterations."""
    return "measured_ms" in header and "seq_len" not in header


_Reader = Callable[[Mapping[str, str], str], Run]


def _reader(path: Path, header: Sequence[str]) -> _Reader:
    names = list(header)
    iterations = is_iterations(names)
    wanted = [*_ITERATION_COLUMNS, "measured_ms"] if iterations else list(_REQUIRED)
    missing = [name for name in wanted if name not in names]
    if missing:
        raise DataError(
            f"{path}, line 1: the header lacks the column {', '.join(missing)}; a table of runs has "
            f"{', '.join(_REQUIRED)} and one of {', '.join(_MEASURED)}"
        )
    if not iterations and not set(_MEASURED) & set(names):
        raise DataError(
            f"{path}, line 1: the header has no measured column; add one of {', '.join(_MEASURED)}"
        )
    return _iteration if iterations else _published


def _read_line(cells: dict[str, str], path: Path, line: int, width: int, read: _Reader) -> Run | BadRow:
    row_id, source = cells.get("id") or f"{path.stem}-{line}", cells.get("source") or path.stem
    where = f"{path}, line {line}"
    try:
        if None in cells or None in cells.values():
            raise _BadCell(f": the line does not have {width} cells")
        return read({name: text.strip() for name, text in cells.items()} | {"_line": str(line)}, where)
    except _BadCell as error:
        return BadRow(row_id, source, where, f"{where}{error}")


def _cell(cells: Mapping[str, str], column: str, reader: Reader) -> Any:
    try:
        return reader(cells[column])
    except _BadCell as error:
        raise _BadCell(f", column {column}: {error}") from None


def _fields(cells: Mapping[str, str], table: dict[str, tuple[str, Reader]]) -> dict[str, Any]:
    """The cells that are not empty, by field."""
    found: dict[str, Any] = {}
    for column, (field, reader) in table.items():
        if cells.get(column):
            found[field] = _cell(cells, column, reader)
        elif table is _REQUIRED:
            raise _BadCell(f", column {column}: the cell is empty; give a value")
    return found


def _published(cells: Mapping[str, str], where: str) -> Run:
    values = _fields(cells, _REQUIRED) | _fields(cells, _OPTIONAL)
    measured = {name: _cell(cells, name, _number) for name in _MEASURED if cells.get(name)}
    if not measured:
        raise _BadCell(f": nothing is measured; give one of {', '.join(_MEASURED)}")
    memory = measured.get("mem_gb_per_gpu")
    return Run(
        where=where,
        step_s=_step_s(values, measured),
        memory_bytes=None if memory is None else memory * 2**30,
        **values,
    )


def _step_s(values: Mapping[str, Any], measured: Mapping[str, Any]) -> float | None:
    if "step_time_s" in measured:
        return measured["step_time_s"]
    if "tokens_per_s_per_gpu" in measured:
        tokens = values["global_batch"] * values["seq"]
        return tokens / (measured["tokens_per_s_per_gpu"] * values["gpus"])
    return measured.get("derived_step_time_s")


def _iteration(cells: Mapping[str, str], where: str) -> Run:
    values = _fields(cells, _ITERATION_COLUMNS)
    missing = {field for field, _ in _ITERATION_COLUMNS.values()} - set(values)
    if missing:
        raise _BadCell(f", column {sorted(missing)[0]}: the cell is empty; give a value")
    kind = cells.get("kind") or "iterations"
    hidden, heads, layers = values["hidden"], values["heads"], values["layers"]
    return Run(
        id=f"{kind}-{cells['_line']}",
        source=f"vTrain ground truth, {kind}",
        where=where,
        model=f"GPT {layers}x{hidden}",
        ffn_hidden=4 * hidden,
        kv_heads=heads,
        step_s=_cell(cells, "measured_ms", _number) / 1e3,
        **values,
        **ITERATIONS,
    )
