"""`meshwise rl`: what a step of post-training by reinforcement takes, phase by phase."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from meshwise import api
from meshwise.cli.job import print_unread
from meshwise.cli.output import show
from meshwise.core.options import options_of, takes


@takes(api.rl, without=("on_candidate",))
def rl(*, source: Path | None = None, html: Path | None = None, json: bool = False, **asked: Any) -> None:
    """Price a step of post-training by reinforcement: rollout, scoring, update, weight sync.

    Without --mode or plans the best are found. Exit 1 if nothing fits.

    Args:
        source: A recipe of NeMo-RL or a script of verl to take what is not stated from.
    """
    unread = fill_in(asked, source) if source is not None else []
    found = api.rl(**asked)
    document = found.to_json() | ({"from": {"unread": unread}} if source is not None else {})
    show(found, document, json=json, html=html)
    print_unread(() if json else unread, "job")
    if found.is_no:
        raise typer.Exit(1)


def fill_in(asked: dict[str, Any], source: Path) -> list[str]:
    """Take what `asked` leaves out from the job of `source`; what the job says that no option holds."""
    stated, unread = api.read_rl_job(source)
    defaults = {name: option.default for name, option in options_of(api.rl).items()}
    for name, value in stated.items():
        if asked[name] in (None, defaults[name]):
            asked[name] = value
    if asked["mode"] == "colocated":
        asked["rollout_gpus"] = None
    return unread
