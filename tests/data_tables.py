"""What tests read from tests/data: tables, and documents with one field that is another."""

import csv
import json
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS, DATA = ROOT / "docs", ROOT / "tests" / "data"
CONFIGS, SCRIPTS, TRACES = (DATA / name for name in ("configs", "scripts", "traces"))
GLOO4 = TRACES / "gloo4"


def table(name: str) -> Any:
    return tomllib.loads((DATA / f"{name}.toml").read_text())


def values(name: str) -> dict[str, tuple[Any, ...]]:
    """Values of keys of a plan; one that is a list is a tuple, "unset" is None."""

    def read(one: Any) -> Any:
        return tuple(one) if isinstance(one, list) else None if one == "unset" else one

    return {key: tuple(map(read, of)) for key, of in table("key_values")[name].items()}


def lines(name: str) -> list[Any]:
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]


def csv_rows(file: str | Path) -> list[dict[str, str]]:
    """Those of a CSV file."""
    return list(csv.DictReader((DATA / file).read_text().splitlines()))


def with_field(document: Any, path: str, value: Any) -> Any:
    """`document` with the field at the dotted `path` set to `value`, or removed if it is None."""
    found = json.loads(json.dumps(document))
    *parents, last = [int(key) if key.isdecimal() else key for key in path.split(".")]
    target = found
    for key in parents:
        target = target[key]
    if value is None:
        del target[last]
    else:
        target[last] = value
    return found
