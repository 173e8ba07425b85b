"""`meshwise search`: the fastest plans that fit, out of all."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwise import api
from meshwise.cli.job import FromOption, job_json, need_model, with_job
from meshwise.cli.options import ClusterOption, HtmlOption, JsonOption, OptionalModel, PriceOption, SeqOption
from meshwise.cli.output import console, print_json, write_html
from meshwise.core.errors import WorkloadError
from meshwise.core.files import check_writable, csv_text, write_text


def search(
    cluster: ClusterOption,
    model: OptionalModel = None,
    batch: Annotated[int | None, typer.Option(help="Global batch in sequences.")] = None,
    seq: SeqOption = None,
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
    assumptions: Annotated[
        bool, typer.Option("--assumptions", help="Also say which rate, if it were lower, changes the choice.")
    ] = False,
    vary: Annotated[
        str, typer.Option(help="Machines to compare: gpus=64|128,chip=...,memory=1|2,outer=1|2,domain=8|72.")
    ] = "",
    weak: Annotated[bool, typer.Option("--weak", help="With --vary: the batch grows with the GPUs.")] = False,
    tokens: Annotated[
        str | None, typer.Option(help="Tokens of the whole run, as 15T: also what the run takes.")
    ] = None,
    price: PriceOption = None,
    watts: Annotated[float | None, typer.Option(help="Power of a GPU, with --tokens [its chip's].")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the plans found to this CSV file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the trade-offs: .png, .svg or .pdf.")] = None,
    html: HtmlOption = None,
    source: FromOption = None,
    top: Annotated[int, typer.Option(help="How many plans to show.")] = 5,
    json: JsonOption = False,
) -> None:
    """Price every plan of MODEL and show the fastest that fit. Exit code 1 if none fits.

    With --vary, do so for each of many machines: scaling over numbers of GPUs, and co-design.
    """
    from meshwise.core.units import quantity
    from meshwise.estimate.token_budget import TokenBudget
    from meshwise.report.chart_picture import check_format
    from meshwise.report.pages import draw
    from meshwise.report.search_table import print_search, print_study, search_rows

    budget = TokenBudget(
        tokens=None if tokens is None else quantity(tokens, "--tokens"), price_per_gpu_hour=price, watts=watts
    )
    for path in (csv, plot):
        if path is not None:
            check_writable(path)
    if plot is not None:
        check_format(plot)
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
    job_inputs = {"plan": plan, "microbatch": _numbers(microbatch), "memory_frac": memory_frac, **inputs}
    name = need_model(job_inputs.pop("model"))
    found: Any
    if vary:
        alone = {"--beside": beside, "--from": source, "--assumptions": assumptions, "--html": html}
        for option in (option for option, value in alone.items() if value):
            raise WorkloadError(f"{option} is for one machine; leave it out with --vary")
        with _progress("machines") as say:
            found = api.study(name, cluster, vary, weak=weak, on_point=lambda _: say(1), **job_inputs)
        document, ok = found.to_json(budget), any(point.best for point in found.points)
    elif weak:
        raise WorkloadError("--weak is for several numbers of GPUs; add --vary gpus=64|128|...")
    else:
        with _progress("plans") as say:
            found = api.search(
                name, cluster, top=top, beside=beside, assumptions=assumptions,
                on_plans=lambda kept: say(kept.considered - say.total), **job_inputs,
            )  # fmt: skip
        found = found if present is None else replace(found, beside=present)
        document, ok = found.to_json(budget), bool(found.best)
        write_html(found, html)
    if csv is not None:
        write_text(csv, csv_text(search_rows(document)))
    if plot is not None:
        draw(found, plot)
    if json:
        print_json(document | ({} if job is None else {"from": job_json(job)}))
    elif vary:
        print_study(found, budget, console())
    else:
        print_search(found, console(), budget)
        for sentence in job.unread if job is not None else ():
            console().print(f"not in the plan: {sentence}", markup=False)
    if not document["complete"]:
        print("meshwise: stopped; these are the best of what was priced", file=sys.stderr)
        sys.exit(130)
    if not ok:
        raise typer.Exit(1)


class _progress:
    """How many are done, on stderr while the search runs, if that is a terminal."""

    def __init__(self, what: str) -> None:
        from rich.console import Console

        self.what, self.total = what, 0
        self._status = Console(stderr=True).status("")

    def __enter__(self) -> _progress:
        self._status.start()
        return self

    def __call__(self, more: int) -> None:
        self.total += more
        self._status.update(f"{self.total:,} {self.what} (Ctrl-C keeps what is known)")

    def __exit__(self, *_: object) -> None:
        self._status.stop()


def _numbers(text: str) -> list[int]:
    """`1|2|4` as numbers."""
    try:
        return [int(part) for part in text.split("|") if part]
    except ValueError:
        raise WorkloadError(f"--microbatch {text} must be whole numbers, as in 1|2|4") from None
