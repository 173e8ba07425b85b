"""What a fit reached, on the rows that it never saw."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from meshwise.calibrate.cluster_file import Calibration
from meshwise.calibrate.errors import summarize
from meshwise.calibrate.fit import FitReport
from meshwise.calibrate.fit_server import ServerFit
from meshwise.calibrate.fit_serving import ServingFit
from meshwise.calibrate.fit_steps import StepFit
from meshwise.core.units import duration, with_prefix
from meshwise.report.answer import Section
from meshwise.report.table import Fields, Table, percent, records_table


def op_fit(found: FitReport) -> Iterator[Section]:
    """The error of every set of constants on its held-out rows (of 10 µs or 1 MiB and more)."""
    columns: Fields = {
        **{"constants": "name", "chip": "chip", "rows": "rows", "held out": "held_out_rows"},
        **{"median": "median_abs_frac", "mean": "mean_abs_frac", "p90": "p90_abs_frac"},
        "bias": lambda score: percent(score.bias_frac, sign=True),
    }
    yield records_table("", found.scores, columns, left=("constants", "chip"), no_wrap=False)
    if found.problems:
        first = found.problems[0].reason
        yield f"{len(found.problems)} rows could not be used; the first: {first}"


def step_fit(found: StepFit) -> Iterator[Section]:
    """The fitted overheads and their error on both halves of the rows."""
    rows = [[name, f"{value:.4g}"] for name, value in found.constants.items()]
    yield Table("", ("overheads of steps", "value"), rows)
    fitted, held_out = map(percent, (found.fitted_mean_abs_frac, found.held_out_mean_abs_frac))
    yield f"mean error {fitted} on the rows that fitted, {held_out} on those held out"


def serving_fit(found: ServingFit) -> Iterator[Section]:
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
            sizes = percent(summary.mean_abs_frac), percent(summary.median_abs_frac)
            rows.append([*key, str(len(of)), *sizes, percent(summary.mean_signed_frac, sign=True)])
        columns = ("quantity", title, "points", "mean", "median", "bias")
        yield Table("", columns, rows, left=columns[:2])


def server_fit(found: ServerFit) -> Iterator[Section]:
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


def machine_fit(found: Calibration) -> Iterator[Section]:
    """What was measured of a machine."""
    columns: Fields = {"what": "what", "shape": "shape", "dtype": "dtype", "time": "time_s"}
    columns["rate"] = lambda one: with_prefix(one.rate, one.unit)
    left = ("what", "shape", "dtype")
    yield records_table(found.source, found.samples, columns, left=left, no_wrap=False)


def _constant(name: str, value: float) -> str:
    return duration(value) if name.endswith("_s") else f"{value:.3f}"
