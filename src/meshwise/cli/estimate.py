"""`meshwise estimate`: the price of one plan, as tables, JSON, CSV or pictures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwise import api
from meshwise.cli.job import FromOption, job_json, need_model, with_job
from meshwise.cli.options import (
    ClusterOption,
    HtmlOption,
    JsonOption,
    OptionalModel,
    PlanOption,
    PriceOption,
    SeqOption,
)
from meshwise.cli.output import console, print_json, write_html
from meshwise.core.errors import PlanError

if TYPE_CHECKING:
    from meshwise.published.convention import PublishedStep


def estimate(
    cluster: ClusterOption,
    model: OptionalModel = None,
    plan: PlanOption = "",
    batch: Annotated[
        int | None, typer.Option(help="Global batch in sequences [one microbatch each].")
    ] = None,
    seq: SeqOption = None,
    microbatch: Annotated[
        int | None, typer.Option(help="Sequences of a microbatch [1; in decoding, all of a rank].")
    ] = None,
    kind: Annotated[str, typer.Option(help="train, evaluate, prefill or decode.")] = "train",
    convention: Annotated[
        str, typer.Option(help="default, ideal, nersc-2024-02 or nersc-2024-10.")
    ] = "default",
    capacity_factor: Annotated[
        float | None, typer.Option(help="Most tokens of an expert over its even share; 0: all. [the model's]")
    ] = None,
    per_layer: Annotated[bool, typer.Option("--per-layer", help="Print the ops of one layer.")] = False,
    tokens: Annotated[
        str | None, typer.Option(help="Tokens of the whole run, as 15T: days, GPU-hours, failures.")
    ] = None,
    price: PriceOption = None,
    watts: Annotated[float | None, typer.Option(help="Power of a GPU in watts [the chip's].")] = None,
    mtbf: Annotated[
        float | None, typer.Option(help="GPU-hours between failures, with --tokens [50,700].")
    ] = None,
    storage: Annotated[
        str | None, typer.Option(help="Bytes/s that checkpoints are written with, as 200GB [122 MB/s a GPU].")
    ] = None,
    restart: Annotated[float | None, typer.Option(help="Seconds to restart after a failure [920].")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the ledger to this CSV file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw time, memory and roofline (png, svg, pdf).")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the timeline of all ranks for Perfetto.")] = None,
    html: HtmlOption = None,
    source: FromOption = None,
    json: JsonOption = False,
) -> None:
    """Price one training step of MODEL under a parallel plan. Also evaluation, prefill and decoding."""
    inputs: dict[str, Any] = {
        "model": model,
        "plan": plan,
        "batch": batch,
        "seq": seq,
        "microbatch": microbatch,
    }
    job = None
    if source is not None:
        inputs, job = with_job(source, cluster, **inputs)
    inputs |= {"model": need_model(inputs["model"]), "cluster": cluster, "kind": kind}
    from meshwise.published.convention import CONVENTIONS

    if convention in CONVENTIONS:
        others = {"--tokens": tokens, "--price": price, "--watts": watts, "--plot": plot, "--trace": trace}
        others |= {"--mtbf": mtbf, "--storage": storage, "--restart": restart, "--html": html}
        others |= {"--capacity-factor": capacity_factor}
        _refuse(convention, others)  # not --per-layer: the published tables are of one layer anyway
        tables = api.reproduce(convention, **inputs)
        _print_tables(tables, csv, json)
        return
    if convention not in ("default", "ideal"):
        known = ", ".join(("default", "ideal", *CONVENTIONS))
        raise PlanError(f"--convention {convention} must be one of {known}")
    from meshwise.core.units import quantity
    from meshwise.estimate.token_budget import TokenBudget

    budget = TokenBudget(
        tokens=None if tokens is None else quantity(tokens, "--tokens"),
        price_per_gpu_hour=price,
        watts=watts,
        gpu_hours_between_failures=mtbf,
        storage_bytes_per_s=None if storage is None else quantity(storage, "--storage"),
        restart_s=restart,
    )
    found = api.estimate(ideal=convention == "ideal", capacity_factor=capacity_factor, **inputs)
    run = budget.run(found)
    if csv is not None:
        (found.layer() if per_layer else found.ledger).to_csv(csv)
    write_html(found, html)
    if plot is not None:
        from meshwise.report.pages import draw

        draw(found, plot)
    if trace is not None:
        from meshwise.report.estimate_trace import write_timeline

        write_timeline(found, trace)
    from meshwise.report.estimate_table import layer_totals, print_estimate

    if not json:
        print_estimate(found, console(), run=run, per_layer=per_layer)
        for sentence in job.unread if job is not None else ():
            console().print(f"not in the plan: {sentence}", markup=False)
        return
    document = found.to_json(ledger=not per_layer) | ({"run": run} if run else {})
    if per_layer:
        layer = found.layer()
        document |= {"ledger": layer.to_json(), "layer": layer_totals(layer)}
    if job is not None:
        document["from"] = job_json(job)
    print_json(document)


def _refuse(convention: str, options: dict[str, Any]) -> None:
    for option, value in options.items():
        if value is not None:
            raise PlanError(f"convention {convention} has tables of one step only; leave {option} out")


def _print_tables(tables: PublishedStep, csv: Path | None, json: bool) -> None:
    """Print the tables of a published model, and write them with its columns and units to `csv`."""
    from meshwise.core.files import write_text
    from meshwise.report.published_table import print_published

    if csv is not None:
        write_text(csv, tables.to_csv())
    if json:
        print_json(tables.to_json())
    else:
        print_published(tables, console())
