"""`meshwise list`: the entries of the catalog, with sources."""

from __future__ import annotations

from typing import Literal

from meshwise.cli.output import print_json, print_parts


def list_catalog(what: Literal["models", "chips", "clusters", "plan"], *, json: bool = False) -> None:
    """List models, chips or clusters with sources, or a plan's keys.

    Args:
        what: Which part to list.
    """
    from meshwise.report.catalog import catalog_rows, catalog_table

    rows = catalog_rows(what)
    if json:
        print_json({what: rows})
    else:
        print_parts([catalog_table(what, rows)])
