"""The page and the picture of any result: found by its class, built in the module of that name."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from meshwise.report.chart import Picture
from meshwise.report.chart_picture import draw_picture
from meshwise.report.html import Page, write_page

_PAGES = {
    "Estimate": "estimate",
    "Result": "search",
    "Study": "study",
    "ServingAnswer": "serve",
    "RlAnswer": "rl",
    "Frontier": "frontier",
    "Summary": "trace",
    "Explanation": "explain",
    "Validation": "accuracy",
}


def page_of(result: Any) -> Page:
    """The page of a result of `estimate`, `search`, `serve`, `frontier`, `explain`, `validate`, of traces."""
    page: Page = _built(result, "page")
    return page


def _built(result: Any, what: str) -> Any:
    name = _PAGES[type(result).__name__]
    return getattr(import_module(f"meshwise.report.{name}_page"), f"{name}_{what}")(result)


def write_html(result: Any, path: str | Path) -> None:
    """Write the page of `result` as one self-contained HTML file.

    Raises DataError where it cannot be written, MissingExtraError without plotly.
    """
    write_page(page_of(result), Path(path))


def draw(result: Any, path: str | Path) -> None:
    """Draw `result`, or a picture of charts, in the format that the ending of `path` names (png, svg, pdf).

    Raises DataError for another ending and where it cannot be written, MissingExtraError without matplotlib.
    """
    draw_picture(result if isinstance(result, Picture) else _built(result, "picture"), Path(path))
