"""`meshwise collective`: the time and the bus bandwidth of one collective, by size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwise import api
from meshwise.cli.output import show
from meshwise.core.options import takes


@takes(api.collective)
def collective(*, plot: Path | None = None, json: bool = False, **asked: Any) -> None:
    """Time one collective on CLUSTER, by size. Shows algorithm, bus bandwidth, and what the links allow.

    Args:
        plot: Draw bus bandwidth by size (png, svg, pdf).
    """
    found = api.collective(**asked)
    show(found, found.to_json()["rows"], json=json, plot=plot)
