"""`meshwise estimate`: the price of one plan, as tables, JSON, CSV or pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(help="A preset (gpt3-175b) or the path of a config.json.")]
ClusterOption = Annotated[
    str, typer.Option("--cluster", help="A preset, chip:count (a100-80g-sxm:512), or a TOML file.")
]


def add_to(app: typer.Typer) -> None:
    """Mount the command."""
    app.command()(estimate)


def estimate(
    model: Model,
    cluster: ClusterOption,
    plan: Annotated[str, typer.Option(help="tp=8,pp=4,... (see docs/notation.md) or a TOML file.")] = "",
    batch: Annotated[
        int | None, typer.Option(help="Global batch in sequences [one microbatch each].")
    ] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens of a sequence [what the model allows].")] = None,
    microbatch: Annotated[int, typer.Option(help="Sequences of a microbatch.")] = 1,
    kind: Annotated[str, typer.Option(help="train, evaluate or prefill.")] = "train",
    convention: Annotated[
        str, typer.Option(help="default, ideal, nersc-2024-02 or nersc-2024-10.")
    ] = "default",
    per_layer: Annotated[bool, typer.Option("--per-layer", help="Print the ops of one layer.")] = False,
    tokens: Annotated[float | None, typer.Option(help="Token budget: also print days and GPU-hours.")] = None,
    price: Annotated[float | None, typer.Option(help="Price of a GPU-hour, for the token budget.")] = None,
    watts: Annotated[float | None, typer.Option(help="Power of a GPU in watts [the chip's].")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the ledger to this CSV file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw time, memory and roofline (png, svg, pdf).")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the timeline of all ranks for Perfetto.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Price one training step (or forward) of MODEL under a parallel plan, without running it."""
    from meshwise.report.request import Budget, Request, respond

    request = Request(
        model=model,
        cluster=cluster,
        plan=plan,
        batch=batch,
        seq=seq,
        microbatch=microbatch,
        kind=kind,
        convention=convention,
        budget=Budget(tokens=tokens, price_per_gpu_hour=price, watts=watts),
    )
    answer = respond(request)
    if csv is not None:
        answer.write_csv(csv, per_layer=per_layer)
    if plot is not None:
        from meshwise.report.estimate_plot import draw_estimate

        draw_estimate(answer.estimate, plot)
    if trace is not None:
        from meshwise.report.estimate_trace import write_timeline

        write_timeline(answer.estimate, trace)
    if json:
        from meshwise.cli.output import print_json

        print_json(answer.to_json(per_layer=per_layer))
    else:
        from meshwise.cli.output import console
        from meshwise.report.estimate_table import print_estimate

        print_estimate(answer, console(), per_layer=per_layer)
