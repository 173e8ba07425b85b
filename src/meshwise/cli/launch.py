"""`meshwise launch`: what starts a plan under another framework."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from meshwise import api
from meshwise.cli.output import console, print_json
from meshwise.core.options import takes
from meshwise.core.units import duration

if TYPE_CHECKING:
    from meshwise.launch.write import Launch


OF_RESULTS = ("framework", "length_sigma", "lengths", "output", "price", "train_steps")
"""Options of `rl` that no setting holds."""


@takes(api.launch, api.rl, without=OF_RESULTS)
def launch(*, output: Path | None = None, json: bool = False, **asked: Any) -> None:
    """Write the settings that run a plan of MODEL under a framework.

    Args:
        output: Write the files into this folder.
    """
    found = api.launch(**asked)
    written = found.write(output) if output is not None else []
    if json:
        print_json(found.to_json())
    else:
        _print(found, written)
    if not found.runs_as_priced:
        raise typer.Exit(1)


def _print(found: Launch, written: list[Path]) -> None:
    out = console()
    out.print(f"{found.framework}, checked against {found.version}", markup=False)
    for title, sentences in (("not expressed", found.not_expressed), ("elsewhere", found.elsewhere)):
        if sentences:
            out.print(f"{title}:")
        for sentence in sentences:
            out.print(f"  {sentence}", markup=False)
    if (priced := found.as_written) is not None:
        line = f"as written: {duration(priced.step_s)}, {priced.memory_bytes / 1e9:.1f} GB"
        line += "" if priced.fits else ", does not fit"
        line += "" if priced.is_asked else ", not what was asked"
        out.print(line, markup=False)
    for path in written:
        out.print(f"wrote {path}", markup=False)
    if not written:
        for file in found.files:
            out.print(f"\n--- {file.path}\n{file.text.rstrip()}", markup=False, soft_wrap=True)
