"""The catalog as tables: models, chips and clusters with their sources."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from meshwise.core.units import with_prefix
from meshwise.machine.hardware import chips, cluster_names, find_cluster
from meshwise.model.find import models
from meshwise.model.weights import num_active_params, num_params


def catalog_rows(what: str) -> list[dict[str, Any]]:
    """The entries of one part of the catalog as plain values (SI units)."""
    return {"models": _models, "chips": _chips, "clusters": _clusters}[what]()


def _models() -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "num_params": num_params(model),
            "num_active_params": num_active_params(model),
            "num_layers": model.num_layers,
            "hidden": model.hidden,
            "num_heads": model.num_heads,
            "source": model.source,
            "checked": model.checked,
        }
        for name, model in models().items()
    ]


def _chips() -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "generation": chip.generation,
            "memory_bytes": chip.memory_bytes,
            "memory_bytes_per_s": chip.memory_bytes_per_s,
            "matrix_flop_per_s": chip.matrix_flop_per_s,
            "vector_flop_per_s": chip.vector_flop_per_s,
            "levels": [
                {"name": level.name, "bytes_per_s": level.bytes_per_s, "latency_s": level.latency_s}
                for level in chip.levels
            ],
            "source": chip.source,
            "checked": chip.checked,
        }
        for name, chip in chips().items()
    ]


def _clusters() -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "chip": cluster.chip.name,
            "num_chips": cluster.num_chips,
            "links": ", ".join(
                f"{level.name} {with_prefix(level.bytes_per_s, 'B/s')}" for level in cluster.levels
            ),
            "source": cluster.source,
            "checked": cluster.checked,
        }
        for name in cluster_names()
        for cluster in (find_cluster(name),)
    ]


_SHOWN = {
    "models": ("name", "num_params", "num_active_params", "num_layers", "hidden", "num_heads"),
    "chips": ("name", "generation", "memory_bytes", "memory_bytes_per_s", "bf16"),
    "clusters": ("name", "chip", "num_chips", "links"),
}
_UNITS = {"memory_bytes": "B", "memory_bytes_per_s": "B/s", "bf16": "FLOP/s"}


def print_catalog(what: str, rows: list[dict[str, Any]], console: Console) -> None:
    """Print one part of the catalog; `--json` has every field and the sources."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in _SHOWN[what]:
        table.add_column(name, justify="left" if name in ("name", "generation", "chip", "links") else "right")
    for row in rows:
        cells = row | {"bf16": row["matrix_flop_per_s"].get("bf16", 0.0)} if what == "chips" else row
        table.add_row(*(_cell(name, cells[name]) for name in _SHOWN[what]))
    console.print(table)


def _cell(name: str, value: Any) -> str:
    if isinstance(value, str) or name in ("num_layers", "hidden", "num_heads", "num_chips"):
        return str(value)
    return with_prefix(value, _UNITS.get(name, "")) if value else "-"
