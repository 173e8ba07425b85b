"""The verbs that answer: each calls one function of the library, and prints and writes what it finds.

`--from FILE` takes what is not stated out of a job of another framework.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from meshwise import api
from meshwise.cli.command import command_options, flags
from meshwise.cli.output import how_far, on_nodes, print_answer, show, write_rows
from meshwise.core.errors import PlanError, WorkloadError
from meshwise.core.files import write_text
from meshwise.core.options import options_in, options_of, stated_in, takes
from meshwise.core.refusals import refuse

if TYPE_CHECKING:
    from meshwise.launch.read import Job


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
    job = _fill_in(asked, source)
    refuse("priced job", WorkloadError, model=asked["model"], searches=False)
    from meshwise.published.convention import CONVENTIONS

    if convention in CONVENTIONS:  # with --per-layer too: the published tables are of one layer anyway
        of_ours = of_run | {"plot": plot, "trace": trace, "html": html} | _beside(asked, api.reproduce)
        _refuse(of_ours, f"convention {convention} has tables of one step; leave {{}} out", estimate)
        tables = api.reproduce(convention, **asked)
        if csv is not None:
            write_text(csv, tables.to_csv())
        show(tables, json=json)
        return
    known = ", ".join(("default", "ideal", *CONVENTIONS))
    refuse("convention", PlanError, convention=convention, known=known)
    budget = api.budget(**of_run)
    found = api.estimate(ideal=convention == "ideal", **asked)
    run = budget.run(found)
    if csv is not None:
        (found.layer() if per_layer else found.ledger).to_csv(csv)
    if trace is not None:
        from meshwise.report.timelines import write_timeline

        write_timeline(found, trace)
    document = found.to_json(ledger=not per_layer) | ({"run": run} if run else {})
    if per_layer:
        from meshwise.report.estimate import layer_totals

        layer = found.layer()
        document |= {"ledger": layer.to_json(), "layer": layer_totals(layer)}
    document |= _job_json(job)
    show(found, document, json=json, html=html, plot=plot, run=run, below=_unread(job), per_layer=per_layer)


@takes(api.search, api.study, api.budget, without=("on_plans", "on_point"), optional=("model", "batch"))
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
    from meshwise.plan.plan import plan_choices
    from meshwise.report.chart_picture import check_format
    from meshwise.report.pages import draw, write_html
    from meshwise.report.search import search_rows
    from meshwise.search.next_step import computed

    budget = api.budget(**options_in(asked, api.budget))
    of_study, alone = _beside(asked, api.search), _beside(asked, api.study)
    if plot is not None:
        check_format(plot)
    present, job = None, None
    if source is not None:
        refuse("search from a job", WorkloadError, beside=alone["beside"])
        taken = {name: asked[name] for name in ("model", "cluster", "batch", "seq")}
        taken |= {"plan": "", "microbatch": None}
        job = _fill_in(taken, source)
        assert job is not None
        present = api.estimate(**taken, collectives=alone["collectives"])
        work = present.workload
        asked |= {"model": taken["model"], "batch": work.batch, "seq": work.seq}
        asked["to"] = asked["to"] or job.framework
        asked["plan"] = computed(job.plan) | plan_choices(asked["plan"])
    refuse("priced job", WorkloadError, model=asked["model"], batch=asked["batch"], searches=True)
    found: Any
    if vary:
        _refuse(alone | {"source": source}, "{} is for one machine; leave it out with --vary", search)
        done = itertools.count(1)
        with on_nodes(ray), how_far() as say:
            found = api.study(
                vary=vary, **of_study, on_point=lambda _: say(f"{next(done)} machines"), **asked
            )
        document, ok = found.to_json(budget), any(point.best for point in found.points)
    else:
        _refuse(of_study | {"ray": ray}, "{} is for several machines; add --vary gpus=64|128|...", search)
        with how_far() as say:
            found = api.search(on_plans=lambda kept: say(kept.so_far), **alone, **asked)
        found = found if present is None else replace(found, beside=present)
        document, ok = found.to_json(budget), bool(found.best)
    write_rows(csv, search_rows(document))
    document |= _job_json(job)
    if html is not None:
        write_html(found, html, budget=budget)
    if plot is not None:
        draw(found, plot, **({"budget": budget} if vary else {}))
    show(found, document, json=json, budget=budget, below=_unread(job))
    if not document["complete"]:
        print("meshwise: stopped; these are the best of what was priced", file=sys.stderr)
        sys.exit(130)
    if not ok:
        raise typer.Exit(1)


@takes(api.fit_card)
def fit_card(*, all: bool = False, csv: Path | None = None, json: bool = False, **asked: Any) -> None:
    """Say which models a card fine-tunes, how, and how fast. Exit code 1 if none.

    Args:
        all: Also methods that do not fit.
        csv: Write the rows to this CSV file.
    """
    found = api.fit_card(**asked)
    rows = found.records()
    write_rows(csv, [rows[0], *(row.values() for row in rows)] if rows else [])
    show(found, json=json, ok=any(one.fits for one in found.runs), everything=all)


@takes(api.serve)
def serve(
    *,
    ray: str = "",
    csv: Path | None = None,
    plot: Path | None = None,
    html: Path | None = None,
    out: Path | None = None,
    json: bool = False,
    **asked: Any,
) -> None:
    """Estimate an inference server: latency, throughput, what fits.

    Kernels are timed by models fitted to measurements of serving kernels; routing is even, nothing overlaps.
    With --rate, --concurrency or --requests the engine is simulated pass by pass, queue included.
    With --rate, --ttft-ms and --token-ms, and no tp in the plan, the answer is the fewest GPUs of the cluster
    (or of several: h100-80g-sxm:64,b200-sxm:64) that keep the limits; exit 1 if none do.

    Args:
        csv: Write a row for each request of the load to this CSV file; or each layout considered.
        plot: Draw the trade-offs (png, svg, pdf).
        out: Write the files of --to into this folder [print them].
    """
    with on_nodes(ray), how_far(""):
        found = api.serve(**asked)
    refuse("serve outputs", WorkloadError, found=found, ray=ray, plot=plot, csv=csv, out=out)
    columns = found.columns if csv is not None else {}
    write_rows(csv, [list(columns), *zip(*columns.values(), strict=True)])
    if out is not None and found.deployment is not None:
        found.deployment.write(out)
    show(found, json=json, html=html, plot=plot, ok=not found.is_no, with_files=out is None)


@takes(api.rl)
def rl(
    *, context: typer.Context, source: Path | None = None, html: Path | None = None, json: bool = False,
    **asked: Any,
) -> None:  # fmt: skip
    """Price a step of RL post-training, from rollout to weight sync.

    Without --mode or plans the best are found. Exit 1 if nothing fits.

    Args:
        source: A recipe of NeMo-RL or a script of verl to take what is not stated from.
    """
    unread: list[str] = []
    if source is not None:
        sources = {name: getattr(context.get_parameter_source(name), "name", "") for name in asked}
        stated = {name: asked[name] for name in asked if sources[name] == "COMMANDLINE"}
        known, unread = api.read_rl_job(source, stated.get("prompt"))
        asked |= known | stated
        if asked["mode"] == "colocated":
            asked["rollout_gpus"] = stated.get("rollout_gpus")
    with how_far(""):
        found = api.rl(**asked)
    document = found.to_json() | ({"from": {"unread": unread}} if source is not None else {})
    below = [f"from the job: {sentence}" for sentence in unread]
    show(found, document, json=json, html=html, ok=not found.is_no, below=below)


@takes(api.launch, api.rl, without=("framework", "length_sigma", "lengths", "price", "train_steps"))
def launch(*, out: Path | None = None, json: bool = False, **asked: Any) -> None:
    """Write the settings that run a plan of MODEL under a framework.

    Args:
        out: Write the files into this folder.
    """
    found = api.launch(**asked)
    show(found, json=json, ok=found.runs_as_priced, written=found.write(out) if out is not None else [])


@takes(api.collective)
def collective(*, json: bool = False, **asked: Any) -> None:
    """Time one collective on CLUSTER, by size. Shows algorithm, bus bandwidth, and what the links allow."""
    found = api.collective(**asked)
    show(found, found.to_json()["rows"], json=json)
    sys.stderr.writelines(f"note: {note}\n" for note in found.notes if json)


def list_catalog(what: Literal["models", "chips", "clusters", "plan"], *, json: bool = False) -> None:
    """List models, chips or clusters with sources, or a plan's keys.

    Args:
        what: Which part to list.
    """
    from meshwise.report.catalog import catalog_rows, catalog_table

    rows = catalog_rows(what)
    print_answer({what: rows}, [catalog_table(what, rows)], json=json)


# --- what they share ---------------------------------------------------------------------------


def _beside(asked: dict[str, Any], verb: Callable[..., Any]) -> dict[str, Any]:
    """The options that `verb` does not have; they are taken away."""
    return {name: asked.pop(name) for name in [*asked] if name not in options_of(verb)}


def _refuse(asked: dict[str, Any], why: str, command: Callable[..., Any]) -> None:
    """WorkloadError for the first option of `asked` that is stated, whose flag stands in `why`."""
    for name in stated_in(asked, command):
        flag = flags(command_options(command)[name])[0].rpartition("/")[2]
        raise WorkloadError(why.format(flag))


def _fill_in(asked: dict[str, Any], source: Path | None) -> Job | None:
    """Take what `asked` leaves out (model, plan, batch, seq, microbatch) from the job of `source`, if any."""
    if source is None:
        return None
    from meshwise.plan.plan import DEFAULTS, Plan, plan_keys

    job = api.read_job(source, asked["cluster"])
    for name in asked.keys() & {"model", "batch", "seq", "microbatch"}:
        if asked[name] in (None, ()):
            asked[name] = getattr(job, name)
    refuse("model of a job", WorkloadError, model=asked["model"], job=job, source=source)
    keys = {key: getattr(job.plan, key) for key in DEFAULTS if getattr(job.plan, key) != DEFAULTS[key]}
    asked["plan"] = Plan(**(keys | plan_keys(asked["plan"])))
    return job


def _job_json(job: Job | None) -> dict[str, Any]:
    """What a document says about the job that it was taken from, if it was."""
    if job is None:
        return {}
    return {"from": {"framework": job.framework, "num_gpus": job.num_gpus, "unread": list(job.unread)}}


def _unread(job: Job | None) -> list[str]:
    """What a job says that no plan of ours holds, for below the answer."""
    return [f"not in the plan: {sentence}" for sentence in job.unread] if job else []
