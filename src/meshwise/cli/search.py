"""`meshwise search`: the fastest plans that fit, out of all."""

from __future__ import annotations

from typing import Annotated

import typer

from meshwise import api
from meshwise.cli.estimate import ClusterOption, Model
from meshwise.cli.output import console, print_json


def add_to(app: typer.Typer) -> None:
    """Mount the command."""
    app.command()(search)


def search(
    model: Model,
    cluster: ClusterOption,
    batch: Annotated[int, typer.Option(help="Global batch in sequences.")],
    seq: Annotated[int | None, typer.Option(help="Tokens of a sequence [what the model allows].")] = None,
    plan: Annotated[
        str, typer.Option(help="Keys that are fixed, or the values to try: tp=4|8,dtype=fp8,...")
    ] = "",
    top: Annotated[int, typer.Option(help="How many plans to show.")] = 5,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Price every plan of MODEL on a cluster and show the fastest that fit; exit 1 if none does."""
    result = api.search(model, cluster, plan, batch=batch, seq=seq, top=top)
    if json:
        print_json(result.to_json())
    else:
        from meshwise.report.search_table import print_search

        print_search(result, console())
    if not result.best:
        raise typer.Exit(1)
