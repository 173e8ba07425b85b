"""`meshwise rl`: what a step of post-training by reinforcement takes, phase by phase."""

from __future__ import annotations

from typing import Any

import typer

from meshwise import api
from meshwise.cli.output import console, print_json
from meshwise.core.options import takes


@takes(api.rl)
def rl(*, json: bool = False, **asked: Any) -> None:
    """Price a step of post-training by reinforcement: rollout, scoring, update, weight sync.

    Without --mode or plans the best are found. Exit 1 if nothing fits.
    """
    found = api.rl(**asked)
    if json:
        print_json(found.to_json())
    else:
        from meshwise.report.rl_table import print_rl

        print_rl(found, console())
    if found.is_no:
        raise typer.Exit(1)
