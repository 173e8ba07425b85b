"""`meshwise moe`: the arithmetic of a mixture-of-experts evaluation, and its what-ifs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwise.errors import WorkloadError

if TYPE_CHECKING:
    from meshwise.estimate.moe_inference import WhatIf
    from meshwise.layout.expert_pass import Pass


def add_to(parent: typer.Typer) -> None:
    """Mount the command."""
    parent.command()(moe)


def moe(
    config: Annotated[str, typer.Argument(help="A preset or file of transformer_lm_gpt fields.")] = (
        "en-moe-lm-15b"
    ),
    ranks: Annotated[int, typer.Option(help="Ranks that share the experts.")] = 4,
    passes: Annotated[int, typer.Option(help="Forward passes of a rank.")] = 5,
    dtype: Annotated[str, typer.Option(help="Element type.")] = "fp16",
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks of each of them.")] = 1,
    override: Annotated[str, typer.Option(help="Fields to change: decoder_layers=2,moe_freq=1.")] = "",
    fractions: Annotated[
        str, typer.Option(help="Capacity fractions of the what-ifs; 0 is the rule of training.")
    ] = "0,0.05,0.1,0.25,0.5,1",
    chips: Annotated[str, typer.Option(help="Chips of the what-ifs.")] = (
        "v100-16g-sxm,a100-80g-sxm,h100-80g-sxm,h200-sxm"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Count what evaluating a mixture-of-experts GPT costs a rank, and what would change it.

    The what-ifs vary capacity, dispatch, grouped GEMM and ranks: memory, exchange, useful FLOP, time a pass.
    """
    from dataclasses import asdict

    from meshwise.cli.output import print_json
    from meshwise.estimate.moe_inference import new_pass, report, what_ifs
    from meshwise.gpt_config import find_gpt_config
    from meshwise.hardware import find_cluster
    from meshwise.layout.expert_parallel import place

    found = find_gpt_config(config, override)
    if not found.num_moe_layers:
        raise WorkloadError(f"{config} has no mixture-of-experts layer; set moe_freq and moe_expert_count")
    if not found.vocab_size:
        raise WorkloadError(f"{config} does not say vocab_size; add --override vocab_size=N")
    place(ranks, found.moe_expert_count, ep=ranks)
    of = new_pass(found, ep=ranks, tp=tp, dtype=dtype)
    document = report(of, passes)
    shares = [_share(text) for text in fractions.split(",")]
    clusters = {chip: find_cluster(f"{chip}:{ranks * tp}") for chip in chips.split(",")}
    rows = what_ifs(_variants(of, shares), clusters)
    if as_json:
        print_json(document | {"what_ifs": [asdict(row) for row in rows]})
        return
    _show(document, rows)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise WorkloadError(f"--fractions: {text!r} is not a share from 0 to 1")
    return share


def _variants(of: Pass, shares: list[float]) -> dict[str, Pass]:
    """The config as it is and with one thing changed at a time."""
    from dataclasses import replace

    from meshwise.estimate.moe_inference import new_pass

    config = of.config
    same: dict[str, Any] = {"tp": of.tp, "dtype": of.dtype}
    variants = {"as configured": of}
    for share in shares:
        name = f"fraction {share:g}" if share else "capacity as in training"
        variants[name] = new_pass(config, ep=of.ep, token_fraction=share, **same)
    sparse = replace(config, use_tutel_moe=True)
    variants["sparse dispatch"] = replace(of, config=sparse)
    variants["grouped GEMM"] = replace(of, grouped=True)
    variants["sparse, grouped, as in training"] = new_pass(
        sparse, ep=of.ep, token_fraction=0.0, grouped=True, **same
    )
    ranks = int(of.ep)
    for other in (2 * ranks, 4 * ranks, 16 * ranks):
        if config.moe_expert_count % other == 0:
            variants[f"{other} ranks"] = replace(of, ep=other)
    return variants


def _show(document: dict[str, Any], rows: list[WhatIf]) -> None:
    from rich.table import Table

    from meshwise.cli.output import console
    from meshwise.units import duration, with_prefix

    out = console()
    for name, group in document.items():
        table = Table(title=name.replace("_", " "), title_justify="left", show_header=False, box=None)
        for key, value in group.items():
            shown = f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}"
            table.add_row(key, shown)
        out.print(table, "")
    table = Table(title="what if (one pass, one rank)", title_justify="left")
    for heading in (
        "",
        "slots",
        "exchange",
        "FLOP",
        "useful",
        "peak",
        "launches",
        *(rows[0].fits if rows else ()),
    ):
        table.add_column(heading, justify="right" if heading else "left")
    for row in rows:
        times = []
        for chip, fits in row.fits.items():
            time = duration(row.total_s[chip]) if chip in row.total_s else f"no {chip} rate"
            times.append(time if fits else "out of memory")
        table.add_row(
            row.name,
            f"{row.capacity:,.0f}",
            f"{row.exchange_bytes / 2**20:,.4g} MiB",
            with_prefix(row.flop, "FLOP"),
            f"{row.useful_frac:.0%}",
            with_prefix(row.peak_bytes, "B"),
            f"{row.launches:,.0f}",
            *times,
        )
    out.print(table)
