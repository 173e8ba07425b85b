"""Results as HTML: the page in the browser, a self-contained file and a notebook show the same sections.

A result is described once (`report.answer`): sentences, tables, and charts with a caption that states the
finding and the numbers as a table. Python writes all of the HTML; `static/draw.js` hands each figure to
plotly with the colours of the page and what depends on its width. Text from a user is escaped here.
"""

import base64
import hashlib
import html
import math
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from meshwise.core.extras import import_extra
from meshwise.core.files import check_writable, write_text
from meshwise.report import answer as plot
from meshwise.report.answer import Page, PageLink, Section, Text
from meshwise.report.table import WORDS, Facts, Table


def write_page(page: Page, path: Path) -> None:
    """Write `page` as one self-contained HTML file; DataError or MissingExtraError where that cannot be."""
    check_writable(path, ".html")
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
    """Each section as HTML, but for texts without lines."""
    shown = (section for section in sections if not isinstance(section, Text) or section.lines)
    return [_section(section, i, links) for i, section in enumerate(shown)]


def escape(text: object) -> str:
    """`text` as it may stand in HTML, in an attribute too."""
    return html.escape(str(text), quote=True)


def static(name: str) -> str:
    """A script, style sheet or text of the package."""
    return (resources.files("meshwise.report") / "static" / name).read_text(encoding="utf-8")


def plotly_js() -> str:
    """The script of plotly, as its wheel ships it; MissingExtraError without plotly."""
    folder = Path(import_extra("plotly", "web").__file__).parent
    return (folder / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


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

    def line(row: Sequence[object]) -> str:
        cells = zip(row, sides, strict=True)
        return f"<tr>{''.join(f'<td{side}>{_cell(cell, links)}</td>' for cell, side in cells)}</tr>"

    rows = "".join(map(line, table.rows))
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


# --- charts, for plotly ---------------------------------------------------------------------------


def plotly_figure(chart: plot.Chart) -> dict[str, Any]:
    """The `data` and the `layout` of a plotly figure."""
    data = [trace for mark in chart.marks for trace in _TRACES[type(mark)](mark)]
    told = (
        f"{escape(chart.x.title)}: %{{x}}<br>{escape(chart.y.title)}: %{{y}}<extra>%{{fullData.name}}</extra>"
    )
    for trace in (trace for trace in data if "customdata" in trace):
        trace["hovertemplate"] = "%{text}<br>" * bool(len(trace["text"])) + told
    lanes = any(isinstance(mark, plot.Lanes | plot.Bars) for mark in chart.marks)
    overlaid = any(isinstance(mark, plot.Bars) and mark.starts is not None for mark in chart.marks)
    layout: dict[str, Any] = {
        "xaxis": _axis(chart.x),
        "yaxis": _axis(chart.y) | ({"autorange": "reversed", "type": "category"} if lanes else {}),
        "shapes": [_bound(mark) for mark in chart.marks if isinstance(mark, plot.Bound)],
        "barmode": "overlay" if overlaid else "group",
        "showlegend": sum(bool(trace.get("name")) for trace in data) > 1,
        "height": chart.height,
    }
    return {"data": data, "layout": layout}


def _axis(axis: plot.ChartAxis) -> dict[str, Any]:
    look = WORDS["numbers"][axis.numbers] | {"ticksuffix": axis.unit}
    if axis.title:
        look["title"] = {"text": axis.title}
    if axis.ticks:
        look["tickvals"] = axis.ticks
    if axis.log:
        look["type"] = "log"
    if axis.low is not None and axis.high is not None:
        ends = [axis.low, axis.high]
        look["range"] = [math.log10(end) for end in ends] if axis.log else ends
    elif axis.low == 0:
        look["rangemode"] = "tozero"
    return look


def _bars(bars: plot.Bars) -> list[dict[str, Any]]:
    names = [f"{name}  {text}" for name, text in zip(bars.names, bars.texts, strict=bool(bars.texts))]
    return [
        {
            "type": "bar", "orientation": "h", "name": bars.name, "y": names or bars.names, "x": bars.values,
            "marker": {"color": bars.colors}, "hovertemplate": "%{y}: %{x}<extra></extra>",
        } | ({} if bars.starts is None else {"base": bars.starts, "hovertemplate": "%{y}<extra></extra>"})
    ]  # fmt: skip


def _series(series: plot.Series) -> list[dict[str, Any]]:
    marked = bool(np.any(np.asarray(series.size) > 0))
    mode = "+".join(["lines"] * bool(series.line) + ["markers"] * marked)
    trace: dict[str, Any] = {
        "type": "scatter", "mode": mode, "name": series.name, "x": series.x, "y": series.y,
        "showlegend": bool(series.name), "text": series.texts, "customdata": series.links,
    }  # fmt: skip
    if series.line:
        shape = "hv" if series.steps else "linear"
        trace["line"] = {"color": series.color, "dash": series.line, "width": 1.6, "shape": shape}
    if marked:
        look = {"size": series.size, "symbol": series.symbol, "opacity": series.opacity}
        trace["marker"] = look | {"color": series.color}
    return [trace]


def _lanes(lanes: plot.Lanes) -> list[dict[str, Any]]:
    kinds = lanes.kinds
    ends = [i / len(kinds) for i in range(len(kinds) + 1)]
    scale = [(end, color) for i, color in enumerate(kinds.values()) for end in ends[i : i + 2]]
    image = {
        "type": "heatmap", "x": lanes.times, "y": lanes.names,
        "z": [[None if kind < 0 else kind for kind in row] for row in lanes.grid.tolist()],
        "zmin": -0.5, "zmax": len(kinds) - 0.5, "colorscale": scale, "showscale": False,
        "hovertemplate": "%{y}, %{x}<extra></extra>",
    }  # fmt: skip
    keys = [
        {
            "type": "scatter", "mode": "markers", "x": [None], "y": [None], "name": kind,
            "marker": {"color": color, "symbol": "square", "size": 10},
        }
        for i, (kind, color) in enumerate(kinds.items())
        if (lanes.grid == i).any()
    ]  # fmt: skip
    return [image, *keys]


def _bound(bound: plot.Bound) -> dict[str, Any]:
    across = "y" if bound.axis == "x" else "x"
    at = {f"{bound.axis}0": bound.value, f"{bound.axis}1": bound.value, f"{across}0": 0, f"{across}1": 1}
    line = {"color": bound.color, "width": 2, "dash": bound.line}
    return {"type": "line", f"{across}ref": "paper", "line": line} | at


_TRACES: dict[type[plot.Mark], Callable[[Any], list[dict[str, Any]]]] = {
    **{plot.Bars: _bars, plot.Series: _series, plot.Lanes: _lanes},
    **{plot.Bound: lambda _: [], plot.Names: lambda _: []},
}
