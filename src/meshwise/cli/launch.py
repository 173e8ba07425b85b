"""`meshwise launch`: what starts a plan under another framework."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwise import api
from meshwise.cli.output import show
from meshwise.core.options import takes

OF_RESULTS = ("framework", "length_sigma", "lengths", "on_candidate", "output", "price", "train_steps")
"""Options of `rl` that no setting holds."""


@takes(api.launch, api.rl, without=OF_RESULTS)
def launch(*, out: Path | None = None, json: bool = False, **asked: Any) -> None:
    """Write the settings that run a plan of MODEL under a framework.

    Args:
        out: Write the files into this folder.
    """
    found = api.launch(**asked)
    written = found.write(out) if out is not None else []
    show(found, json=json, ok=found.runs_as_priced, written=written)
