"""What a result shows of itself in Python: the lines of the command line, and in a notebook its tables."""

from __future__ import annotations

import io
from dataclasses import replace
from importlib import import_module
from typing import Any

from rich.console import Console

from meshwise.report.html import escape, sections_html
from meshwise.report.table import Facts, Table

_PRINTERS = {
    "CardFit": "card_table:print_card",
    "CollectiveTimes": "collective_table:print_collective",
    "Comparison": "compare_table:print_comparison",
    "Estimate": "estimate_table:print_estimate",
    "Explanation": "explain_table:print_explanation",
    "Frontier": "frontier_table:print_frontier",
    "Launch": "launch_table:print_launch",
    "Outcome": "script_table:print_outcome",
    "PublishedStep": "published_table:print_published",
    "Result": "search_table:print_search",
    "RlAnswer": "rl_table:print_rl",
    "RlExplanation": "rl_table:print_rl_log",
    "ScriptOutcome": "script_table:print_script",
    "ServingAnswer": "serve_table:print_serving",
    "Study": "search_table:print_study",
    "Summary": "trace_table:print_summary",
    "Validation": "accuracy_table:print_validation",
}
"""What prints a result on a console, by its class: `module:function` of this folder."""
_WIDTH = 120
"""Characters of a line, as of a command in a pipe."""
_MOST_ROWS = 15
"""Rows of each table in a notebook; a frame has all."""


def text_of(result: Any) -> str:
    """What the command line prints of `result`."""
    file = io.StringIO()
    _print(result, Console(file=file, width=_WIDTH, highlight=False, markup=False))
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().split("\n"))


def tables_of(result: Any) -> str:
    """The same as small HTML: its tables, and its sentences between them."""
    kept = _Kept()
    _print(result, kept)
    return "".join(map(_html, kept.items))


def _print(result: Any, console: Console) -> None:
    module, _, function = _PRINTERS[type(result).__name__].partition(":")
    getattr(import_module(f"meshwise.report.{module}"), function)(result, console)


class _Kept(Console):
    """A console that keeps what is printed instead of drawing it."""

    def __init__(self) -> None:
        super().__init__(file=io.StringIO(), width=_WIDTH)
        self.items: list[Any] = []

    def print(self, *items: Any, **_: Any) -> None:
        """Keep `items`."""
        self.items += items


def _html(item: Any) -> str:
    if isinstance(item, Facts):
        item = Table("", ("", " "), item.rows, left=("", " "))
    if not isinstance(item, Table):
        return f"<p>{escape(item)}</p>"
    rest = len(item.rows) - _MOST_ROWS
    more = f"<p>{rest:,} more rows</p>" if rest > 0 else ""
    return "".join(sections_html([replace(item, rows=item.rows[:_MOST_ROWS])])) + more
