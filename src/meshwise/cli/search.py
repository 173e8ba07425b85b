"""`meshwise search`: the fastest plans that fit, out of all."""

from __future__ import annotations

from typing import Annotated

import typer

from meshwise import api
from meshwise.cli.estimate import ClusterOption, Model
from meshwise.cli.output import console, print_json
from meshwise.core.errors import WorkloadError


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
    microbatch: Annotated[
        str, typer.Option(help="Sequences of a microbatch, or the numbers to try: 1|2|4 [all that divide].")
    ] = "",
    memory_frac: Annotated[float, typer.Option(help="Share of the memory that a plan may need.")] = 0.92,
    beside: Annotated[
        str | None, typer.Option(help="A plan to show beside the best one, term by term.")
    ] = None,
    top: Annotated[int, typer.Option(help="How many plans to show.")] = 5,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Price every plan of MODEL on a cluster and show the fastest that fit; exit 1 if none does."""
    result = api.search(
        model, cluster, plan, batch=batch, seq=seq, microbatch=_numbers(microbatch), top=top,
        memory_frac=memory_frac, beside=beside,
    )  # fmt: skip
    if json:
        print_json(result.to_json())
    else:
        from meshwise.report.search_table import print_search

        print_search(result, console())
    if not result.best:
        raise typer.Exit(1)


def _numbers(text: str) -> list[int]:
    """`1|2|4` as numbers."""
    try:
        return [int(part) for part in text.split("|") if part]
    except ValueError:
        raise WorkloadError(f"--microbatch {text} must be whole numbers, as in 1|2|4") from None
