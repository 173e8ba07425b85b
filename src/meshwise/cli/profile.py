"""`meshwise profile -- python script.py ...`: all ranks of anybody's program captured, its code untouched."""

from __future__ import annotations

import sys
from typing import Any

import typer

from meshwise import api
from meshwise.cli.output import STDERR, show
from meshwise.core.errors import DataError
from meshwise.core.options import takes


@takes(api.profile, without=("stdout",))
def profile(*, limit: int = 15, all: bool = False, json: bool = False, **asked: Any) -> None:
    """Run a program, capture all its ranks, and summarise them. It may start them as it likes."""
    from meshwise.trace.summary import summarize_paths

    done = api.profile(**asked, stdout=STDERR if json else None)
    if not done.files:
        raise DataError(
            f"{' '.join(done.command)} left no profile (exit code {done.exit_code}); ranks are captured from "
            "torch.distributed.init_process_group on, and the folder must have room"
        )
    summary = summarize_paths(done.files)
    names = ("exit_code", "wall_s", "bare_s", "overhead_frac")
    document: dict[str, Any] = {"command": list(done.command), "files": [str(file) for file in done.files]}
    document |= {name: getattr(done, name) for name in names} | summary.to_json()
    show(summary, document, json=json, limit=limit, everything=all)
    if not json:
        folder = asked["directory"]
        print(f"{len(done.files)} ranks in {folder} (see: meshwise trace table|sections|merge {folder})")
        if done.overhead_frac is not None:
            bare = f"{done.wall_s:.2f} s with capture, {done.bare_s:.2f} s without"
            print(f"overhead of the capture: {100 * done.overhead_frac:+.1f} % ({bare})")
    if done.exit_code != 0:
        print(f"meshwise: the program ended with exit code {done.exit_code}", file=sys.stderr)
        raise typer.Exit(1)
