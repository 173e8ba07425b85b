"""`meshwise list`: the entries of the catalog, with sources."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from meshwise.cli.options import JsonOption
from meshwise.cli.output import console, print_json


def list_catalog(
    what: Annotated[
        Literal["models", "chips", "clusters", "plan"], typer.Argument(help="Which part to list.")
    ],
    json: JsonOption = False,
) -> None:
    """List models, chips or clusters with sources, or a plan's keys."""
    from meshwise.report.catalog_table import catalog_rows, print_catalog

    rows = catalog_rows(what)
    if json:
        print_json({what: rows})
    else:
        print_catalog(what, rows, console())
