"""The ledger: columns in and out, totals, and its exports."""

import csv
import io
import json
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from data_tables import csv_rows
from meshwise.core.errors import DataError
from meshwise.core.ledger import COLUMNS, TEXT_COLUMNS, Ledger

ROWS = [
    {"op": "fc1", "phase": "forward", "shape": (2, 3), "flop": 12.0, "count": 4},
    {"op": "fc1", "phase": "backward", "shape": "3x2", "flop": 24.0, "collective": "all_gather"},
]


def test_unknown_columns_are_refused() -> None:
    with pytest.raises(DataError, match="flops"):
        Ledger.from_rows([{"flops": 1}])


def test_csv_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "ledger.csv"
    text = Ledger.from_rows(ROWS).to_csv(path)
    rows = csv_rows(path)
    assert path.read_text() == text
    assert [row["shape"] for row in rows] == ["2x3", "3x2"]
    assert [row["flop"] for row in rows] == ["12", "24"]
    assert rows[0]["comm_s"] == ""


def test_frames() -> None:
    ledger = Ledger.from_rows(ROWS)
    assert tuple(ledger.to_pandas().columns) == COLUMNS
    frame = ledger.to_polars()
    assert tuple(frame.columns) == COLUMNS
    assert frame["flop"].to_list() == [12.0, 24.0]


def test_it_prints_as_a_table() -> None:
    head, _, *lines = repr(Ledger.from_rows(ROWS)).strip().splitlines()
    assert head.split() == ["op", "phase", "count", "shape", "flop", "collective"]
    assert lines[0].split() == ["fc1", "forward", "4", "2x3", "12", "FLOP"]
    assert len(lines) == 2


# A lone carriage return in a name is no row break for us but is one for csv.reader.
CELLS = st.fixed_dictionaries(
    {},
    optional={
        name: st.text(st.characters(exclude_characters="\r"), max_size=5)
        if name in TEXT_COLUMNS
        else st.floats(allow_nan=True)
        for name in COLUMNS
    },
)


@given(st.lists(CELLS, max_size=4))
def test_json_never_holds_nan(rows: list[dict]) -> None:
    ledger = Ledger.from_rows(rows)
    json.dumps(ledger.to_json(), allow_nan=False)
    assert len(list(csv.reader(io.StringIO(ledger.to_csv())))) == len(rows) + 1
