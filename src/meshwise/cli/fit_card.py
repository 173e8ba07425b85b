"""`meshwise fit-card`: which models one card fine-tunes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from meshwise import api
from meshwise.cli.output import console, print_json
from meshwise.core.options import takes


@takes(api.fit_card)
def fit_card(*, all: bool = False, csv: Path | None = None, json: bool = False, **asked: Any) -> None:
    """Say which models a card fine-tunes, how, and how fast. Exit code 1 if none.

    Args:
        all: Also methods that do not fit.
        csv: Write the rows to this CSV file.
    """
    found = api.fit_card(**asked)
    if csv is not None:
        from meshwise.core.files import csv_text, write_text

        rows = found.records()
        write_text(csv, csv_text([list(rows[0]), *(row.values() for row in rows)] if rows else []))
    if json:
        print_json(found.to_json())
    else:
        from meshwise.report.card_table import print_card

        print_card(found, console(), everything=all)
    if not any(one.fits for one in found.runs):
        raise typer.Exit(1)
