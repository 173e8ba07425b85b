"""Results as HTML: the page in the browser, a self-contained file and a notebook show the same sections.

A result is described once (`report.answer`): sentences, tables, and charts with a caption that states the
finding and the numbers as a table. Python writes all of the HTML; `static/draw.js` only hands each figure to
plotly with the colours of the page. Text from a user is escaped here.
"""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.util
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

import msgspec

from meshwise.core.errors import MissingExtraError
from meshwise.core.files import check_writable, write_text
from meshwise.report.answer import Page, PageLink, Section, Text
from meshwise.report.chart_page import plotly_figure
from meshwise.report.table import Facts, Table


def write_page(page: Page, path: Path) -> None:
    """Write `page` as one self-contained HTML file; DataError or MissingExtraError where that cannot be."""
    check_writable(path)
    write_text(path, html_page(page))


def html_page(page: Page) -> str:
    """`page` as one file that needs no network: its script, its styles and its data are inside."""
    scripts = (plotly_js(), static("draw.js"), "redraw()")
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    hashes = " ".join(f"'sha256-{digest}'" for digest in digests)
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width">'
        f'<link rel="icon" href="data:,"><title>{escape(page.title)}</title>'
        f"<style>{static('style.css')}</style></head>"
        f'<body><main class="report"><h1>{escape(page.title)}</h1>{html_body(page, links=False)}</main>'
        + "".join(f"<script>{script}</script>" for script in scripts)
        + "</body></html>\n"
    )


def html_body(page: Page, *, links: bool = True) -> str:
    """The answer and the sections of `page`; `links`: whether links into the page itself lead anywhere."""
    state = "" if page.ok else ' class="no"'
    head = f'<p role="status" id="headline"{state}>{escape(page.headline)}</p>'
    return head + "".join(sections_html(page.sections, links=links))


def sections_html(sections: Iterable[Section], *, links: bool = True) -> list[str]:
    """Each section as HTML."""
    return [_section(section, i, links) for i, section in enumerate(sections)]


def escape(text: object) -> str:
    """`text` as it may stand in HTML, in an attribute too."""
    return html.escape(str(text), quote=True)


def static(name: str) -> str:
    """A script, style sheet or text of the package."""
    return (resources.files("meshwise.report") / "static" / name).read_text(encoding="utf-8")


def plotly_js() -> str:
    """The script of plotly, as its wheel ships it; MissingExtraError without plotly."""
    found = importlib.util.find_spec("plotly")
    if found is None or found.origin is None:
        raise MissingExtraError('pages need plotly; run: pip install "meshwise[web]"')
    return (Path(found.origin).parent / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


def _section(section: Section, place: int, links: bool) -> str:
    if isinstance(section, str):
        return f"<p>{escape(section)}</p>"
    if isinstance(section, Facts):
        section = Table("", ("", " "), section.rows, left=("", " "))
    title = f"<h2>{escape(section.title)}</h2>" if section.title else ""
    if isinstance(section, Table):
        return f"<section>{title}{_table(section, links)}</section>"
    if isinstance(section, Text):
        if section.verbatim:
            return f"<section>{title}<pre>{escape(section)}</pre></section>"
        lines = "".join(f"<li>{escape(line)}</li>" for line in section.lines)
        return f"<section>{title}<ul>{lines}</ul></section>"
    figure = msgspec.json.encode(plotly_figure(section), enc_hook=lambda value: value.tolist()).decode()
    name, numbers = escape(f"{place}-{section.title.partition(':')[0]}"), ""
    if section.table is not None:
        label = f"<summary>Data: {escape(section.title)}</summary>"
        numbers = f'<details id="data-{name}">{label}{_table(section.table, links)}</details>'
    place_of = f'<div class="chart" id="chart-{name}" style="height:{section.height}px"></div>'
    return (
        f"<section>{title}<figure>{place_of}"
        f'<script type="application/json">{figure.replace("<", chr(92) + "u003c")}</script>'
        f"<figcaption>{escape(section.finding)}</figcaption></figure>{numbers}</section>"
    )


def _table(table: Table, links: bool) -> str:
    sides = ["" if table.is_left(column) else ' class="num"' for column in table.columns]
    named = zip(table.columns, sides, strict=True)
    head = "".join(f'<th scope="col"{side}>{escape(name)}</th>' for name, side in named)
    rows = "".join(
        "<tr>"
        + "".join(f"<td{side}>{_cell(cell, links)}</td>" for cell, side in zip(row, sides, strict=True))
        + "</tr>"
        for row in table.rows
    )
    label = escape(table.title or ", ".join(table.columns[:3]))
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Table: {label}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _cell(cell: object, links: bool) -> str:
    if isinstance(cell, PageLink):
        leads = cell.href.startswith(("https://", "http://", "#") if links else ("https://", "http://"))
        return f'<a href="{escape(cell.href)}">{escape(cell.text)}</a>' if leads else escape(cell.text)
    if isinstance(cell, float):
        return f"{cell:.4g}"
    return "" if cell is None else escape(cell)
