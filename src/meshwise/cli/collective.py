"""`meshwise collective`: the time and the bus bandwidth of one collective, by size."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshwise import api
from meshwise.cli.options import ClusterOption, JsonOption
from meshwise.cli.output import console, print_json


def collective(
    kind: Annotated[
        str, typer.Argument(help="all_reduce, all_gather, reduce_scatter, all_to_all, send, ...")
    ],
    cluster: ClusterOption,
    ranks: Annotated[int | None, typer.Option(help="Ranks of the group [all].")] = None,
    stride: Annotated[int, typer.Option(help="Distance between neighbours of the group in ranks.")] = 1,
    size: Annotated[
        list[str] | None, typer.Option(help="Bytes of the full tensor, as 64MiB or 1e9; repeat for more.")
    ] = None,
    data: Annotated[
        list[Path] | None, typer.Option(help="A CSV file of measured collectives to show beside; repeat.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw bus bandwidth by size (png, svg, pdf).")] = None,
    json: JsonOption = False,
) -> None:
    """Time one collective on CLUSTER, by size. Shows algorithm, bus bandwidth, and what the links allow."""
    from meshwise.core.units import quantity
    from meshwise.report.collective_table import collective_json, collective_picture, print_collective

    sizes = [quantity(text, "--size") for text in size or ()]
    times, measured = api.collective(kind, cluster, sizes, ranks=ranks, stride=stride, data=data or ())
    if plot is not None:
        from meshwise.report.pages import draw

        draw(collective_picture(times, measured), plot)
    if json:
        print_json(collective_json(times, measured))
    else:
        print_collective(times, measured, console())
