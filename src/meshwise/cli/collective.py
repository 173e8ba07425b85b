"""`meshwise collective`: the time and the bus bandwidth of one collective, by size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwise import api
from meshwise.cli.output import console, print_json
from meshwise.core.options import takes


@takes(api.collective)
def collective(*, plot: Path | None = None, json: bool = False, **asked: Any) -> None:
    """Time one collective on CLUSTER, by size. Shows algorithm, bus bandwidth, and what the links allow.

    Args:
        plot: Draw bus bandwidth by size (png, svg, pdf).
    """
    from meshwise.report.collective_table import collective_picture, print_collective

    found = api.collective(**asked)
    if plot is not None:
        from meshwise.report.pages import draw

        draw(collective_picture(found), plot)
    if json:
        print_json(found.to_json()["rows"])
    else:
        print_collective(found, console())
