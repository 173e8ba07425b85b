"""`meshwise frontier`: one layer, a whole run, and the sensitivity of the answer to its assumptions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from meshwise import api
from meshwise.cli import complete
from meshwise.cli.options import JsonOption
from meshwise.cli.output import console, print_json
from meshwise.core.errors import WorkloadError

app = typer.Typer(help="The largest efficient training run, and what limits it.", no_args_is_help=True)


Chip = typer.Option(
    help="A chip or cluster of the catalog, or a TOML file.", autocompletion=complete.machines
)

Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Replace a law, an option or a number; repeatable."),
]
Utilization = Annotated[float, typer.Option(help="Share of the peaks that throttling leaves.")]
Months = Annotated[float | None, typer.Option(help="Longest duration, in months of 30 days [3].")]
Plot = Annotated[Path | None, typer.Option(help="Draw to this .png, .svg, .pdf or .html file.")]


@app.command()
def layer(
    d_in: Annotated[float, typer.Option(help="Inputs of the map.")],
    d_out: Annotated[float, typer.Option(help="Outputs of the map.")],
    batch: Annotated[float, typer.Option(help="Tokens of a microbatch, over all replicas.")],
    tp_in: Annotated[float, typer.Option(help="Ways the inputs are cut.")] = 1.0,
    tp_out: Annotated[float, typer.Option(help="Ways the outputs are cut.")] = 1.0,
    dp: Annotated[float, typer.Option(help="Replicas.")] = 1.0,
    elem_bytes: Annotated[float, typer.Option("--bytes", help="Bytes of a word.")] = 2.0,
    chip: Annotated[
        str | None, typer.Option(help="A chip or cluster of the catalog, or a TOML file.")
    ] = None,
    flop_per_s_8bit: Annotated[float | None, typer.Option("--flop-per-s-8bit")] = None,
    memory_bytes_per_s: Annotated[float | None, typer.Option()] = None,
    network_bytes_per_s: Annotated[
        float | None, typer.Option(help="Sent plus received, of one device.")
    ] = None,
    utilization: Utilization = 0.8,
    as_json: JsonOption = False,
) -> None:
    """Time a linear layer, forward and backward, on one microbatch."""
    from meshwise.published.frontier import Device, LinearLayer, find_device, layer_document

    rates = {
        "--flop-per-s-8bit": flop_per_s_8bit,
        "--memory-bytes-per-s": memory_bytes_per_s,
        "--network-bytes-per-s": network_bytes_per_s,
    }
    if chip is not None:
        for option, value in rates.items():
            if value is not None:
                raise WorkloadError(f"--chip {chip} has its own rates; leave {option} out")
        device = find_device(chip, utilization=utilization)
    elif flop_per_s_8bit is None or memory_bytes_per_s is None or network_bytes_per_s is None:
        raise WorkloadError(
            "give --chip, or all of --flop-per-s-8bit, --memory-bytes-per-s and --network-bytes-per-s"
        )
    else:
        device = Device(
            name="given",
            flop_per_s_8bit=flop_per_s_8bit,
            memory_bytes_per_s=memory_bytes_per_s,
            inner_bytes_per_s=network_bytes_per_s,
            outer_bytes_per_s=network_bytes_per_s,
            utilization=utilization,
        )
    document = layer_document(
        device,
        LinearLayer(d_in=d_in, d_out=d_out, tp_in=tp_in, tp_out=tp_out, dp=dp, elem_bytes=elem_bytes),
        batch,
    )
    _show(document, "print_layer", as_json)


@app.command()
def run(
    chip: Annotated[list[str], Chip],
    months: Months = None,
    utilization: Utilization = 0.7,
    settings: Settings = None,
    watts: Annotated[float | None, typer.Option(help="Watts per device, all included.")] = None,
    price: Annotated[float | None, typer.Option(help="Price of a device-hour.")] = None,
    plot: Plot = None,
    as_json: JsonOption = False,
) -> None:
    """Find the best utilization by compute, and the largest run."""
    from meshwise.published.frontier import run_document

    pairs = _pairs(settings)
    found = [api.frontier(name, months=months, utilization=utilization, **pairs) for name in chip]
    if plot is not None:
        from meshwise.report.frontier_page import draw_frontiers

        draw_frontiers(found, plot)
    documents = [run_document(one, watts=watts, price_per_device_hour=price) for one in found]
    if as_json and len(documents) > 1:
        _show({"runs": documents}, "print_run", as_json)
        return
    for document in documents:
        _show(document, "print_run", as_json)


@app.command()
def sensitivity(
    chip: Annotated[str, Chip],
    months: Months = None,
    utilization: Utilization = 0.7,
    settings: Settings = None,
    plot: Plot = None,
    as_json: JsonOption = False,
) -> None:
    """Change one choice at a time and find the limits again."""
    from meshwise.published.frontier import failure_sensitivity, find_device, settings_of
    from meshwise.published.frontier import sensitivity as vary

    run_settings, failures = settings_of(months, _pairs(settings))
    device = find_device(chip, utilization=utilization)
    rows = vary(device, run_settings)
    failure_rows = failure_sensitivity(device, run_settings, failures)
    if plot is not None:
        from meshwise.report.frontier_page import sensitivity_picture
        from meshwise.report.pages import draw

        draw(sensitivity_picture(rows), plot)
    document = {"device": device.name, "rows": rows, "with_failures": failure_rows}
    _show(document, "print_sensitivity", as_json)


def _show(document: dict[str, Any], printer: str, as_json: bool) -> None:
    if as_json:
        print_json(document)
    else:
        from meshwise.report import frontier_table

        getattr(frontier_table, printer)(document, console())


def _pairs(settings: list[str] | None) -> dict[str, str]:
    """`KEY=VALUE` texts as a dict; WorkloadError for one that is malformed or repeated."""
    pairs: dict[str, str] = {}
    for text in settings or []:
        key, equals, value = text.partition("=")
        if not equals:
            raise WorkloadError(
                f"--set {text!r} is not KEY=VALUE; write for example --set schedule=interleaved"
            )
        if key in pairs:
            raise WorkloadError(f"--set gives {key} twice; give it once")
        pairs[key] = value
    return pairs
