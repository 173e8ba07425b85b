"""What starts a plan under a framework, as text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from meshwise.core.units import duration
from meshwise.launch.write import Launch


def print_launch(found: Launch, out: Console, written: Sequence[Path] = ()) -> None:
    """Print what a framework cannot be told, what its files cost, and the files or where they are."""
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
