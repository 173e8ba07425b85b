"""`meshwise search`: the fastest plans that fit, out of all."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from meshwise import api
from meshwise.cli.estimate import ClusterOption, OptionalModel
from meshwise.cli.job import FromOption, job_json, need_model, with_job
from meshwise.cli.output import HtmlOption, console, print_json, write_html
from meshwise.core.errors import WorkloadError


def add_to(app: typer.Typer) -> None:
    """Mount the command."""
    app.command()(search)


def search(
    cluster: ClusterOption,
    model: OptionalModel = None,
    batch: Annotated[int | None, typer.Option(help="Global batch in sequences.")] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens of a sequence [what the model allows].")] = None,
    plan: Annotated[
        str, typer.Option(help="Keys that are fixed, or the values to try: tp=4|8,layout=*; or a TOML file.")
    ] = "",
    microbatch: Annotated[
        str, typer.Option(help="Sequences of a microbatch, or the numbers to try: 1|2|4 [all that divide].")
    ] = "",
    memory_frac: Annotated[float, typer.Option(help="Share of the memory that a plan may need.")] = 0.92,
    beside: Annotated[
        str | None, typer.Option(help="A plan to show beside the best one, term by term.")
    ] = None,
    html: HtmlOption = None,
    source: FromOption = None,
    top: Annotated[int, typer.Option(help="How many plans to show.")] = 5,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Price every plan of MODEL on a cluster and show the fastest that fit; exit 1 if none does."""
    inputs: dict[str, Any] = {"model": model, "batch": batch, "seq": seq}
    present, job = None, None
    if source is not None:
        if beside is not None:
            raise WorkloadError("--from shows its own plan beside the best; leave --beside out")
        taken, job = with_job(source, cluster, plan="", microbatch=None, **inputs)
        present = api.estimate(cluster=cluster, **taken)
        work = present.workload
        inputs = {"model": taken["model"], "batch": work.batch, "seq": work.seq}
    if inputs["batch"] is None:
        raise WorkloadError("say how many sequences a step has with --batch")
    result = api.search(
        need_model(inputs.pop("model")), cluster, plan, microbatch=_numbers(microbatch), top=top,
        memory_frac=memory_frac, beside=beside, **inputs,
    )  # fmt: skip
    if present is not None:
        result = replace(result, beside=present)
    write_html(result, html)
    if json:
        print_json(result.to_json() | ({} if job is None else {"from": job_json(job)}))
    else:
        from meshwise.report.search_table import print_search

        print_search(result, console())
        for sentence in job.unread if job is not None else ():
            console().print(f"not in the plan: {sentence}", markup=False)
    if not result.best:
        raise typer.Exit(1)


def _numbers(text: str) -> list[int]:
    """`1|2|4` as numbers."""
    try:
        return [int(part) for part in text.split("|") if part]
    except ValueError:
        raise WorkloadError(f"--microbatch {text} must be whole numbers, as in 1|2|4") from None
