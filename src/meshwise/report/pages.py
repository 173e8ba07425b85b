"""The parts, the page and the picture of any result: found by its class, stated in a module of its own."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwise.report.answer import Chart, Page, Picture, Section, Text
from meshwise.report.table import WORDS, Table, wrapped

if TYPE_CHECKING:
    from rich.console import Console

_MODULES: dict[str, str] = WORDS["modules"]
"""The module of this folder that states what is shown of a result, by its class; how its functions begin."""
_WIDTH = 120
"""Characters of a line, as of a command in a pipe."""
_MOST_ROWS = 15
"""Rows of each table in a notebook; a frame has all."""


def page_of(result: Any, **shown: Any) -> Page:
    """The page of a result: its own, or its parts as the command line prints them."""
    if made := _stated(result, "page"):
        return made(result, **shown)
    title = re.sub("(?<=[a-z])(?=[A-Z])", " ", type(result).__name__)
    return Page(title, "", list(parts_of(result, **shown)))


def _stated(result: Any, what: str) -> Any:
    module, _, begins = _MODULES[type(result).__name__].partition(":")
    return getattr(import_module(f"meshwise.report.{module}"), f"{begins}{what}", None)


def write_html(result: Any, path: str | Path, **shown: Any) -> None:
    """Write the page of `result` as one self-contained HTML file.

    Raises DataError where it cannot be written, MissingExtraError without plotly.
    """
    from meshwise.report.html import write_page

    write_page(page_of(result, **shown), Path(path))


def draw(result: Any, path: str | Path, **shown: Any) -> None:
    """Draw `result`, or a picture of charts, in the format that the ending of `path` names (png, svg, pdf).

    Raises DataError for another ending and where it cannot be written, MissingExtraError without matplotlib.
    """
    from meshwise.report.chart_picture import draw_picture

    draw_picture(result if isinstance(result, Picture) else picture_of(result, **shown), Path(path))


def picture_of(result: Any, **shown: Any) -> Picture:
    """The charts of `result` that a file shows."""
    return _stated(result, "picture")(result, **shown)


def parts_of(result: Any, **shown: Any) -> Iterable[Section]:
    """The parts of `result` that `shown` asks for."""
    return _stated(result, "parts")(result, **shown)


def print_parts(parts: Iterable[Section], console: Console) -> None:
    """Print parts one below the other; a plan that is wider than the console breaks at its commas."""
    long_word = re.compile(rf"\S{{{console.width + 1},}}")
    for part in parts:
        if isinstance(part, Text) and part.verbatim:
            console.print(str(part), soft_wrap=True)
        elif isinstance(part, str) or (isinstance(part, Text) and part.lines):
            console.print(long_word.sub(lambda word: wrapped(word[0], console.width), str(part)))
        elif not isinstance(part, Text):
            console.print(part)


def text_of(result: Any) -> str:
    """What the command line prints of `result`."""
    from rich.console import Console

    file = io.StringIO()
    console = Console(
        file=file, width=_WIDTH, highlight=False, markup=False, color_system=None, force_jupyter=False
    )
    print_parts(parts_of(result), console)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().split("\n"))


def tables_of(result: Any) -> str:
    """The same as small HTML: its tables, and its sentences between them."""
    from meshwise.report.html import sections_html

    parts = (part.table if isinstance(part, Chart) else part for part in parts_of(result))
    return "".join(sections_html(_few_rows(part) for part in parts if part is not None))


def _few_rows(part: Section) -> Section:
    if not isinstance(part, Table) or len(part.rows) <= _MOST_ROWS:
        return part
    title = f"{part.title} ({_MOST_ROWS} of {len(part.rows):,} rows)".strip()
    return replace(part, title=title, rows=part.rows[:_MOST_ROWS])
