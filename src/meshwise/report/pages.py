"""The page of any result: found by the result's class, built in the module named after what it shows."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from meshwise.report.html import Page, notebook_html, write_page

_PAGES = {
    "Estimate": "estimate",
    "Result": "search",
    "ServingAnswer": "serve",
    "Frontier": "frontier",
    "Summary": "trace",
    "Explanation": "explain",
    "Validation": "accuracy",
}


def page_of(result: Any) -> Page:
    """The page of a result of `estimate`, `search`, `serve`, `frontier`, `explain`, `validate`, of traces."""
    name = _PAGES[type(result).__name__]
    page: Page = getattr(import_module(f"meshwise.report.{name}_page"), f"{name}_page")(result)
    return page


def write_html(result: Any, path: str | Path) -> None:
    """Write the page of `result` as one self-contained HTML file.

    Raises DataError where it cannot be written, MissingExtraError without plotly.
    """
    write_page(page_of(result), Path(path))


def notebook(result: Any) -> str:
    """The page of `result` for the output of a cell."""
    return notebook_html(page_of(result))
