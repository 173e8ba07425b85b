"""Predicted against measured: the errors in short, of each group, the worst rows; on a page every row.

What a fit of constants reached is shown too, on the rows that it never saw.

A published model has tables with its own columns and units, and its cases are checked.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from meshwise.calibrate import validate as held
from meshwise.calibrate.cluster_file import Calibration
from meshwise.calibrate.errors import ErrorSummary, order_loss, summarize
from meshwise.calibrate.fit import FitReport
from meshwise.calibrate.fit_server import ServerFit
from meshwise.calibrate.fit_serving import ServingFit
from meshwise.calibrate.fit_steps import StepFit
from meshwise.calibrate.validate import UNFIT, Prediction, Validation, coverage_frac
from meshwise.core.columns import grouped
from meshwise.core.errors import DataError
from meshwise.core.refusals import told
from meshwise.core.units import duration, with_prefix
from meshwise.published.convention import PublishedStep
from meshwise.published.nersc import TOLERANCE, CaseCheck
from meshwise.report import answer as plot
from meshwise.report.answer import Page, PageLink, Section, Text
from meshwise.report.table import TABLES, WORDS, Table, percent, records_table

TITLES: dict[str, str] = WORDS["quantities"]
"""What a quantity is called."""
_NONE_OF: dict[str, str] = WORDS["none_of_validation"]
COLUMNS = ("rows", "expressed", "median", "mean", "p90", "max", "bias")
LEFT_OUT_COLUMNS = ("left-out median", "left-out mean", "in interval")


def _sizes(summary: ErrorSummary) -> tuple[str, str]:
    return percent(summary.median_abs_frac), percent(summary.mean_abs_frac)


def _left_out_cells(rows: Sequence[Prediction]) -> tuple[str, ...]:
    """Median and mean error by the other sources, and the share of measurements in their interval."""
    return (*_sizes(summarize([row.left_out_error_frac for row in rows])), percent(coverage_frac(rows)))


def error_table(name: str, groups: Iterable[tuple[str, Sequence[Prediction]]]) -> Table:
    """One line of errors for each of the named `groups`, with those by the other sources if there are any."""
    known = list(groups)
    left_out = any(row.left_out is not None for _, rows in known for row in rows)
    lines = [[label, *_cells(rows), *(_left_out_cells(rows) if left_out else ())] for label, rows in known]
    return Table("", (name, *COLUMNS, *(LEFT_OUT_COLUMNS if left_out else ())), lines)


def _cells(rows: Sequence[Prediction]) -> list[str]:
    summary = summarize([row.error_frac for row in rows])
    sizes = (summary.median_abs_frac, summary.mean_abs_frac, summary.p90_abs_frac, summary.max_abs_frac)
    counts = [str(summary.num_rows), str(summary.num_expressed)]
    return [*counts, *map(percent, sizes), percent(summary.mean_signed_frac, sign=True)]


def group_tables(rows: Sequence[Prediction]) -> Iterator[Table]:
    """The errors of `rows` by each aspect that tells some of them apart."""
    for name in held.ASPECTS:
        groups = held.by_aspect(rows, name)
        if len(groups) > 1 or (groups and name in ("source", "chip")):
            yield error_table(f"by {name}", groups)


def worst_table(rows: Sequence[Prediction], count: int) -> Table:
    """The `count` rows whose error is largest, with the largest parts of their prediction."""
    known = (row for row in rows if row.expressed)
    worst = sorted(known, key=lambda row: -abs(row.error_frac or 0.0))[:count]
    return records_table("", worst, TABLES["worst rows"], in_unit=quantity_text, parts_text=_parts_text)


def reasons_table(rows: Sequence[Prediction]) -> Table:
    """Why rows are not expressed."""
    groups = grouped([row for row in rows if not row.expressed], lambda row: (row.source, row.reason))
    lines = [[reason, source, str(len(members))] for (source, reason), members in groups.items()]
    header = ("not expressed", "source", "rows")
    return Table("", header, lines, left=header)


def asked_parts(validation: Validation) -> Iterator[Section]:
    """Earlier releases beside today, and what would mend the runs, where asked for; a sentence for none."""
    for name in held.ASKED:
        if (found := getattr(validation, name)) is not None:
            yield records_table("", found, TABLES[name]) if found else _NONE_OF[name]


def fits_text(rows: Sequence[Prediction]) -> str:
    """How many runs that ran fit; "" where none is a run of training."""
    runs = {row.id: row for row in rows if row.fits is not None}
    fit = [row for row in runs.values() if row.fits]
    taken = [row for row in fit if any(one.startswith(UNFIT) for one in row.approximations)]
    return "".join(told("runs that fit", fit=len(fit), runs=len(runs), taken=len(taken)))


def order_text(rows: Sequence[Prediction]) -> str:
    """How much slower than the measured best the plans are that we rank first; "" where none compete."""
    pairs = ([(row.measured or 0.0, row.predicted or 0.0) for row in group] for group in held.competing(rows))
    losses = [order_loss(*zip(*group, strict=True)) for group in pairs]
    mean, worst = (percent(loss) for loss in (sum(losses) / max(len(losses), 1), max(losses, default=0.0)))
    return "".join(told("order of runs", num=len(losses), mean=mean, worst=worst))


def quantity_text(value: float | None, quantity: str) -> str:
    """A value of a quantity for people."""
    unit = {"bytes": "B", "watts": "W"}.get(quantity.rpartition("_")[2])
    return with_prefix(value, unit) if unit else duration(value)


def _parts_text(row: Prediction) -> str:
    """The largest parts of a prediction: `compute 1.2 s, bubble 0.1 s`."""
    parts = [(name, value) for name, value in row.parts.items() if name != "total" and value]
    largest = sorted(parts, key=lambda item: -item[1])[:5]
    return ", ".join(f"{name} {quantity_text(value, row.quantity)}" for name, value in largest)


def parts(validation: Validation, *, num_worst: int = 10) -> Iterator[Section]:
    """All quantities, earlier releases, what would mend runs, and what could not be expressed."""
    for quantity in validation.quantities:
        rows, title = validation.of(quantity), TITLES.get(quantity, quantity)
        tables = error_table(title, [("all", rows)]), *group_tables(rows), worst_table(rows, num_worst)
        yield from (table for table in tables if table.rows)
    said = fits_text(validation.rows), order_text(validation.of("step_s"))
    yield Text("Order", list(filter(None, said)))
    yield from asked_parts(validation)
    if (reasons := reasons_table(validation.rows)).rows:
        yield reasons


def page(validation: Validation) -> Page:
    """The error of every row, and of each quantity in short."""
    of_quantities = [(TITLES.get(name, name), validation.of(name)) for name in validation.quantities]
    errors = error_table("quantity", of_quantities)
    rows = errors.rows
    sections: list[Section] = [replace(errors, title="Errors")]
    sections += [_quantity_chart(quantity, validation) for quantity in validation.quantities]
    sections += asked_parts(validation)
    num = f"{len(validation.rows):,} measured numbers"
    headline = f"{num}; the median error of {rows[0][0]} is {rows[0][3]}" if rows else num
    return Page("Predicted against measured", headline, sections, bool(rows))


def _quantity_chart(quantity: str, validation: Validation) -> plot.Chart:
    """Every row of a quantity, a color and symbol per chip; between the dotted lines it is right to 10 %."""
    rows = validation.of(quantity)
    known = [row for row in rows if row.error_frac is not None]
    values = [value for row in known for value in (row.measured, row.predicted) if value] or [1.0]
    ends = [min(values) / 1.2, 1.2 * max(values)]
    drawn = {"equal": 1.0, "10 % more": 1.1, "10 % less": 0.9}
    marks = [
        plot.Series(ends, [by * end for end in ends], name, plot.SUM_COLOR, "solid" if by == 1 else "dot")
        for name, by in drawn.items()
    ]
    by_chip = grouped(known, lambda row: row.chip)
    looks = itertools.cycle(itertools.product(plot.SYMBOLS, plot.COLORS))
    of_chips = dict(zip(sorted({row.chip for row in validation.rows}), looks, strict=False))
    for chip, members in sorted(by_chip.items()):
        symbol, color = of_chips[chip]
        marks.append(
            plot.Series(
                [row.measured or 0.0 for row in members], [row.predicted or 0.0 for row in members],
                f"{chip or 'unknown chip'} ({len(members)})", color, "", size=6, symbol=symbol, opacity=0.7,
                texts=[f"{row.id} ({row.source}): {row.error_frac:+.1%}" for row in members],
            )
        )  # fmt: skip
    within = sum(abs(row.error_frac or 0.0) <= 0.1 for row in known)
    others = len(rows) - len(known)
    why = f"; {others:,} rows have no prediction, for the reason in the table" if others else ""
    finding = f"{within:,} of {len(known):,} predictions are within 10 %{why}."
    ordered = sorted(rows, key=lambda row: -abs(row.error_frac or 0.0))
    table = records_table("", ordered, TABLES["predictions"], in_unit=quantity_text, where=_where)
    unit = "B" if quantity.endswith("bytes") else "s"
    is_wide = ends[1] > 10 * ends[0]  # less of a logarithmic axis has no number or one
    measured = plot.ChartAxis("measured", unit, log=is_wide, low=ends[0], high=ends[1])
    axes = measured, replace(measured, title="predicted")
    return plot.Chart(TITLES.get(quantity, quantity), marks, *axes, finding, table, 460)


def picture(validation: Validation) -> plot.Picture:
    """A chart for each quantity that has predictions, two in a row; DataError where there is none."""
    shown = [of for of in validation.quantities if any(row.expressed for row in validation.of(of))]
    charts = [_quantity_chart(of, validation) for of in shown]
    if not charts:
        raise DataError("no row was expressed, so there is nothing to draw")
    return plot.Picture([charts[i : i + 2] for i in range(0, len(charts), 2)])


def _where(source: str) -> PageLink:
    """A source with its address: the paper that it cites, or the repository that it begins with."""
    if paper := re.search(r"arXiv[ :](\d{4}\.\d{4,5})", source):
        return PageLink(source, f"https://arxiv.org/abs/{paper[1]}")
    repository = re.match(r"[\w.-]+/[\w.-]+(?= )", source)
    return PageLink(source, f"https://github.com/{repository[0]}" if repository else "")


# --- fits -----------------------------------------------------------------------------------------


def op_parts(found: FitReport) -> Iterator[Section]:
    """The error of every set of constants on its held-out rows (of 10 µs or 1 MiB and more)."""
    yield records_table("", found.scores, TABLES["constants"])
    if found.problems:
        yield f"{len(found.problems)} rows could not be used; the first: {found.problems[0].reason}"


def step_parts(found: StepFit) -> Iterator[Section]:
    """The fitted overheads and their error on both halves of the rows."""
    rows = [[name, f"{value:.4g}"] for name, value in found.constants.items()]
    yield Table("", ("overheads of steps", "value"), rows)
    fitted, held_out = map(percent, (found.fitted_mean_abs_frac, found.held_out_mean_abs_frac))
    yield f"mean error {fitted} on the rows that fitted, {held_out} on those held out"


def serving_parts(found: ServingFit) -> Iterator[Section]:
    """The constants, and the errors of each model and each system left out of the fit."""
    rows = [[name, f"{getattr(found.constants, name):.4g}"] for name in found.constants.__struct_fields__]
    yield Table("", ("constants of engines", "value"), rows)
    aspects = {
        "all points": (found.misses, "regime"),
        "left-out model": (found.without_model, "model"),
        "left-out system": (found.without_system, "system"),
    }
    for title, (misses, aspect) in aspects.items():
        errors = defaultdict[tuple[str, str], list[float]](list)
        for case, error in zip(found.cases, np.expm1(misses).tolist(), strict=True):
            errors[case.quantity, getattr(case, aspect)].append(error)
        rows = []
        for key, of in sorted(errors.items()):
            summary = summarize(of)
            bias = percent(summary.mean_signed_frac, sign=True)
            rows.append([*key, str(len(of)), *reversed(_sizes(summary)), bias])
        columns = ("quantity", title, "points", "mean", "median", "bias")
        yield Table("", columns, rows, left=columns[:2])


def server_parts(found: ServerFit) -> Iterator[Section]:
    """The constants before and after, and how far predictions lie off the records."""
    document = found.to_json()
    of = document["constants"]
    rows = [(name, _constant(name, of[name]["before"]), _constant(name, of[name]["after"])) for name in of]
    yield Table(f"constants of {document['engine']}", ("constant", "before", "after"), rows)
    columns = ("record", "quantity", "measured", "before", "after")
    misses = [
        (row["record"].rpartition("/")[2], name, *(duration(row[f"{name}_s"][key]) for key in columns[2:]))
        for row in document["rows"]
        for name in ("ttft", "tpot")
        if f"{name}_s" in row
    ]
    yield Table("records", columns, misses, left=columns[1:2])
    for name, after in document["mean_abs_frac"]["after"].items():
        before = document["mean_abs_frac"]["before"][name]
        yield f"{name}: off by {after:.1%} in the mean, {before:.1%} before"


def machine_parts(found: Calibration) -> Iterator[Section]:
    """What was measured of a machine."""
    yield records_table(found.cluster.source, found.samples, TABLES["samples"])
    yield from found.notes


def _constant(name: str, value: float) -> str:
    return duration(value) if name.endswith("_s") else f"{value:.3f}"


# --- published models -----------------------------------------------------------------------------


def published_parts(step: PublishedStep) -> Iterator[Section]:
    """The tables of a published model, the first column of each a name."""
    for excerpt in step.excerpts:
        rows = [[_published_cell(row[column]) for column in excerpt.columns] for row in excerpt.rows]
        yield Table(excerpt.title, excerpt.columns, rows)
        yield from excerpt.sentences


def _published_cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else f"{value:.6f}"


def case_parts(checked: CaseCheck) -> Iterator[Section]:
    """The largest difference of each case and of the collectives, where it is, and the verdict."""
    collectives = (f"{checked.num_collectives} collectives", checked.collectives)
    rows = [(name, f"{worst.rel:.1e}", worst.where) for name, worst in (*checked.cases, collectives)]
    title, columns = "largest relative difference", ("case", "difference", "at")
    yield Table(title, columns, rows, left=("case", "at"), no_wrap=True)
    yield f"{'all agree' if checked.agrees else 'NOT all agree'} to {TOLERANCE:g}"
