"""`meshwise fit-card`: which models one card fine-tunes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwise import api
from meshwise.cli.output import show, write_rows
from meshwise.core.options import takes


@takes(api.fit_card)
def fit_card(*, all: bool = False, csv: Path | None = None, json: bool = False, **asked: Any) -> None:
    """Say which models a card fine-tunes, how, and how fast. Exit code 1 if none.

    Args:
        all: Also methods that do not fit.
        csv: Write the rows to this CSV file.
    """
    found = api.fit_card(**asked)
    rows = found.records()
    write_rows(csv, [rows[0], *(row.values() for row in rows)] if rows else [])
    show(found, json=json, ok=any(one.fits for one in found.runs), everything=all)
