"""`meshwise search`: the fastest plans that fit, out of all."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from meshwise import api
from meshwise.cli.job import fill_in, job_json, need_model, print_unread
from meshwise.cli.output import how_far, on_nodes, show, write_rows
from meshwise.core.errors import WorkloadError
from meshwise.core.files import check_writable
from meshwise.core.options import options_in, takes
from meshwise.plan.plan import plan_choices


@takes(
    api.search,
    api.study,
    api.budget,
    without=("on_plans", "on_point", "mtbf", "storage", "restart"),
    optional=("model", "batch"),
)
def search(
    *,
    vary: str = "",
    ray: str = "",
    csv: Path | None = None,
    plot: Path | None = None,
    html: Path | None = None,
    source: Path | None = None,
    json: bool = False,
    **asked: Any,
) -> None:
    """Price every plan of MODEL and show the fastest that fit. Exit code 1 if none fits.

    With --vary, do so for each of many machines: scaling over numbers of GPUs, and co-design.

    Args:
        csv: Write the plans found to this CSV file.
        plot: Draw the trade-offs: .png, .svg or .pdf.
    """
    from meshwise.report.chart_picture import check_format
    from meshwise.report.search import search_rows
    from meshwise.search.next_step import computed
    from meshwise.search.study import Goal

    budget = api.budget(**options_in(asked, api.budget))
    alone = {name: asked.pop(name) for name in OF_ONE_MACHINE}
    of_study = {name: asked.pop(name) for name in ("weak", "deadline", "spend", "critical_batch")}
    for path in (csv, plot):
        if path is not None:
            check_writable(path)
    if plot is not None:
        check_format(plot)
    present, job = None, None
    if source is not None:
        if alone["beside"] is not None:
            raise WorkloadError("--from shows its own plan beside the best; leave --beside out")
        taken = {name: asked[name] for name in ("model", "cluster", "batch", "seq")}
        taken |= {"plan": "", "microbatch": None}
        job = fill_in(taken, source)
        present = api.estimate(**taken, collectives=alone["collectives"])
        work = present.workload
        asked |= {"model": taken["model"], "batch": work.batch, "seq": work.seq}
        asked["to"] = asked["to"] or job.framework
        asked["plan"] = computed(job.plan) | plan_choices(asked["plan"])
    if asked["batch"] is None:
        raise WorkloadError("say how many sequences a step has with --batch")
    need_model(asked)
    found: Any
    if vary:
        single = {"--beside": alone["beside"], "--from": source, "--html": html}
        others = set(OF_ONE_MACHINE) - {"beside", "capped", "top"}
        single |= {f"--{name.replace('_', '-')}": alone[name] for name in sorted(others)}
        single["--no-capped"] = not alone["capped"]
        for option in (option for option, value in single.items() if value):
            raise WorkloadError(f"{option} is for one machine; leave it out with --vary")
        Goal(**{name: value for name, value in of_study.items() if name != "weak"}).check(budget)
        done = itertools.count(1)
        with on_nodes(ray), how_far() as say:
            found = api.study(
                vary=vary, **of_study, on_point=lambda _: say(f"{next(done)} machines"), **asked
            )
        document, ok = found.to_json(budget), any(point.best for point in found.points)
        ok = ok and (found.chosen(budget) is not None or not (of_study["deadline"] or of_study["spend"]))
    elif given := [name for name, value in (of_study | {"ray": ray}).items() if value]:
        option = given[0].replace("_", "-")
        raise WorkloadError(f"--{option} is for several machines; add --vary gpus=64|128|...")
    else:
        with how_far() as say:
            found = api.search(on_plans=lambda kept: say(kept.so_far), **alone, **asked)
        found = found if present is None else replace(found, beside=present)
        document, ok = found.to_json(budget), bool(found.best)
    write_rows(csv, search_rows(document))
    document |= {} if job is None else {"from": job_json(job)}
    show(found, document, json=json, html=html, plot=plot, budget=budget)
    print_unread(job.unread if job and not json else (), "plan")
    if not document["complete"]:
        print("meshwise: stopped; these are the best of what was priced", file=sys.stderr)
        sys.exit(130)
    if not ok:
        raise typer.Exit(1)


OF_ONE_MACHINE = (
    *("beside", "software", "top", "assumptions", "robust", "capped", "collectives"),
    *("images", "image_size", "audio_s"),
)
"""Options of a search that a study of several machines does not have."""
