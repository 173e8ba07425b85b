"""An answer, stated once: sentences, tables and charts, for a terminal, a page, a picture and a notebook.

The module of a result (`report.estimate`, `report.search`, ...) says what is shown of it: `parts` are what a
terminal prints, `page` adds what only a browser shows, `picture` is what a file shows. A terminal prints
of a chart the table of its numbers; `report.html` writes the same parts as HTML.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwise.report.chart import Chart
from meshwise.report.table import Facts, Table


@dataclass(frozen=True, slots=True)
class PageLink:
    """A cell that leads to an address or, in the page in the browser only, to a `#state` of the page."""

    text: str
    href: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Text:
    """Sentences, as a list under a title; on a terminal `lead` stands before each, and no title.

    `verbatim`: commands and files, whose lines nobody breaks.
    """

    title: str
    lines: Sequence[str]
    lead: str = ""
    verbatim: bool = False

    def __str__(self) -> str:
        return "\n".join(f"{self.lead}{line}" for line in self.lines)


Section = str | Text | Facts | Table | Chart


@dataclass(frozen=True, slots=True)
class Page:
    """What is shown of one result: a title, the answer in one sentence, and sections.

    `ok` is False where the answer is no.
    """

    title: str
    headline: str
    sections: Sequence[Section]
    ok: bool = True
