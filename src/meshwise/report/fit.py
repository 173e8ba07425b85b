"""What a fit reached, on the rows that it never saw."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from meshwise.calibrate.cluster_file import Calibration
from meshwise.calibrate.errors import grouped, summarize
from meshwise.calibrate.fit import FitReport
from meshwise.calibrate.fit_server import ServerFit
from meshwise.calibrate.fit_serving import Case, ServingFit
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
    by_aspect: dict[str, tuple[Callable[[Case], str], np.ndarray]] = {
        "all points": (lambda case: case.regime, found.misses),
        "left-out model": (lambda case: case.model, found.without_model),
        "left-out system": (lambda case: case.system, found.without_system),
    }
    for name, (key, misses) in by_aspect.items():
        errors = dict(zip(found.cases, np.expm1(misses), strict=True))
        groups = grouped(found.cases, lambda case, key=key: (case.quantity, key(case)))  # type: ignore[misc]
        roomy = [case for case in found.cases if case.regime != "full cache"]
        groups |= grouped(roomy, lambda case: (case.quantity, "(all but full caches)"))
        shown = []
        for (quantity, group), cases in [*groups.items()]:
            summary = summarize([float(errors[case]) for case in cases])
            shown.append(
                [quantity, group, str(len(cases)), percent(summary.mean_abs_frac),
                 percent(summary.median_abs_frac), percent(summary.mean_signed_frac, sign=True)]
            )  # fmt: skip
        header = ("quantity", name, "points", "mean", "median", "bias")
        yield Table("", header, sorted(shown), left=header[:2])


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
