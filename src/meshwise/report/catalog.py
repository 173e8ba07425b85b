"""The catalog as tables: models, chips and clusters with their sources."""

from typing import Any

from meshwise.core.units import parameters, with_prefix
from meshwise.machine.hardware import chips, cluster_names, find_cluster
from meshwise.model.find import models
from meshwise.model.weights import num_active_params, num_params
from meshwise.plan.plan import DEFAULTS, KEYS
from meshwise.report.table import TABLES, WORDS, Table, records_table

_FIELDS: dict[str, list[str]] = WORDS["fields"]


def catalog_rows(what: str) -> list[dict[str, Any]]:
    """The entries of one part of the catalog as plain values (SI units)."""
    return {"models": _models, "chips": _chips, "clusters": _clusters, "plan": _plan_keys}[what]()


def _models() -> list[dict[str, Any]]:
    return [
        {"name": name, "num_params": num_params(model), "num_active_params": num_active_params(model)}
        | _plain(model, "models")
        for name, model in models().items()
    ]


def _chips() -> list[dict[str, Any]]:
    rows = [{"name": name} | _plain(chip, "chips") for name, chip in chips().items()]
    return [row | {"levels": [_plain(level, "levels") for level in row["levels"]]} for row in rows]


def _clusters() -> list[dict[str, Any]]:
    rows = []
    for name in cluster_names():
        cluster = find_cluster(name)
        links = (f"{level.name} {with_prefix(level.bytes_per_s, 'B/s')}" for level in cluster.levels)
        entry = {"name": name, "chip": cluster.chip.name, "num_chips": cluster.num_chips}
        rows.append(entry | {"links": ", ".join(links)} | _plain(cluster, "clusters"))
    return rows


def _plain(record: object, what: str) -> dict[str, Any]:
    return {name: getattr(record, name) for name in _FIELDS[what]}


def _plan_keys() -> list[dict[str, Any]]:
    rows = []
    for key, field in KEYS.items():
        default = DEFAULTS[key]
        shown = "" if default in (None, ()) else field.show(default)
        rows.append({"key": key, "values": field.values, "default": shown, "meaning": field.doc})
    return rows


def catalog_table(what: str, rows: list[dict[str, Any]]) -> Table:
    """One part of the catalog; `--json` has every field and the sources."""
    return records_table("", rows, TABLES[what], parameters=parameters)
