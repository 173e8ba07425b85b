"""`meshwise estimate`: the price of one plan, as tables, JSON, CSV or pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwise import api
from meshwise.cli.job import fill_in, job_json, need_model, print_unread
from meshwise.cli.output import show
from meshwise.core.errors import PlanError
from meshwise.core.files import write_text
from meshwise.core.options import options_in, takes


@takes(api.estimate, api.budget, without=("ideal",), optional=("model",))
def estimate(
    *,
    convention: str = "default",
    per_layer: bool = False,
    csv: Path | None = None,
    plot: Path | None = None,
    trace: Path | None = None,
    html: Path | None = None,
    source: Path | None = None,
    json: bool = False,
    **asked: Any,
) -> None:
    """Price one training step of MODEL under a parallel plan. Also evaluation, prefill and decoding.

    Args:
        convention: default, ideal, nersc-2024-02 or nersc-2024-10.
        per_layer: Print the ops of one layer.
        csv: Write the ledger to this CSV file.
        plot: Draw time, memory and roofline (png, svg, pdf).
        trace: Write the timeline of all ranks for Perfetto.
    """
    of_run = options_in(asked, api.budget)
    job = None
    if source is not None:
        job = fill_in(asked, source)
    need_model(asked)
    from meshwise.published.convention import CONVENTIONS

    if convention in CONVENTIONS:
        others = of_run | {"plot": plot, "trace": trace, "html": html}
        others |= {name: asked.pop(name) for name in OF_ESTIMATE}
        _refuse(convention, others)  # not --per-layer: the published tables are of one layer anyway
        tables = api.reproduce(convention, **asked)
        if csv is not None:
            write_text(csv, tables.to_csv())
        show(tables, json=json)
        return
    if convention not in ("default", "ideal"):
        known = ", ".join(("default", "ideal", *CONVENTIONS))
        raise PlanError(f"--convention {convention} must be one of {known}")
    budget = api.budget(**of_run)
    found = api.estimate(ideal=convention == "ideal", **asked)
    run = budget.run(found)
    if csv is not None:
        (found.layer() if per_layer else found.ledger).to_csv(csv)
    if trace is not None:
        from meshwise.report.estimate_trace import write_timeline

        write_timeline(found, trace)
    document = found.to_json(ledger=not per_layer) | ({"run": run} if run else {})
    if per_layer:
        from meshwise.report.layer import layer_totals

        layer = found.layer()
        document |= {"ledger": layer.to_json(), "layer": layer_totals(layer)}
    document |= {"from": job_json(job)} if job is not None else {}
    show(found, document, json=json, html=html, plot=plot, run=run, per_layer=per_layer)
    print_unread(job.unread if job and not json else (), "plan")


OF_ESTIMATE = (
    *("capacity_factor", "collectives", "images", "image_size", "audio_s", "frames", "steps", "guidance"),
)
"""Options that published models do not know."""


def _refuse(convention: str, options: dict[str, Any]) -> None:
    for option, value in options.items():
        if value not in (None, (), "", 0, False):
            flag = option.replace("_", "-")
            raise PlanError(f"convention {convention} has tables of one step; leave --{flag} out")
