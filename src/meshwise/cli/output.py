"""What commands print: one JSON document, or tables; everything else goes to stderr."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from rich.console import Console

STDERR = 2
"""Where the output of a program that is started goes when stdout holds the document."""


def write_html(result: Any, path: Path | None) -> None:
    """Write the page of `result` to the file that `--html` names, if it names one."""
    if path is not None:
        from meshwise.report.pages import write_html as write

        write(result, path)


def print_json(document: Any) -> None:
    """Print one JSON document on stdout; JSON has no NaN, so what is not finite becomes null."""
    text = msgspec.json.format(msgspec.json.encode(finite(document)), indent=2).decode()
    if not (sys.stdout.encoding or "utf").lower().startswith("utf"):
        text = re.sub(r"[^\0-\x7f]", lambda found: json.dumps(found[0])[1:-1], text)
    sys.stdout.write(text + "\n")


def finite(value: Any) -> Any:
    """`value` with every float that is not finite replaced by None, all the way down."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None  # a numpy float becomes a Python one
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value.item() if hasattr(value, "item") else value


def console() -> Console:
    """The console that tables are printed on: COLUMNS wide, or 120 in a file or pipe.

    No name is read as markup.
    """
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120
    return Plain(highlight=False, markup=False, width=width)
